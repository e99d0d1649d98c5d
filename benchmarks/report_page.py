"""Pictures of a run's report, and how long it takes to open: `python benchmarks/report_page.py runs/tiny`.

Needs playwright and a Chromium (`--browser PATH`, else one from the search path). The picture in docs/report.md was
made from a default run with `--out docs/images/report.png`.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from verl_mt.extensions.inspection.report.__main__ import main as write_report

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 where there is no browser."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", help="run directory")
    parser.add_argument("--out", default="report.png", help="picture of the worst rollout of its last step")
    parser.add_argument("--browser", help="a Chromium")
    parser.add_argument("--width", type=int, default=1060)
    parser.add_argument("--height", type=int, default=1160)
    parser.add_argument("--scheme", choices=("light", "dark"), default="light")
    args = parser.parse_args(argv)
    browser = args.browser or next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser is None:
        print(f"error: no browser: none of {', '.join(_BROWSERS)} is installed; name one: --browser", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        if status := write_report([args.run, "--out", str(page)]):
            return status
        opened_ms = _picture(page, browser, args)
    print(f"opened in {opened_ms} ms; {args.out}: {Path(args.out).stat().st_size / 1e3:.0f} kB")
    return 0


def _picture(page: Path, browser: str, args: argparse.Namespace) -> int:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        view = chromium.new_page(viewport={"width": args.width, "height": args.height}, color_scheme=args.scheme)
        view.goto(page.as_uri())
        view.wait_for_selector("html[data-opened]")
        opened_ms = view.evaluate("Number(document.documentElement.dataset.opened)")
        view.get_by_role("link", name="Open the worst rollout").first.click()
        view.get_by_role("button", name="Tokens", exact=True).click()
        view.locator(".stream .t.trained").nth(12).click()
        view.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
        view.screenshot(path=args.out)
        chromium.close()
    return opened_ms


if __name__ == "__main__":
    sys.exit(main())
