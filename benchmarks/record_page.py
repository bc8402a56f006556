"""Screenshots of the server's page: `python benchmarks/record_page.py` redraws docs/images/page.png.

Starts `underdraw serve` with the embedded model and drives Chromium: a race of plain against speculative decoding,
recorded in the middle. `--all FOLDER` also records the page before, during and after, with a map, at 1440 and 390
pixels, light and dark, to look at. Needs the packages of the extra `dev` and Chromium.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "page.png"
PROMPT = "a fox, 3D render, on a sky blue background"
SIZES = {"wide": (1440, 1000), "narrow": (390, 844)}


@contextlib.contextmanager
def serve(model: str) -> Iterator[str]:
    """A server on a free port; gives its address."""
    command = [sys.executable, "-m", "underdraw", "serve", "--model", model, "--port", "0", "--quiet"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().split()[-1]
        finally:
            server.terminate()


def wait(page: Page, script: str, seconds: float = 300) -> None:
    """Wait until a script gives something true; the page's security policy forbids playwright's own way."""
    end = time.monotonic() + seconds
    while not page.evaluate(script):
        if time.monotonic() > end:
            raise SystemExit(f"waited {seconds:g} s in vain for {script}")
        page.wait_for_timeout(30)


def open_page(browser: Browser, url: str, size: tuple[int, int], theme: str, scale: int = 1) -> Page:
    width, height = size
    page = browser.new_context(
        viewport={"width": width, "height": height}, device_scale_factor=scale, color_scheme=theme
    ).new_page()  # type: ignore[arg-type]
    page.goto(url)
    wait(page, "() => document.querySelector('#facts').textContent")
    return page


def race(page: Page, seed: int, share: float) -> None:
    """Start a race and wait until speculative decoding has drawn a share of the picture."""
    page.fill("#prompt", PROMPT)
    page.fill("#seed-number", str(seed))
    page.click("#race")
    drawn = "document.querySelector('#sheet-b .count').textContent.split(' / ')"
    wait(page, f"() => {{ const c = {drawn}; return c.length == 2 && parseInt(c[0]) >= {share} * parseInt(c[1]); }}")


def record_all(browser: Browser, url: str, folder: Path, seed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, size in SIZES.items():
        for theme in ("light", "dark"):
            page = open_page(browser, url, size, theme)
            stages = {"empty": lambda: None, "race": lambda page=page: race(page, seed, 0.6)}
            stages["done"] = lambda page=page: wait(page, "() => !document.querySelector('#verdict').hidden")
            stages["map"] = lambda page=page: page.click("[data-view=accepted]")
            for stage, act in stages.items():
                act()
                page.wait_for_timeout(300)
                page.screenshot(path=folder / f"{name}-{theme}-{stage}.png", full_page=stage in ("done", "map"))
            page.context.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--url", help="of a server that runs already")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("-o", "--out", type=Path, default=PICTURE)
    parser.add_argument("--all", type=Path, metavar="FOLDER", help="record all stages, sizes and themes into a folder")
    options = parser.parse_args()
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        raise SystemExit("this needs Chromium; install it, for example with: apt-get install chromium")
    with contextlib.ExitStack() as stack:
        url = options.url or stack.enter_context(serve(options.model))
        playwright = stack.enter_context(sync_playwright())
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        if options.all:
            record_all(browser, url, options.all, options.seed)
        else:
            page = open_page(browser, url, (1240, 840), "light", scale=2)
            race(page, options.seed, 0.6)
            page.screenshot(path=options.out)
        browser.close()


if __name__ == "__main__":
    main()
