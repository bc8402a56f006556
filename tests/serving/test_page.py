"""The page in a real Chromium: it draws, races, cancels and says what went wrong, and talks to its server only."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_checkpoint
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright
from running_server import PROMPT, RunningServer, run_server
from slow_policies import SlowChain

from underdraw import Pipeline
from underdraw.serving import drawing

SIDE = 12  # codes
NOT_TO_THE_INTERNET = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"


def find_chromium() -> str:
    """Chromium, from Debian's package if there is none; the tests fail without it."""
    names = ("chromium", "chromium-browser", "google-chrome")
    if not any(map(shutil.which, names)):
        subprocess.run("apt-get update && apt-get install -y chromium", shell=True, capture_output=True, timeout=300)
    program = next(filter(None, map(shutil.which, names)), None)
    assert program, "the tests of the page need Chromium; install it, for example with: apt-get install chromium"
    return program


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=find_chromium(), args=["--no-sandbox", NOT_TO_THE_INTERNET]
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkpoint.write(tmp_path_factory.mktemp("models") / "page", side=SIDE, length=160)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[RunningServer]:
    pipe = Pipeline.from_pretrained(model, drafter="jacobi", tree=SlowChain())  # type: ignore[arg-type]
    with run_server(pipe, slots=2, queue=2) as running:
        yield running


@dataclass
class Visit:
    """One page, and what it asked for and complained about."""

    page: Page
    urls: list[str]
    problems: list[str]

    def wait(self, script: str, seconds: float = 60) -> Any:
        """Wait until a script gives something true; the page's security policy forbids playwright's own way."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            value = self.page.evaluate(script)
            if value:
                return value
            self.page.wait_for_timeout(20)
        raise AssertionError(f"waited in vain for {script}; status: {self.text('#status')}")

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)

    def start_drawing(self, prompt: str = PROMPT, seed: int = 3) -> None:
        self.page.fill("#prompt", prompt)
        self.page.fill("#seed-number", str(seed))
        self.page.press("#prompt", "Enter")


@pytest.fixture
def visit(browser: Browser, server: RunningServer) -> Iterator[Visit]:
    with open_page(browser, server.url) as opened:
        yield opened
        assert opened.problems == []
    wait_until_idle(server)


def wait_until_idle(server: RunningServer, seconds: float = 5) -> None:
    end = time.monotonic() + seconds
    while not server.engine.is_idle and time.monotonic() < end:
        time.sleep(0.01)
    assert server.engine.is_idle and server.engine.running == 0


class open_page:  # noqa: N801
    """A visit of the page at an address; every request that it made went to that address."""

    def __init__(self, browser: Browser, url: str, **options: Any) -> None:
        self.browser, self.url, self.options = browser, url, options

    def __enter__(self) -> Visit:
        self.context = self.browser.new_context(accept_downloads=True, **self.options)
        page = self.context.new_page()
        self.visit = Visit(page, [], [])
        page.on("request", lambda request: self.visit.urls.append(request.url))
        page.on("console", lambda message: self.visit.problems.append(message.text) if message.type == "error" else 0)
        page.on("pageerror", lambda error: self.visit.problems.append(str(error)))
        page.goto(self.url)
        self.visit.wait("() => document.querySelector('#facts').textContent")
        return self.visit

    def __exit__(self, *_: object) -> None:
        self.context.close()
        assert self.visit.urls
        assert [u for u in self.visit.urls if not u.startswith((f"{self.url}/", "data:", "blob:"))] == []


def tokens_drawn(visit: Visit) -> int:
    return int(visit.text("#r-tokens").split("/")[0])


def test_cells_appear_before_the_picture_is_finished(visit: Visit, model: Path, tmp_path: Path) -> None:
    visit.start_drawing()
    visit.wait("() => parseInt(document.querySelector('#r-tokens').textContent) > 12")
    partial = tokens_drawn(visit)
    assert partial < SIDE**2 and visit.page.is_visible("#cancel")
    # The sheet has colours where tokens are, and paper where there are none yet.
    pixels = np.asarray(
        Image.open(io.BytesIO(visit.page.screenshot(clip=visit.page.locator("#sheet-a canvas").bounding_box())))
    )
    assert pixels[: pixels.shape[0] // SIDE].std() > 5
    visit.wait("() => document.querySelectorAll('#history li').length === 1")
    assert tokens_drawn(visit) == SIDE**2 and not visit.page.is_visible("#cancel")
    with visit.page.expect_download() as download:
        visit.page.click("#download")
    assert download.value.suggested_filename == "a-red-fox-3.png"
    download.value.save_as(tmp_path / "fox.png")
    saved = Image.open(tmp_path / "fox.png")
    assert saved.text["prompt"] == PROMPT and saved.text["seed"] == "3"  # type: ignore[attr-defined]
    settings = json.loads(saved.text["settings"])  # type: ignore[attr-defined]
    expected = Pipeline.from_pretrained(model, tree="none")(
        PROMPT, seed=3, temperature=settings["temperature"], guidance_scale=settings["guidance"]
    )
    assert np.array_equal(np.asarray(saved), np.asarray(expected.images[0]))


def test_views_history_and_keyboard(visit: Visit) -> None:
    visit.start_drawing(seed=8)
    visit.wait("() => document.querySelectorAll('#history li').length === 1")
    visit.page.keyboard.press("Escape")  # out of the prompt
    for key, view, words in (("2", "accepted", "Bright"), ("3", "depth", "ahead"), ("4", "entropy", "uncertain")):
        visit.page.keyboard.press(key)
        assert visit.page.get_attribute(f"[data-view={view}]", "aria-checked") == "true"
        assert words in visit.text("#legend-text") and float(visit.text("#legend-high")) > 0
    visit.page.keyboard.press("1")
    assert not visit.page.is_visible("#legend")
    visit.page.keyboard.press("/")
    visit.page.keyboard.press("Control+A")
    visit.page.keyboard.type("ghost")
    visit.page.keyboard.press("Enter")
    visit.wait("() => document.querySelectorAll('#history li').length === 2")
    visit.page.click("#history li:last-child button")
    assert visit.page.input_value("#prompt") == PROMPT and visit.page.input_value("#seed-number") == "8"
    assert tokens_drawn(visit) == SIDE**2


def test_race_ends_identical(visit: Visit) -> None:
    visit.page.fill("#prompt", PROMPT)
    visit.page.click("#race")
    visit.wait("() => parseInt(document.querySelector('#sheet-b .count').textContent) > 6")
    assert visit.text("#status") == "Drawing."
    visit.wait("() => !document.querySelector('#verdict').hidden")
    assert visit.text("#verdict").startswith("identical in every pixel")
    assert "143 passes" in visit.text("#sheet-a .count")
    assert len(visit.page.query_selector_all(".sheet:visible, figure.sheet:not([hidden])")) >= 2


def test_cancel_frees_the_slot(visit: Visit, server: RunningServer) -> None:
    visit.start_drawing(seed=1)
    visit.wait("() => parseInt(document.querySelector('#r-tokens').textContent) > 6")
    visit.page.keyboard.press("Escape")
    visit.wait("() => document.querySelector('#status').textContent === 'Cancelled.'")
    wait_until_idle(server)
    visit.start_drawing(seed=2)
    visit.wait("() => document.querySelectorAll('#history li').length === 1")


def test_refusals_are_shown_in_words(browser: Browser, server: RunningServer) -> None:
    with open_page(browser, server.url) as visit:
        visit.page.route("**/draw", lambda route: route.continue_(post_data=json.dumps({"prompt": "x", "size": "9x9"})))
        visit.start_drawing()
        visit.wait("() => document.querySelector('#status').dataset.tone === 'error'")
        assert visit.text("#status") == "Size 9x9 is not one of this model's: 24x24."
        visit.page.unroute("**/draw")
        visit.page.route("**/draw", lambda route: route.abort())
        visit.start_drawing()
        visit.wait("() => document.querySelector('#status').textContent.includes('cannot be reached')")
        visit.page.unroute("**/draw")
        visit.start_drawing("a zebra")
        visit.wait("() => document.querySelectorAll('#history li').length === 1")


def test_refused_picture_leaves_the_one_before_it(browser: Browser, server: RunningServer) -> None:
    """The sheet, Download and Replay always speak of the same picture; an unfinished one cannot be saved."""
    with open_page(browser, server.url) as visit:
        visit.start_drawing(seed=5)
        visit.wait("() => document.querySelectorAll('#history li').length === 1")
        answer = {"error": {"message": "the server is warming up; try again in a moment."}}
        visit.page.route("**/draw", lambda route: route.fulfill(status=503, json=answer))
        visit.start_drawing(seed=6)
        visit.wait("() => document.querySelector('#status').dataset.tone === 'error'")
        assert visit.text("#status") == "The server is warming up; try again in a moment."
        assert tokens_drawn(visit) == SIDE**2 and visit.page.is_enabled("#download")
        visit.page.route("**/draw", lambda route: route.fulfill(status=502, body="<h1>Bad gateway</h1>"))
        visit.start_drawing(seed=6)
        visit.wait("() => document.querySelector('#status').textContent.includes('status 502 and no reason')")
        visit.page.unroute("**/draw")
        visit.start_drawing(seed=7)
        visit.wait("() => parseInt(document.querySelector('#r-tokens').textContent) > 6")
        visit.page.keyboard.press("Escape")
        visit.wait("() => document.querySelector('#status').textContent === 'Cancelled.'")
        assert 6 < tokens_drawn(visit) < SIDE**2
        assert not visit.page.is_enabled("#download") and not visit.page.query_selector("#history .current")
        visit.page.click("#history button")
        assert tokens_drawn(visit) == SIDE**2 and visit.page.is_enabled("#download")
        visit.page.click("#replay")
        visit.wait("() => parseInt(document.querySelector('#r-tokens').textContent) < 100")
        visit.page.keyboard.press("Escape")
        visit.wait(f"() => document.querySelector('#r-tokens').textContent === '{SIDE**2} / {SIDE**2}'")


def test_focus_stays_on_a_button(visit: Visit) -> None:
    """Buttons that vanish or rest while a picture is drawn hand the focus to Draw."""
    focused = "() => document.activeElement.id"
    visit.page.focus("#draw")
    visit.page.keyboard.press("Space")
    visit.wait("() => parseInt(document.querySelector('#r-tokens').textContent) > 6")
    assert visit.page.evaluate(focused) == "draw" and visit.page.get_attribute("#draw", "aria-disabled") == "true"
    visit.page.keyboard.press("Tab")
    assert visit.page.evaluate(focused) == "cancel"
    visit.page.keyboard.press("Enter")
    visit.wait("() => document.querySelector('#status').textContent === 'Cancelled.'")
    assert visit.page.evaluate(focused) == "draw"
    visit.page.focus("#race")
    visit.page.keyboard.press("Enter")
    visit.wait("() => parseInt(document.querySelector('#r-tokens').textContent) > 6")
    assert visit.page.evaluate(focused) == "draw"
    visit.page.keyboard.press("Escape")
    visit.wait("() => document.querySelector('#status').textContent === 'Cancelled.'")


def test_tab_order_names_and_words_for_screen_readers(visit: Visit) -> None:
    """The tab order is that of the columns; every control has a name without its shortcut or value."""
    order = ["draw", "race", "picture", "reset", "temperature", "guidance", "tree", "seed-number", "dice", "seed"]
    visit.page.focus("#suggestions button:last-child")
    focused = "() => document.activeElement.id || document.activeElement.dataset.view"
    for name in order:
        visit.page.keyboard.press("Tab")
        assert visit.page.evaluate(focused) == name
    names = {"slider": ("Temperature", "Guidance", "Guesses per pass", "Seed"), "button": ("Draw", "Download PNG")}
    for role, texts in (names | {"textbox": ("Prompt",), "radio": ("Entropy",)}).items():
        for text in texts:
            assert visit.page.get_by_role(role, name=text, exact=True).count() == 1, text  # type: ignore[arg-type]
    assert visit.page.get_attribute("#seed", "aria-valuetext") == "random"
    visit.start_drawing(seed=4)
    visit.wait("() => document.querySelectorAll('#history li').length === 1")
    assert visit.text("#status") == "Finished."
    assert visit.page.get_attribute("#sheet-a canvas", "aria-label") == f"The finished picture: {PROMPT}"
    assert visit.page.get_attribute("#history button", "aria-current") == "true"
    visit.page.focus("[data-view=picture]")
    visit.page.keyboard.press("ArrowDown")
    assert visit.page.evaluate(focused) == "accepted"
    assert "as a map" in str(visit.page.get_attribute("#sheet-a canvas", "aria-label"))


def test_seed_that_is_no_number_is_pointed_at(visit: Visit) -> None:
    visit.start_drawing(seed=-5)
    assert visit.page.evaluate("() => document.activeElement.id") == "seed-number"
    assert visit.text("#status") == "" and not visit.page.is_visible("#cancel")


def test_page_that_could_not_reach_the_server_tries_again(browser: Browser, server: RunningServer) -> None:
    with open_page(browser, server.url) as visit:
        visit.page.route("**/info", lambda route: route.abort())
        visit.page.reload()
        visit.wait("() => document.querySelector('#status').textContent.includes('cannot be reached')")
        visit.page.unroute("**/info")
        visit.start_drawing()
        visit.wait("() => document.querySelectorAll('#history li').length === 1")


def test_busy_server_says_so(browser: Browser, server: RunningServer) -> None:
    pipe = server.engine.pipe
    jobs = [server.engine.submit(pipe.request(PROMPT, num_images_per_prompt=4), id="load")]
    try:
        with open_page(browser, server.url) as visit:
            visit.start_drawing()
            visit.wait("() => document.querySelector('#status').dataset.tone === 'error'")
            assert "busy" in visit.text("#status") and "Try again in about" in visit.text("#status")
    finally:
        for job in jobs:
            server.engine.cancel(job)


def test_waiting_is_shown_until_the_first_pass(
    visit: Visit, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawing, "HEARTBEAT", 0.05)
    load = [server.engine.submit(server.engine.pipe.request(PROMPT), id=f"load-{index}") for index in range(3)]
    visit.start_drawing()
    visit.wait("() => document.querySelector('#status').textContent === 'Waiting: 2 pictures are ahead.'")
    server.engine.cancel(load[2])
    visit.wait("() => document.querySelector('#status').textContent === 'Waiting: 1 picture is ahead.'")
    for job in load:
        server.engine.cancel(job)
    visit.wait("() => document.querySelector('#status').textContent === 'Drawing.'")
    visit.wait("() => document.querySelectorAll('#history li').length === 1")


def test_unknown_words_are_named_until_the_next_picture(
    visit: Visit, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(server.engine.pipe.model), "unknown_words", lambda model, texts: ["zebra"])
    load = server.engine.submit(server.engine.pipe.request(PROMPT, num_images_per_prompt=2), id="load")
    visit.start_drawing("a zebra")
    visit.wait("() => document.querySelector('#status').textContent.includes('not trained with “zebra”')")
    server.engine.cancel(load)
    visit.wait("() => document.querySelectorAll('#history li').length === 1")
    assert "zebra" in visit.text("#status")


def test_key_is_asked_for(browser: Browser, model: Path) -> None:
    with (
        run_server(Pipeline.from_pretrained(model, tree="chain:depth=4"), api_key="correct horse") as running,
        open_page(browser, running.url) as visit,
    ):
        assert visit.page.is_visible("#key")
        visit.start_drawing()
        visit.wait("() => document.querySelector('#status').textContent.includes('needs an API key')")
        for wrong in ("wrong horse", "верный"):
            visit.page.fill("#key", wrong)
            visit.page.keyboard.press("Enter")
            visit.wait("() => document.querySelector('#status').textContent.includes('not the API key')")
        visit.page.fill("#key", "correct horse")
        visit.page.keyboard.press("Enter")
        visit.wait("() => document.querySelectorAll('#history li').length === 1")
        assert not visit.page.is_visible("#key")


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (390, "dark")])
def test_nothing_overflows(browser: Browser, server: RunningServer, width: int, scheme: str) -> None:
    options = {"viewport": {"width": width, "height": 800}, "color_scheme": scheme}
    with open_page(browser, server.url, **options) as visit:
        assert visit.page.evaluate("() => document.documentElement.scrollWidth") <= width
        colour = visit.page.evaluate("() => getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, colour[4:-1].split(","))) > 600) == (scheme == "light")
        assert visit.problems == []


def test_embedded_model_on_the_page(browser: Browser) -> None:
    """The page as a newcomer meets it: the model of the package and the prompts that the page suggests."""
    with run_server(Pipeline.from_pretrained("tiny"), slots=2) as running, open_page(browser, running.url) as visit:
        titles = visit.page.evaluate(
            "() => [...document.querySelectorAll('#suggestions button')].map((it) => it.title)"
        )
        assert len(titles) == 5 and running.engine.pipe.model.unknown_words(titles) == []
        visit.page.click("#draw")
        visit.wait("() => document.querySelectorAll('#history li').length === 1", 300)
        assert float(visit.text("#r-rate")) > 1.5  # tokens per pass
        assert visit.problems == []


@pytest.mark.full
def test_embedded_model_races(browser: Browser) -> None:
    """Plain decoding takes 575 passes, which is long on a busy machine."""
    with run_server(Pipeline.from_pretrained("tiny"), slots=2) as running, open_page(browser, running.url) as visit:
        visit.page.click("#race")
        visit.wait("() => !document.querySelector('#verdict').hidden", 300)
        assert visit.text("#verdict").startswith("identical in every pixel; 575 passes became")
