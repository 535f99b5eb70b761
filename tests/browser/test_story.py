"""The story on the page: one sentence that is measured, what is off in every view, and no stale claims."""

from __future__ import annotations

import pytest

import clearhead as ch
from clearhead.inside.ablation import effect
from clearhead.inside.graph import without_edges
from clearhead.inside.story import explain
from tests.explorer.toys import TEXTS, toy

pytestmark = pytest.mark.ledger("F2", "X4")
TEXT = "The king's men speak of the king"


@pytest.mark.slow
def test_the_sentence_is_measured_and_a_card_can_be_shared(watched, served):
    seen = watched().open(served("decoder").url)
    seen.read(TEXT)
    told = explain(toy("decoder"), TEXT)
    story = seen.look("path", "#story")
    assert story.inner_text().replace(" ", "") == told.sentence.replace("“", "").replace("”", "").replace(
        " ", ""
    )
    part = story.get_attribute("data-head")
    off = effect(toy("decoder"), TEXT, [part])
    assert told.head is not None
    assert told.head.after == pytest.approx(off.after.softmax(-1)[off.before.argmax()].item(), abs=1e-6)
    with seen.page.expect_download() as card:
        seen.page.click("#share")
    assert card.value.suggested_filename == "story.png"
    # The heads open on the head of the story, though they were drawn before it was known; nobody pinned it.
    seen.look("attention", "canvas.heat")
    seen.wait("name => document.querySelector('#attention-head').dataset.head === name", part)
    assert "head=" not in seen.page.url
    assert seen.wrong == []


def test_what_is_off_is_seen_in_every_view_and_bad_addresses_are_named(watched, served):
    seen = watched().open(
        f"{served('decoder').url}/#text=speak+of+it&off=0.1,9.9&head=7.7&position=99&how=no"
    )
    seen.page.locator("#dropped-note").wait_for()
    said = seen.texts("#dropped-note")[0]
    assert all(word in said for word in ("off=0.1,9.9", "head=7.7", "position=99", "how=no"))
    assert "text" not in said.replace("this page", "")
    assert seen.page.evaluate("clearhead.store.get('off')") == "0.1"
    for view in ("path", "lens", "flow"):
        seen.page.evaluate("id => clearhead.open(id)", view)
        assert seen.page.locator("#off-note [data-off='0.1']").inner_text() == "Head 0.1 is off ×"
    seen.wait("() => location.hash.includes('off=0.1') && !location.hash.includes('9.9')")
    seen.page.click("#off-note [data-off='0.1']")
    assert seen.page.locator("#off-note").count() == 0
    # A text that is typed and not read: what is shown is said to be of the text before.
    seen.page.fill("#input-text", "speak of the king")
    seen.page.locator("#typed-note").wait_for()
    seen.read("speak of the king")
    assert seen.page.locator("#typed-note").count() == 0
    assert seen.wrong == []


def test_a_choice_in_a_file_changes_the_sentence(watched, served, saved, tmp_path):
    seen = watched().open(served("decoder").url)
    seen.read("speak of it")
    file, tried = saved(seen, tmp_path / "page.html")
    file.look("path", "#story")
    file.look("ablate", "[data-heads]")
    for name in ("0.1", "1.0"):
        file.page.click(f"#ablate [data-heads='{name}']")
        file.wait(
            "name => document.querySelector('#ablate-answer').textContent.includes(`head ${name}`)", name
        )
        assert file.texts("#off-note")[0].startswith(f"Head {name} is off")
    assert tried == [] and file.wrong == []


GRAPH = "() => [...document.querySelectorAll('#graph-table [data-edge]')].map((one) => one.dataset.edge)"


@pytest.mark.slow
def test_edges_of_the_graph_are_tested_by_cutting_them(watched, served, saved, tmp_path):
    """What the page predicts and measures is what `inside` does, live and from a file."""
    m, text = toy("decoder"), TEXTS["decoder"]
    seen = watched().open(served("decoder").url)
    seen.read(text)
    seen.look("graph", "[data-edge]")
    assert 5 < len(seen.page.evaluate(GRAPH)) <= 24
    found = ch.graph(m, text, nodes=40, candidates=150)
    seen.near("#graph-logit", found.logit, 1e-4)
    file, tried = saved(seen, tmp_path / "graph.html")
    for page in (seen, file):
        page.look("graph", "[data-edge]")
        for key in page.page.evaluate(GRAPH)[:3]:
            source, target, kind = key.split(">")
            (edge,) = (
                one for one in found.edges if (one.source, one.target, one.kind) == (source, target, kind)
            )
            row = f'#graph-table [data-edge="{key}"]'
            page.page.click(f"{row} button")
            page.page.locator(f"{row} [data-change]").wait_for()
            (effect,) = without_edges(m, text, [edge])
            values = [
                page.values(f"{row} [data-{name}]", f"data-{name}") for name in ("value", "held", "change")
            ]
            assert [x for (x,) in values] == pytest.approx([edge.value, -edge.value, effect.change], abs=1e-4)
        page.page.fill("#graph-count", "3")
        assert len(page.page.evaluate(GRAPH)) == 3
    assert (seen.wrong, file.wrong, tried) == ([], [], [])
