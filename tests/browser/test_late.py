"""Answers that come late: the reader has gone on, and nothing of an older question is shown for a newer."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from clearhead.app.explorer.session import Opened
from clearhead.inside.inputs import prepare
from tests.explorer.toys import serving, toy

pytestmark = pytest.mark.ledger("F2", "S2", "S3")


class Held:
    """Requests that match a pattern are held back until `release`."""

    def __init__(self, page: Any, pattern: str) -> None:
        self.page, self.pattern = page, re.compile(pattern)
        self.routes: list[Any] = []
        self.holds = True

    def hear(self, route: Any) -> None:
        """Hold a request, or let it pass."""
        if self.holds:
            self.routes.append(route)
        else:
            route.continue_()

    def wait(self, count: int = 1) -> None:
        """Wait until so many requests are held."""
        for _ in range(500):
            if len(self.routes) >= count:
                return
            self.page.wait_for_timeout(10)
        raise AssertionError(f"nobody asks for {self.pattern.pattern}")

    def release(self, error: str | None = None) -> None:
        """Let those that are held go on, or answer them with an error; those that come later pass."""
        self.holds = False
        for route in self.routes:
            if error is None:
                route.continue_()
            else:
                route.fulfill(status=400, json={"error": error})
        self.routes.clear()
        self.page.wait_for_timeout(60)  # time for an answer to do harm


@contextlib.contextmanager
def holding(seen: Any, pattern: str) -> Iterator[Held]:
    """Hold back every request whose address matches."""
    held = Held(seen.page, pattern)
    seen.page.route(held.pattern, held.hear)
    yield held
    held.release()
    seen.page.unroute(held.pattern)


def quiet(seen: Any, section: str) -> None:
    """Wait until nothing of a section is being asked for."""
    seen.wait("id => !document.querySelector(`#${id} [aria-busy]`)", section)


def test_a_text_that_was_read_later_stays(watched, served):
    seen = watched().open(served("decoder").url)
    with holding(seen, r"/inside/run$") as held:
        seen.page.fill("#input-text", "speak")
        seen.page.press("#input-text", "Control+Enter")
        held.wait()
        older, held.routes = held.routes, []
        seen.page.fill("#input-text", "they speak of the king")
        seen.page.press("#input-text", "Control+Enter")
        held.wait()
        held.release()
        seen.wait("() => clearhead.store.get('run').tokens.text === 'they speak of the king'")
        with seen.page.expect_response(re.compile("/inside/run$")):
            held.routes = older
            held.release()
    assert seen.page.evaluate("clearhead.store.get('run').tokens.text") == "they speak of the king"
    assert seen.page.get_attribute("body", "aria-busy") is None


def test_an_old_error_is_not_shown_for_a_new_head(watched, served):
    seen = watched().open(served("decoder").url)
    seen.look("path", "[data-edge]")  # which names the head that is opened
    seen.wait("() => clearhead.store.get('leading')?.run === clearhead.store.get('run').run")
    opened = seen.look("attention", "[data-head][aria-pressed=true]").get_attribute("data-head")
    older, newer = [name for name in ("1.0", "0.1", "1.1") if name != opened][:2]
    layer, head = older.split(".")
    with holding(seen, rf"/attention/self/{layer}\?head={head}$") as held:
        seen.page.click(f"#attention [data-head='{older}']")
        held.wait()
        seen.page.click(f"#attention [data-head='{newer}']")
        seen.wait("name => document.querySelector('#attention-head').dataset.head === name", newer)
        held.release(error="an old error")
    assert seen.texts("#attention .problem") == [""]
    assert seen.page.get_attribute("#attention-head", "data-head") == newer


def test_an_older_answer_is_not_drawn_over_a_newer_one(watched, served):
    seen = watched().open(served("classifier").url)
    seen.look("worth", "tbody tr")
    pins = seen.page.locator("#answer .answer-pin")
    second = pins.nth(1).get_attribute("data-id")
    with holding(seen, rf"/occlusion\?.*token={second}$") as held:
        pins.nth(1).click()
        held.wait()
        seen.page.keyboard.press("Escape")
        quiet(seen, "worth")
        before = seen.texts("#worth-words")
        held.release()
    assert seen.texts("#worth-words") == before
    # What is chosen by the keyboard keeps it, though the list is drawn anew.
    pins.nth(1).focus()
    seen.page.keyboard.press("Enter")
    assert seen.page.evaluate("document.activeElement.dataset.id") == second


def test_what_takes_long_gives_way_before_it_is_computed_anew(watched, served):
    """A graph, effects and an answer without a part are gone as soon as another token is asked about."""
    seen = watched().open(served("decoder").url)
    seen.look("graph", "[data-edge]")
    with holding(seen, r"/job/graph") as held:
        seen.page.evaluate("clearhead.store.set('position', 2)")
        held.wait()
        assert seen.texts("#graph-picture, #graph-table, #graph-said") == ["", "", ""]
        seen.page.evaluate("document.querySelector('#graph .cancel').click()")
        held.release()
        quiet(seen, "graph")
    seen.page.locator("#graph-again, #graph-table [data-edge]").first.wait_for()
    if seen.page.locator("#graph-again").count():  # it was not there yet when it was cancelled
        seen.page.click("#graph-again")
    seen.page.locator("#graph-table [data-edge]").first.wait_for()
    assert seen.page.evaluate("clearhead.store.get('run').tokens.labels[2]") is not None
    seen.look("ablate", "#ablate-scale canvas")
    seen.page.evaluate("clearhead.store.set('off', '0.0')")
    seen.page.locator("#ablate-kl").wait_for()
    with holding(seen, r"/job/effects|/ablate$") as held:
        seen.page.evaluate("clearhead.store.set('position', 3)")
        held.wait(2)
        assert seen.page.locator("#ablate-scale canvas, #ablate-kl").count() == 0
        held.release()
    seen.page.locator("#ablate-kl").wait_for()
    seen.page.locator("#ablate-scale canvas").wait_for()


@pytest.mark.slow
def test_a_view_that_was_left_is_asked_for_again(watched, served):
    seen = watched().open(served("decoder").url)
    with holding(seen, r"/thumbnails/") as held:
        seen.page.evaluate("clearhead.open('attention')")
        held.wait()
        seen.page.evaluate("clearhead.open('next')")
        seen.page.locator("#next-table tbody tr").first.wait_for()
        first = seen.page.evaluate("clearhead.store.get('run').run")
        seen.page.click("#next-greedy")  # what was asked about the first text is dropped
        seen.wait("first => clearhead.store.get('run').run !== first", first)
        seen.page.click("#next-back")
        seen.wait("first => clearhead.store.get('run').run === first", first)
    seen.look("attention", "canvas.heat")
    thumbs = seen.texts("#attention-grid .thumb")
    assert seen.page.locator("#attention-grid button.head").count() == len(thumbs)
    # What is asked for ahead goes on too: it did not wait for the answer that was dropped.
    seen.wait("() => clearhead.source.kept.has(`run/${clearhead.store.get('run').run}/trace`)", seconds=10)


def test_a_view_whose_first_question_was_overtaken_is_not_busy_once_it_is_left(watched, served):
    seen = watched().open(served("classifier").url)
    with holding(seen, r"/occlusion\?") as held:
        seen.look("answer", ".answer-pin")
        seen.page.evaluate("clearhead.open('worth')")
        held.wait()
        seen.page.locator("#answer .answer-pin").nth(1).click()
        held.wait(2)
    quiet(seen, "worth")
    seen.look("attention", "canvas.heat")
    seen.page.wait_for_timeout(60)  # time for the observer of the view that was left
    assert [one for one in seen.busy() if one.startswith("worth")] == []


def test_nothing_is_asked_ahead_of_a_text_that_was_left(watched, served):
    """It was asked at the position of the longer text, which the shorter has not."""
    seen = watched().open(served("decoder").url)
    seen.look("next", "#next-table tbody tr")
    with holding(seen, r"/lens\?first=") as held:
        held.wait()
        seen.page.click("#next-greedy")
        held.wait(2)
    seen.wait("() => clearhead.source.kept.has(`run/${clearhead.store.get('run').run}/trace`)")
    assert seen.wrong == []


def test_a_drawer_at_a_token_that_is_no_column_is_filled(watched, served):
    """A classifier has one column; the map is asked for at a token, which is no request to drop."""
    seen = watched().open(served("classifier").url)
    seen.look("drawers", "summary")
    seen.page.click("#drawer-map > summary")
    seen.page.locator("#drawer-map svg").wait_for()
    before = seen.texts("#drawer-map .map-chosen")
    seen.page.click("#input-tokens [data-token='2']")
    another = "before => document.querySelector('#drawer-map .map-chosen')?.textContent !== before"
    seen.wait(another, before[0])
    quiet(seen, "drawers")
    assert seen.texts("#drawer-map .map-chosen") == seen.texts("#input-tokens [data-token='2'] > span")
    assert seen.wrong == []


@pytest.mark.slow
def test_an_example_until_the_model_is_there(watched):
    """Every section of the example works; nothing of it stays when the model has come."""
    may = threading.Event()

    def slowly():
        may.wait(60)
        return toy("decoder")

    with serving(Opened("slow", slowly)) as served:
        seen = watched()
        seen.page.goto(served.url)
        seen.page.locator("#input-tokens .chip").first.wait_for()
        assert "loading slow" in seen.texts("#model-name")[0]
        assert "recorded" in seen.page.inner_text("#banner")
        assert seen.page.is_disabled("#input-run")
        parts = {"flow": ".step", "attention": "canvas.heat", "lens": "td[data-value]", "next": "tbody tr"}
        for section, ready in {**parts, "cost": "#cost-flops"}.items():
            seen.look(section, ready)
        may.set()
        seen.wait("() => window.clearhead && clearhead.store.get('run') && clearhead.source.live")
        given = seen.page.evaluate("clearhead.store.get('model').example.text")
        assert seen.texts("#input-tokens .chip > span") == list(prepare(toy("decoder"), given).tokens.labels)
        assert not seen.page.is_disabled("#input-run")
        seen.read("speak")
        run = seen.page.evaluate("clearhead.store.get('run').run")
        assert seen.page.get_attribute("#export", "href").endswith(run)
        assert seen.wrong == []
