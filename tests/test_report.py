"""The report page holds what it should, escaped and offline, and draws in a real browser; the card is valid."""

from __future__ import annotations

import html
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from builds import Answer, MadeBuild, good, settings_of, thinking
from shardmill.catalog import connect
from shardmill.files import read_json, write_json
from shardmill.paths import BuildPaths
from shardmill.quality.run import check_build
from shardmill.report import write_card, write_report
from shardmill.report.data import read_data
from shardmill.report.figures import flow
from shardmill.report.samples import pieces
from shardmill.settings import Settings

HOSTILE = "</script><script>window.stolen=1</script><img src=x onerror='window.stolen=1'> & \"quotes\""
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
THINKING: dict[str, Any] = {
    "model": {"name": "Qwen/Qwen3.6-27B", "thinking": True, "context": 32768},
    "servers": {"engine": "sglang", "endpoints": ["http://127.0.0.1:30000"]},
    "cost": {"usd_per_gpu_hour": 3.6, "usd_per_gb_month": 0.02},
}


def answers() -> list[Answer]:
    """Seven servers, one of which wears out, some failures, and a hostile prompt."""
    made = []
    for number in range(210):
        answer = replace(
            thinking(number, closed=number % 19 != 0),
            server=f"10.0.0.{number % 7 + 1}:30000",
            accept_length=1.6 if number % 7 == 3 and number > 100 else 3.0 - number / 1000,
        )
        if number % 60 == 9:
            answer = replace(answer, status="failed", reason="repetition")
        made.append(answer)
    made[9] = replace(made[9], question=HOSTILE)
    return made


def reported(root: Path, rows: list[Answer], chosen: Settings, **changes: Any) -> BuildPaths:
    build = MadeBuild(root, chosen, **changes).write(rows)
    check_build(build, chosen)
    write_report(build, chosen)
    write_card(build, chosen)
    return build


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> BuildPaths:
    return reported(tmp_path_factory.mktemp("report") / "made-0123456789", answers(), settings_of(**THINKING))


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> BuildPaths:
    """A build whose tokenizer is at hand, so that rows are shown token by token."""
    rows = [good(number, accept_length=None) for number in range(30)]
    return reported(tmp_path_factory.mktemp("report") / "small-0123456789", rows, settings_of())


def text_of(page: str) -> str:
    """The page's visible text: without plotly, styles and figures."""
    bare = re.sub(r"<(script|style)[^>]*>.*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", bare)).split())


def test_the_page_says_what_became_of_the_build(build: BuildPaths) -> None:
    text = text_of(build.report_page.read_text())
    report = read_json(build.quality_report)
    for said in (
        "Training rows 206",
        "Records read 215",
        "lone surrogates that became U+FFFD 2",
        "failed 4",
        "10.0.0.4:30000",
        "repetition",
        "no user turn",
        "Qwen/Qwen3.6-27B",
        "per million supervised tokens",
        "sampling.max_new_tokens",
        "Accept length",
    ):
        assert said in text, said
    assert "NaN and Infinity" not in text  # there were none
    for check in report["checks"]:
        assert check["title"] in text


def test_user_text_is_escaped_everywhere(build: BuildPaths) -> None:
    page = build.report_page.read_text()
    assert "<script>window.stolen" not in page
    assert "<img src=x" not in page
    assert "<script>alert" not in page  # the rejects' excerpt
    assert html.escape("<img src=x onerror=")[:16] in page


def test_the_page_needs_no_network(build: BuildPaths) -> None:
    page = build.report_page.read_text()
    assert "default-src 'none'" in page
    tags = re.findall(
        r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=[\"']([^\"']*)", page.split("<script>")[0]
    )
    assert tags == ["data:,"]
    assert page.count("plotly.js v") == 1


def test_a_failed_build_shows_examples_and_advice(tmp_path: Path) -> None:
    rows = [good(number, text=f"No {number}.") for number in range(30)]
    page = text_of(reported(tmp_path / "bad-0123456789", rows, settings_of()).report_page.read_text())
    assert "not passed" in page
    assert "An empty think block" in page


def test_rows_of_other_builds_stand_beside_those_made_here(tmp_path: Path) -> None:
    rows = [good(number, reused_from="sample-1111111111" if number % 3 == 0 else None) for number in range(30)]
    effort = {"cut_at_stop": 1, "degenerate": {"repetition": 1}, "faults": {"timed_out": 2}}
    build = reported(tmp_path / "more-2222222222", rows, settings_of(), effort=effort)
    text = text_of(build.report_page.read_text())
    for said in (
        "answered: training rows 30 made here 20 reused from sample-1111111111 10",
        "Server faults, all tried again: 4 timed out. Answers of no use, asked again: 2 repetition.",
        "Answers cut at their stop token: 2.",
    ):
        assert said in text, said
    assert "Of the rows, 10 are from sample-1111111111." in build.card.read_text()
    (bars,) = flow(read_json(build.quality_report)["accounting"], [], [], {"sample-1111111111": 10})["data"]
    drawn = zip(bars["y"][-3:], bars["base"][-3:], bars["x"][-3:], strict=True)
    assert list(drawn) == [("<b>training rows</b>", 0, 30), ("made here", 0, 20), ("from sample-1111111111", 20, 10)]


def test_checks_and_page_are_made_again_without_prompts(tmp_path: Path) -> None:
    """Of a build that was restored, or whose prompts were deleted: nothing is needed but completions and tokens."""
    chosen = settings_of(quality={"limits": {"failed": 1, "failed_by_reason": 1}})
    rows = [good(number, **({"status": "failed", "reason": "empty"} if number == 3 else {})) for number in range(30)]
    build = reported(tmp_path / "made-0123456789", rows, chosen)
    shutil.rmtree(build.root / "prompts")
    for made in (build.quality_report, build.report_page, build.card):
        made.unlink()
    report = check_build(build, chosen)
    write_report(build, chosen)
    write_card(build, chosen)
    assert report["passed"] and report["accounting"]["balanced"]
    text = text_of(build.report_page.read_text())
    assert "Training rows 29" in text and "1 empty" in text and "rejected 2" in text
    assert build.card.exists()


def test_a_build_without_a_row_has_no_verdict(tmp_path: Path) -> None:
    build = reported(tmp_path / "none-0123456789", [], settings_of())
    assert "none-0123456789 no verdict" in text_of(build.report_page.read_text())
    assert "No verdict (no rows) on" in build.card.read_text()


def test_an_unbalanced_build_says_so(tmp_path: Path) -> None:
    chosen = settings_of()
    build = reported(tmp_path / "bad-0123456789", [good(number) for number in range(20)], chosen)
    facts = read_json(build.build_json)
    facts["counts"]["records"] += 5
    write_json(build.build_json, facts)
    check_build(build, chosen)
    write_report(build, chosen)
    assert "does not balance" in text_of(build.report_page.read_text())


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [Answer(text=None, status="failed", reason="empty")],
        [replace(good(1), accept_length=None)],
    ],
    ids=["no rows", "failures only", "one row"],
)
def test_a_page_of_very_little(tmp_path: Path, rows: list[Answer]) -> None:
    build = reported(tmp_path / "tiny-0123456789", rows, settings_of(), rejects=0)
    assert build.report_page.exists()
    assert "NaN" not in build.quality_report.read_text()


def test_rates_over_time_add_up_to_the_tokens(build: BuildPaths) -> None:
    with connect(build) as connection:
        data = read_data(connection)
    timeline = data.timeline
    assert timeline is not None
    drawn = sum(sum(values) for values in timeline.tokens_per_s.values()) * timeline.width
    assert drawn == pytest.approx(data.totals["tokens"])
    assert sum(sum(values) for values in timeline.failures.values()) == 4
    assert sum(server["tokens"] for server in data.servers) == data.totals["tokens"]


def test_active_time_leaves_out_long_pauses(tmp_path: Path) -> None:
    """Rows come every 7 s and take 1.5 s; one server has all of them, so its pauses of 5.5 s count as activity."""
    chosen = settings_of()
    build = reported(tmp_path / "made-0123456789", [good(number) for number in range(11)], chosen)
    with connect(build) as connection:
        (server,) = read_data(connection).servers
    assert server["active_s"] == pytest.approx(10 * 7 + 1.5)
    spread = [replace(good(number), server=f"s{number % 20}:1") for number in range(40)]
    with connect(reported(tmp_path / "other-0123456789", spread, chosen)) as connection:
        servers = read_data(connection).servers
    assert [server["active_s"] for server in servers] == pytest.approx([3.0] * 20)


# -- samples


def spell(ids: Any) -> str:
    """Two ids make one character: 100+n begins it, 200+n ends it. Any other id is a letter of its own."""
    text, ids = "", list(ids)
    while ids:
        first = ids.pop(0)
        if first >= 100:
            text += "é" if 100 <= first < 200 and ids and ids[0] >= 200 else "�"
            if text[-1] == "é":
                ids.pop(0)
        else:
            text += chr(ord("a") + first)
    return text


def test_supervised_tokens_are_marked_by_the_mask_alone() -> None:
    shown = pieces([0, 1, 2, 3, 4], [0, 0, 1, 1, 0], spell)
    assert [(piece.text, piece.supervised) for piece in shown] == [
        ("a", False),
        ("b", False),
        ("c", True),
        ("d", True),
        ("e", False),
    ]


def test_a_character_of_several_tokens_is_one_piece() -> None:
    assert [piece.text for piece in pieces([0, 100, 200, 1], [1, 1, 1, 1], spell)] == ["a", "é", "b"]
    assert [piece.text for piece in pieces([0, 100], [1, 1], spell)] == ["a", "�"]


def test_long_parts_are_shortened_and_counted() -> None:
    ids, mask = [0] * 1000 + [1] * 2000, [0] * 1000 + [1] * 2000
    shown = pieces(ids, mask, spell)
    left_out = [piece.left_out for piece in shown if piece.left_out]
    assert len(left_out) == 2
    assert sum(left_out) + sum(not piece.left_out for piece in shown) == 3000


def test_rows_are_shown_token_by_token(embedded: BuildPaths) -> None:
    page = embedded.report_page.read_text()
    assert page.count('<details class="sample"') == 2
    assert page.count('<span class="piece on">') > 60


# -- a real browser


@contextmanager
def browser(profile: Path, width: int, dark: bool) -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for flag in (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-dev-shm-usage",
        f"--user-data-dir={profile}",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 700}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [theme]})
        yield driver
    finally:
        driver.quit()


def wait_until_drawn(driver: Any) -> None:
    deadline = time.monotonic() + 60
    while driver.execute_script("return document.documentElement.dataset.drawn") != "yes":
        assert time.monotonic() < deadline, driver.get_log("browser")
        time.sleep(0.1)


@pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs Debian's chromium and chromium-driver")
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)], ids=["wide-light", "phone-dark"])
def test_draws_in_chromium_without_a_word_on_the_console(
    build: BuildPaths, tmp_path: Path, width: int, dark: bool
) -> None:
    with browser(tmp_path / "profile", width, dark) as driver:
        driver.get(build.report_page.as_uri())
        wait_until_drawn(driver)
        plots = driver.execute_script(
            "return [...document.querySelectorAll('[data-figure]')].map(place => [place.dataset.figure, "
            "place.querySelectorAll('.trace, .point, .scatterlayer path').length, "
            "place.getBoundingClientRect().width])"
        )
        assert {name for name, _, _ in plots} == {
            "flow",
            "lengths-prompt",
            "lengths-answer",
            "lengths-thinking",
            "accept-by-length",
            "rates",
            "accept-over-time",
            "failures",
        }
        for name, marks, drawn_width in plots:
            assert marks > 0, name
            assert 250 < drawn_width <= width, name
        assert driver.execute_script("return window.stolen") is None
        assert driver.execute_script("return document.documentElement.scrollWidth") <= width
        background = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
        red = int(re.findall(r"\d+", background)[0])
        assert red < 60 if dark else red > 200
        # The theme changes while the page is open: plots are drawn again in its colours.
        other = {"name": "prefers-color-scheme", "value": "light" if dark else "dark"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [other]})
        time.sleep(0.5)
        assert driver.execute_script("return getComputedStyle(document.body).backgroundColor") != background
        driver.execute_script("document.querySelectorAll('summary').forEach(summary => summary.click())")
        assert [entry for entry in driver.get_log("browser") if entry["level"] != "INFO"] == []


# -- the dataset card


def test_the_card_has_the_hubs_header_and_its_files_exist(build: BuildPaths) -> None:
    _, header, body = build.card.read_text().split("---\n", 2)
    metadata = yaml.safe_load(header)
    assert metadata["size_categories"] == ["n<1K"]
    assert [config["config_name"] for config in metadata["configs"] if config.get("default")] == ["tokens"]
    for config in metadata["configs"]:
        files = sorted(path.name for path in build.root.glob(config["data_files"]))
        assert files == ["shard-00000-of-00002.parquet", "shard-00001-of-00002.parquet"]
    assert "206 answers" in body
    assert "| Prompts that failed (`failed`) | 1.9% | ≤ 2.0% |" in body


def test_datasets_reads_the_folder(build: BuildPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # read when the package is imported
    import datasets

    files = str(build.root / "tokens" / "shard-*.parquet")
    rows = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert len(rows) == 206
    assert rows.column_names[:4] == ["prompt_id", "conversation_id", "source_id", "turn"]
    by_card = datasets.load_dataset(str(build.root), split="train", cache_dir=str(tmp_path / "cache"))
    assert len(by_card) == 206
    assert by_card[0]["input_ids"]


def test_a_check_that_needs_prompts_says_when_it_was_judged(tmp_path: Path) -> None:
    chosen = settings_of()
    build = MadeBuild(tmp_path / "restored-0123456789", chosen).write([good(number) for number in range(20)])
    check_build(build, chosen)
    for path in build.root.glob("prompts/shard-*"):
        path.unlink()
    check_build(build, chosen)
    write_report(build, chosen)
    assert text_of(build.report_page.read_text()).count("Carried over from 20") == 2
    build.judged.unlink()
    check_build(build, chosen)
    write_report(build, chosen)
    assert text_of(build.report_page.read_text()).count("Not judged over all rows") == 2
