"""A real browser, a served page for each kind of model, and what both have logged."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from clearhead.app.explorer.session import Opened
from tests.explorer.toys import Served, serving, toy

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium")


class Watched:
    """A page with a log of what it asked for and what went wrong on it."""

    def __init__(self, context: Any) -> None:
        self.context, self.page = context, context.new_page()
        self.requests: list[str] = []
        self.wrong: list[str] = []
        self.page.set_default_timeout(20_000)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.wrong.append(f"page error: {error}"))
        self.page.on("console", self._console)
        self.page.on("dialog", self._dialog)

    def _console(self, said: Any) -> None:
        if said.type in ("error", "warning"):
            self.wrong.append(f"{said.type}: {said.text} at {said.location['url']}")

    def _dialog(self, dialog: Any) -> None:
        self.wrong.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def open(self, address: str) -> Watched:
        """Go there and wait until a run is shown."""
        self.page.goto(address)
        return self.ready()

    def ready(self) -> Watched:
        """Wait until a run is shown."""
        self.wait("() => window.clearhead && clearhead.store.get('run') && !clearhead.store.get('example')")
        return self

    def look(self, section: str, ready: str) -> Any:
        """Open a view, or scroll to what stays beside it, and wait for something in it."""
        self.page.evaluate("id => clearhead.open(id)", section)
        self.page.evaluate("id => document.getElementById(id).scrollIntoView({behavior: 'instant'})", section)
        found = self.page.locator(f"#{section} {ready}")
        found.first.wait_for()
        self.wait("id => !document.querySelector(`#${id} [aria-busy]`)", section)
        return found

    @contextlib.contextmanager
    def another_run(self) -> Iterator[None]:
        """Wait until what is done in the block has led to another run."""
        before = self.page.evaluate("clearhead.store.get('run').run")
        yield
        self.wait("before => clearhead.store.get('run').run !== before", before)

    def read(self, text: str, target: str | None = None) -> None:
        """Type a text and let the model read it."""
        with self.another_run():
            self.page.fill("#input-text", text)
            if target is not None:
                self.page.fill("#input-target", target)
            self.page.click("#input-run")

    def see(self, name: str, data: bytes) -> None:
        """Choose an image file and let the model see it."""
        with self.another_run():
            self.page.set_input_files("#input-image", {"name": name, "mimeType": "image/png", "buffer": data})

    def values(self, selector: str, attribute: str = "data-value") -> list[float]:
        """Numbers that the page holds in an attribute."""
        got = self.page.eval_on_selector_all(
            selector, "(nodes, name) => nodes.map((node) => node.getAttribute(name))", attribute
        )
        return [float(value) for value in got]

    def texts(self, selector: str) -> list[str]:
        """What stands in some elements."""
        return self.page.eval_on_selector_all(selector, "nodes => nodes.map((node) => node.textContent)")

    def data(self, selector: str, name: str) -> list[str]:
        """What some elements have under a name of their dataset."""
        return self.page.eval_on_selector_all(
            selector, "(all, name) => all.map((one) => one.dataset[name])", name
        )

    def near(self, selector: str, value: float, within: float = 1e-5) -> None:
        """Wait until an element holds a number."""
        self.wait(
            """([selector, value, within]) => {
              const node = document.querySelector(selector);
              return Boolean(node) && Math.abs(Number(node.dataset.value) - value) < within;
            }""",
            [selector, value, within],
        )

    def sample_by(self, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
        """Move the sliders of the next token."""
        given = {"temperature": temperature, "top-k": top_k, "top-p": top_p, "min-p": min_p}
        for name, value in given.items():
            self.page.fill(f"#next-{name}", str(value))

    def busy(self) -> list[str]:
        """The parts of the page that say they are at work."""
        return self.page.eval_on_selector_all(
            "[aria-busy]",
            "all => all.map((one) =>"
            " `${one.closest('section')?.id} ${one.id || one.className || one.tagName}`)",
        )

    def wait(self, condition: str, given: Any = None, seconds: float = 20) -> None:
        """Wait until a function of the page gives something true.

        The page's policy forbids polling from within the page.
        """
        end = time.monotonic() + seconds
        while not self.page.evaluate(condition, given):
            assert time.monotonic() < end, (
                f"never came true: {condition} of {given}; on the page: {self.wrong}; busy: {self.busy()}"
            )
            self.page.wait_for_timeout(15)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("chromium is not on this machine")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def watched(chromium) -> Iterator[Any]:
    """`watched(**options)`: a fresh page, in a context of its own."""
    with contextlib.ExitStack() as stack:

        def make(**options: Any) -> Watched:
            options.setdefault("viewport", {"width": 1280, "height": 720})
            context = stack.enter_context(contextlib.closing(chromium.new_context(**options)))
            return Watched(context)

        yield make


@pytest.fixture
def offline(watched) -> Callable[[pathlib.Path], tuple[Watched, list[str]]]:
    """`offline(path)`: the page of a file that can reach nothing but files, and a list of what it tried."""

    def make(path: pathlib.Path | None = None, **options: Any) -> tuple[Watched, list[str]]:
        seen, tried = watched(offline=True, **options), []

        def decide(route: Any) -> None:
            if route.request.url.startswith(("file:", "data:", "blob:")):
                return route.continue_()
            tried.append(route.request.url)
            return route.abort()

        seen.page.route("**/*", decide)
        return (seen if path is None else seen.open(path.as_uri())), tried

    return make


@pytest.fixture
def saved(offline) -> Callable[[Watched, pathlib.Path], tuple[Watched, list[str]]]:
    """`saved(page, path)`: the page of a file that this page saved, and what it tried to reach."""

    def make(seen: Watched, path: pathlib.Path) -> tuple[Watched, list[str]]:
        with seen.page.expect_download(timeout=120_000) as waiting:  # every view is computed for it
            seen.page.click("#export")
        waiting.value.save_as(path)
        return offline(path)

    return make


@pytest.fixture(scope="session")
def served() -> Iterator[Any]:
    """`served(family)`: a server for that model, started once."""
    with contextlib.ExitStack() as stack:
        running: dict[str, Served] = {}

        def of(family: str) -> Served:
            if family not in running:
                running[family] = stack.enter_context(serving(Opened(family, lambda: toy(family))))
            return running[family]

        yield of


@pytest.fixture(scope="session")
def live(chromium, served) -> Iterator[Any]:
    """`live(family)`: the page of that model, opened once; tests give it inputs of their own."""
    with contextlib.ExitStack() as stack:
        open_pages: dict[str, Watched] = {}

        def of(family: str) -> Watched:
            if family not in open_pages:
                context = stack.enter_context(
                    contextlib.closing(chromium.new_context(viewport={"width": 1280, "height": 720}))
                )
                open_pages[family] = Watched(context).open(served(family).url)
            return open_pages[family]

        yield of
