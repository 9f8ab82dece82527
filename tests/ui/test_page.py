"""The operator's page in a real browser, beside a real cluster under load: `make ui-test`.

With ISTHMUS_TEST_SCREENSHOTS set to a folder, its pictures are kept there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from isthmus_testing.browser import browser, why_not
from isthmus_testing.engines import prompt_of
from isthmus_testing.local_cluster import LocalCluster, local_cluster
from isthmus_testing.openai_client import Case, client, complete

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("clusters"),
]
SEEN_S = 60.0
PICTURES = "ISTHMUS_TEST_SCREENSHOTS"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("ui")
    with local_cluster([], folder / "state") as cluster:
        yield cluster


@pytest.fixture
def page(cluster: LocalCluster, tmp_path: Path) -> Iterator[Any]:
    with browser(tmp_path / "profile") as driver:
        driver.get(f"{cluster.url}/ui")
        yield driver
        said = [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
        assert said == [], "the browser's console has errors"


@contextlib.contextmanager
def load(cluster: LocalCluster, clients: int = 6) -> Iterator[None]:
    """Clients that ask again and again, in a thread with a loop of its own, until the block ends."""
    over = threading.Event()

    async def ask(number: int) -> None:
        async with client(cluster.url) as http:
            while not over.is_set():
                case = Case(prompt_of(300 + 40 * number, seed=number), max_tokens=80)
                assert (await complete(http, case)).error is None

    async def everyone() -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(clients):
                tasks.create_task(ask(number))

    thread = threading.Thread(target=lambda: asyncio.run(everyone()))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def until(driver: Any, what: str, script: str) -> Any:
    """Waits until the script's value is true; `what` is said if that never happens."""
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(driver, SEEN_S).until(lambda d: d.execute_script(f"return {script}"), what)


def text(driver: Any, identifier: str) -> str:
    words: str = driver.execute_script("return document.getElementById(arguments[0]).textContent", identifier)
    return words


def keep(driver: Any, name: str) -> None:
    folder = os.environ.get(PICTURES)
    if folder:
        driver.save_screenshot(str(Path(folder) / f"{name}.png"))


def test_the_page_shows_the_cluster_under_load(cluster: LocalCluster, page: Any) -> None:
    with load(cluster):
        until(page, "requests in flight", "document.querySelectorAll('#requests tbody tr').length >= 3")
        until(page, "a lane with bytes on it", "document.querySelector('#cluster .lane.live') !== null")
        until(page, "TTFT's line", "document.querySelector('#ttft path')?.getAttribute('d').length > 20")
        until(page, "ITL's quantiles", "/p99 \\d/.test(document.getElementById('itl').textContent)")
        until(page, "the prediction", "/predicted p50 \\d/.test(document.getElementById('ttft').textContent)")
        until(page, "tokens", "/tokens.s [1-9]/.test(document.getElementById('tokens').textContent)")
        picture = text(page, "cluster")
        for words in ("node-a · nvidia", "node-b · amd", "prefill-a (prefill)", "decode-b (decode)", "relay: ↑"):
            assert words in picture
        assert re.search(r"2 of 2 workers ready · [1-9]", text(page, "summary"))
        rows = text(page, "requests")
        assert "disaggregated" in rows
        assert "prefill-a" in rows
        if os.environ.get(PICTURES):
            drawn = "document.querySelector('#tokens path').getAttribute('d').split('L').length >= 30"
            until(page, "half a minute of lines", drawn)
        keep(page, "light")
        page.execute_script("document.getElementById('theme').click()")
        keep(page, "dark")
    background = page.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert background == "rgb(20, 23, 28)", "dark is dark"


def test_the_chat_box_works_with_the_keyboard_alone(page: Any) -> None:
    from selenium.webdriver import ActionChains, Keys

    until(page, "the cluster", "document.querySelector('#cluster svg') !== null")
    reached = []
    for _ in range(12):
        ActionChains(page).send_keys(Keys.TAB).perform()
        reached.append(page.execute_script("return document.activeElement.id || document.activeElement.className"))
        if reached[-1] == "chat-input":
            break
    assert reached == ["skip", "theme", "requests", "chat-input"]
    ActionChains(page).send_keys("Hello", Keys.ENTER).perform()
    until(page, "an answer", "document.querySelector('#chat-log .answer')?.textContent.length > 10")
    assert "Hello" in text(page, "chat-log")
    assert page.execute_script("return document.querySelector('#chat-log .error')") is None


def test_the_picture_says_in_words_what_it_shows(page: Any) -> None:
    until(page, "the cluster", "document.querySelector('#cluster svg') !== null")
    label = page.execute_script("return document.querySelector('#cluster svg').getAttribute('aria-label')")
    assert label.startswith("2 nodes. node node-a: prefill-a, prefill,")
    fields = "[...document.querySelectorAll('button, input')]"
    named = "(e) => e.labels?.length || e.ariaLabel || e.textContent"
    assert page.execute_script(f"return {fields}.every({named})")


def test_what_a_process_calls_itself_is_never_markup(page: Any) -> None:
    until(page, "the cluster", "document.querySelector('#cluster svg') !== null")
    for name in ("app.js", "picture.js", "plots.js"):
        source = page.execute_async_script(
            "const done = arguments[1]; fetch('/ui/' + arguments[0]).then((r) => r.text()).then(done)", name
        )
        assert "innerHTML" not in source, name
        assert "insertAdjacentHTML" not in source, name
