"""`shardmill monitor` in real Chromium while a build is at work: it moves by itself and tells no secret."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from builds import Answer, MadeBuild, good, settings_of
from shardmill.paths import shard_name
from shardmill.runlock import acquire
from simserver import SimFleet
from workspace import BIN, Workspace

if TYPE_CHECKING:
    from selenium.webdriver.remote.webdriver import WebDriver

CHROMIUM, CHROMEDRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
SECRET = "s3cr3t-k3y-of-the-servers"
NASTY = '<img src=x onerror="document.title=\'owned\'"> & "quotes"'

needs_chromium = pytest.mark.skipif(
    not (CHROMIUM.exists() and CHROMEDRIVER.exists()), reason="Chromium and ChromeDriver are not installed"
)


@contextmanager
def monitor(folder: Path, *arguments: str, environment: dict[str, str] | None = None) -> Iterator[str]:
    """The page's URL; the process is ended as a person does it."""
    process = subprocess.Popen(
        [str(BIN / "shardmill"), "monitor", "--port", "0", "--every", "1", *arguments],
        cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        found = re.search(r"http://\S+", said)
        assert found, said
        yield found.group()
    finally:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 0 and "Traceback" not in errors, errors


@contextmanager
def browser(width: int = 1400, height: int = 1000, scheme: str = "light") -> Iterator[WebDriver]:
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = Options()
        options.binary_location = str(CHROMIUM)
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(str(CHROMEDRIVER)))
        try:
            size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            media = [{"name": "prefers-color-scheme", "value": scheme}]
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
            yield driver
        finally:
            driver.quit()


def until(holds: Callable[[], Any], what: str, seconds: float = 90) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.3)
    return found


def text_of(driver: WebDriver, selector: str) -> str:
    return str(driver.execute_script("return document.querySelector(arguments[0]).innerText", selector))


def answered(driver: WebDriver) -> int:
    """The number in the first card's "12 of 32 prompts"; -1 before it is there."""
    card = driver.execute_script("return document.querySelector('#cards .card')?.innerText || ''")
    found = re.search(r"([\d,]+) of [\d,]+ prompts", card)
    return int(found.group(1).replace(",", "")) if found else -1


def get(url: str, host: str | None = None) -> tuple[int, bytes, dict[str, str]]:
    place = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=10)
    connection.request("GET", place.path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    return answer.status, answer.read(), {name.lower(): value for name, value in answer.getheaders()}


def small_build(tmp_path: Path) -> Path:
    answers: list[Answer] = [good(number, question=NASTY) for number in range(6)]
    answers += [good(6, status="failed", reason="repetition", question=NASTY)]
    settings = settings_of(servers={"engine": "sglang", "endpoints": ["http://127.0.0.1:1"], "api_key_env": "MILL_KEY"})
    build = MadeBuild(tmp_path / "results" / "sample-0123456789", settings).write(answers)
    return build.root


@needs_chromium
def test_the_page_moves_with_a_running_build(tmp_path: Path) -> None:
    config = {"length_mean": 400, "time_scale": 0.4, "mamba_slots": None, "max_running_requests": 3, "mtp": True}
    with SimFleet(2, config) as fleet:
        workspace = Workspace(
            tmp_path,
            {
                "servers": {"engine": "sglang", "endpoints": fleet.urls, "api_key_env": "MILL_KEY"},
                "prompts": {"limit": 32, "shards": 2},
                "sampling": {"max_new_tokens": 500},
                "quality": {"override": ["all"]},
            },
        )
        environment = {**workspace.environment(), "MILL_KEY": SECRET}
        run = workspace.start(environment=environment)
        try:
            until(lambda: (tmp_path / "results" / "latest").exists(), "the run to begin")
            with monitor(tmp_path, environment=environment) as url, browser() as driver:
                driver.get(url)
                first = until(lambda: max(answered(driver), 0), "a first answer")
                assert "at work" in text_of(driver, "#run")
                rows = until(lambda: driver.find_elements("css selector", "#servers tbody tr"), "the servers")
                assert len(rows) == 2
                until(lambda: "ready" in text_of(driver, "#servers"), "servers that are ready")
                assert "MTP is on" in text_of(driver, "#cards")
                until(lambda: answered(driver) > first, "more answers, with nobody touching the page")
                page = driver.page_source + get(url + "status.json")[1].decode()
                assert SECRET not in page and "--configfile" not in page
                assert complaints(driver) == [] and requested_hosts(driver) == {"127.0.0.1"}
        finally:
            run.kill()
            run.wait()


def complaints(driver: WebDriver) -> list[str]:
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def requested_hosts(driver: WebDriver) -> set[str]:
    hosts = set()
    for entry in driver.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            found = re.match(r"https?://([^/:]+)", message["params"]["request"]["url"])
            hosts.update([found.group(1)] if found else [])
    return hosts


@needs_chromium
@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (390, "dark")])
def test_wide_and_narrow_light_and_dark(tmp_path: Path, width: int, scheme: str) -> None:
    root = small_build(tmp_path)
    with monitor(tmp_path, "--build", str(root)) as url, browser(width, 844, scheme) as driver:
        driver.get(url)
        until(lambda: answered(driver) == 6, "the figures")
        assert driver.execute_script("return document.documentElement.scrollWidth") <= width
        ground = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
        light = sum(int(part) for part in re.findall(r"\d+", ground)[:3]) > 380
        assert light == (scheme == "light")
        driver.execute_script("document.querySelector('details').open = true")
        # A prompt's text stays text, also over a refresh, and what the reader has opened stays open.
        seen = text_of(driver, "#seen")
        until(lambda: text_of(driver, "#seen") != seen, "a refresh", 30)
        assert NASTY in text_of(driver, "#failures") and driver.title == root.name
        assert complaints(driver) == []


@needs_chromium
def test_a_monitor_that_has_gone_is_said_so(tmp_path: Path) -> None:
    root = small_build(tmp_path)
    with browser() as driver:
        with monitor(tmp_path, "--build", str(root)) as url:
            driver.get(url)
            until(lambda: answered(driver) == 6, "the figures")
        until(lambda: "does not answer" in text_of(driver, "#trouble"), "the sentence", 30)
        assert answered(driver) == 6  # what was there stays


def test_only_reading_and_only_for_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILL_KEY", SECRET)
    root = small_build(tmp_path)
    with (
        acquire(settings_lock(root), {"pid": 1, "command": f"snakemake --config key={SECRET}", "user": "ann"}),
        monitor(tmp_path, "--build", str(root)) as url,
    ):
        assert url.startswith("http://127.0.0.1:")
        status, body, headers = get(url + "status.json")
        assert status == 200 and json.loads(body)["prompts"]["ok"] == 6
        assert SECRET not in body.decode() and "ann" not in json.loads(body)["run"].values()
        assert "default-src 'none'" in headers["content-security-policy"] and headers["cache-control"] == "no-store"
        assert get(url + "status.json", host="evil.example")[0] == 403
        assert get(url, host="localhost:9999")[0] == 200  # through a tunnel
        assert get(url + "../../etc/passwd")[0] == 404 and get(url + "server.py")[0] == 404
        for method in ("POST", "PUT", "DELETE"):
            with pytest.raises(urllib.error.HTTPError, match="501"):
                urllib.request.urlopen(urllib.request.Request(url, method=method, data=b"x"), timeout=10)


def settings_lock(root: Path) -> Path:
    return root / "run" / "lock"


def test_no_page_names_another_place() -> None:
    import shardmill.monitor

    folder = Path(str(shardmill.monitor.__file__)).parent
    for name in ("page.html", "monitor.css", "words.js", "monitor.js"):
        urls = set(re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}", (folder / name).read_text()))
        assert urls <= {"http://www.w3.org"}, name  # SVG's namespace, which nothing is fetched from


def test_damaged_completions_are_told_on_the_page(tmp_path: Path) -> None:
    root = small_build(tmp_path)
    (root / "completions" / f"{shard_name(0, 2)}.parquet").write_bytes(b"nothing")
    with monitor(tmp_path, "--build", str(root)) as url:
        status, body, _ = get(url + "status.json")
    assert status == 503 and "`shardmill verify`" in json.loads(body)["error"]


def test_a_taken_port_is_one_sentence(tmp_path: Path) -> None:
    root = small_build(tmp_path)
    with monitor(tmp_path, "--build", str(root)) as url:
        port = url.rstrip("/").rpartition(":")[2]
        done = subprocess.run(
            [str(BIN / "shardmill"), "monitor", "--port", port, "--build", str(root)], capture_output=True, text=True
        )
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "--port" in done.stderr
