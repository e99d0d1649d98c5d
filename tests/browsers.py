"""A browser for the tests that click through the report and the site."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def browser() -> Iterator:
    """A tab of headless Chromium, which `page_lab.Opened` fills; skips with the reason where there is none.

    Of one module: as long as it is open, Playwright's event loop runs in this thread, and no other test can start one.
    """
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed")
    with api.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened.new_page()  # one for all tests: a window and its processes take longer than a report
        opened.close()
