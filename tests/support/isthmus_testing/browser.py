"""Headless Chromium, for tests of the page that the ingress serves."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SIZE = (1280, 1500)


def why_not() -> str:
    """Why the tests cannot run here; empty when they can."""
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    if missing:
        return f"needs {' and '.join(missing)} (Debian: apt install chromium chromium-driver)"
    if importlib.util.find_spec("selenium") is None:
        return "needs selenium: `make ui-test` installs it"
    return ""


@contextmanager
def browser(profile: Path) -> Iterator[Any]:
    """A `selenium` driver that reaches nothing but this machine."""
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    quiet = (
        "disable-background-networking",
        "disable-component-update",
        "disable-sync",
        "no-first-run",
        "disable-quic",
    )
    sandbox = ("no-sandbox",) if os.geteuid() == 0 else ()
    for flag in ("headless=new", "disable-gpu", "disable-dev-shm-usage", f"user-data-dir={profile}", *sandbox, *quiet):
        options.add_argument(f"--{flag}")
    options.add_argument("--window-size={},{}".format(*SIZE))
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        driver.set_page_load_timeout(60)
        yield driver
    finally:
        driver.quit()
