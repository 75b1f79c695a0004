"""Settings: the schema and its docs, defaults, and refusals that name the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardmill import config_docs, settings
from shardmill.config_schema import schema, typed
from shardmill.errors import SettingsError
from shardmill.files import write_json
from workspace import REPO


def every_key(node: dict[str, Any], where: str = "") -> list[tuple[str, dict[str, Any]]]:
    keys = [(f"{where}{key}", child) for key, child in node["properties"].items()]
    return keys + [pair for key, child in keys if "properties" in child for pair in every_key(child, f"{key}.")]


@pytest.mark.parametrize(("key", "node"), every_key(schema()))
def test_every_key_has_a_description_and_a_default(key: str, node: dict[str, Any]) -> None:
    assert node["description"].strip().endswith(".") or node["description"].strip().endswith(")")
    assert "default" in node
    if "properties" in node:
        assert node["additionalProperties"] is False


@pytest.mark.parametrize("name", ["config.yaml", "sharegpt.yaml", "qwen3.6-27b-b200.yaml"])
def test_settings_survive_the_file_that_jobs_read_them_from(name: str, tmp_path: Path) -> None:
    loaded = settings.load(REPO / "config" / name)
    path = tmp_path / "settings.json"
    write_json(path, loaded.as_dict())
    assert settings.frozen(path) == loaded
    # One of a version that knew fewer keys has their defaults.
    older = loaded.as_dict()
    del older["generate"]["patience_s"], older["cost"]
    write_json(path, older)
    assert settings.frozen(path).generate.patience_s == settings.load().generate.patience_s
    for damaged in ({**older, "servers": None}, {**older, "servers": [1]}):
        write_json(path, damaged)
        with pytest.raises(SettingsError, match="servers"):
            settings.frozen(path)


def test_config_readme_is_made_from_the_schema() -> None:
    assert (REPO / "config" / "README.md").read_text() == config_docs.render(), "run `make docs`"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"nam": "x"}, ["nam", "did you mean name?"]),
        ({"prompts": {"shrads": 3}}, ["prompts.shrads", "shards"]),
        ({"prompts": {"shards": 0}}, ["prompts.shards"]),
        ({"prompts": {"shards": "eight"}}, ["prompts.shards"]),
        ({"prompts": {"turns": "all"}}, ["prompts.turns"]),
        ({"prompts": None}, ["prompts"]),
        ({"sampling": {"temperature": "warm"}}, ["sampling.temperature"]),
        ({"sampling": {"top_k": 0}}, ["sampling.top_k"]),
        ({"dataset": {"sha256": "abc"}}, ["dataset.sha256"]),
        ({"dataset": {"path": []}}, ["dataset.path"]),
        ({"servers": {"launch": False}}, ["servers.launch", "endpoints"]),
        ({"servers": {"launch": True, "endpoints": ["http://a:1"]}}, ["servers.launch", "endpoints"]),
        ({"servers": {"engine": "sglang"}}, ["servers.gpus"]),
        ({"servers": {"endpoints": ["http://user:secret@host:1"]}}, ["servers.endpoints"]),
        ({"servers": {"endpoints": ["http://host:1/?api_key=s3cr3t"]}}, ["servers.endpoints"]),
        ({"servers": {"args": {"api-key": "s3cr3t"}}}, ["servers.args.api-key", "servers.api_key_env"]),
        ({"servers": {"args": {"--admin_api_key": "s3cr3t"}}}, ["servers.args.admin-api-key"]),
        ({"model": {"name": "Qwen/Qwen3-8B"}}, ["servers.engine", "Qwen/Qwen3-8B"]),
        ({"prompts": {"max_prompt_tokens": 9000}}, ["prompts.max_prompt_tokens", "8192"]),
        ({"generate": {"pilot_shards": 9}}, ["generate.pilot_shards"]),
        ({"quality": {"limits": {"no_such_check": 1}}}, ["quality.limits.no_such_check: known here are "]),
        ({"quality": {"override": ["no_such_check"]}}, ["no_such_check", "quality.override"]),
        ({"quality": {"checks_dir": "/no/such/folder"}}, ["quality.checks_dir"]),
        ({"s3": {"endpoint_url": "http://host:9000/bucket"}}, ["s3.endpoint_url", "scheme and host alone"]),
        ({"s3": {"endpoint_url": "host:9000"}}, ["s3.endpoint_url", "such as https://s3.example.org"]),
        ({"s3": {"bucket": "s3://mill"}}, ["s3.bucket", "without s3://"]),
        ({"s3": {"bucket": "mill/team"}}, ["s3.bucket", "s3.prefix"]),
        ({"s3": {"bucket": ""}}, ["s3.bucket", "or null"]),
        ({"s3": {"prefix": "/team"}}, ["s3.prefix", "without a slash"]),
        ({"name": "my build"}, ["name", "letters, digits, dots"]),
        ({"s3": {"secret_key": "x"}}, ["s3.secret_key"]),
    ],
)
def test_a_wrong_setting_is_refused_by_its_name(config: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SettingsError) as refused:
        settings.resolve(config)
    for word in words:
        assert word in str(refused.value)
    assert "\n" not in str(refused.value) and "s3cr3t" not in str(refused.value)


def test_every_pattern_has_its_words() -> None:
    """A person is told what a value must look like, not a regular expression."""
    nodes = [schema()]
    patterns = 0
    while nodes:
        node = nodes.pop()
        if isinstance(node.get("pattern"), str):
            patterns += 1
            assert node["x-form"] and not {"^", "$"} & set(node["x-form"])
        nodes += [child for child in node.values() if isinstance(child, dict)]
    assert patterns >= 7


def test_a_secret_in_an_endpoint_is_not_repeated() -> None:
    with pytest.raises(SettingsError) as refused:
        settings.resolve({"servers": {"endpoints": ["http://user:s3cr3t@host:1"]}})
    assert "s3cr3t" not in str(refused.value)


def test_launch_follows_from_the_endpoints() -> None:
    assert settings.resolve({}).servers.launch
    assert not settings.resolve({"servers": {"endpoints": ["http://a:1"]}}).servers.launch
    assert not settings.resolve({"servers": {"endpoints_file": "servers.txt"}}).servers.launch


def test_another_model_does_not_inherit_the_embedded_tokenizer() -> None:
    own = {"revision": "r1", "tokenizer": "here", "tokenizer_sha256": "a" * 64, "chat_template": "t.jinja"}
    base = {"model": {"name": settings.EMBEDDED_MODEL, "context": 2048, **own}}
    assert settings.layered(base, {"model": {"name": "m"}})["model"] == {"name": "m", "context": 2048}
    assert settings.layered(base, {"model": {"thinking": True}})["model"] == {**base["model"], "thinking": True}
    named = settings.layered(base, {"model": {"name": "m", "tokenizer": "there"}})
    assert named["model"] == {"name": "m", "context": 2048, "tokenizer": "there"}


def test_another_model_does_not_inherit_limits_made_for_the_embedded_one(tmp_path: Path) -> None:
    same, other = tmp_path / "same.yaml", tmp_path / "other.yaml"
    same.write_text("sampling: {max_new_tokens: 64}\n")
    other.write_text(
        "model: {name: m}\nservers: {engine: sglang, endpoints: ['http://a:1']}\nquality: {limits: {truncated: 0.2}}\n"
    )
    assert settings.load(same).quality.limits == settings.load().quality.limits != {}
    assert settings.load(other).quality.limits == {"truncated": 0.2}
    assert settings.load(REPO / "config" / "qwen3.6-27b-b200.yaml").quality.limits == {}


def test_values_of_the_command_line_are_what_they_say() -> None:
    said = {"prompts": {"limit": "200", "shards": "null", "dedupe": "false"}, "model": {"revision": "123"}}
    assert typed(said) == {
        "prompts": {"limit": 200, "shards": None, "dedupe": False},
        "model": {"revision": "123"},
    }


@pytest.mark.parametrize(("text", "words"), [("a: [", "YAML"), ("- a", "mapping"), ("", None)])
def test_a_broken_config_file_is_one_sentence(tmp_path: Path, text: str, words: str | None) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    if words is None:
        assert settings.load(file) == settings.load()
        return
    with pytest.raises(SettingsError, match=words) as refused:
        settings.load(file)
    assert str(file) in str(refused.value) and "\n" not in str(refused.value)
