"""One selection for the whole page: in every view, in the address, in a file; and a path that adds up."""

import re

import pytest

import clearhead as ch
from clearhead.app.explorer.record import export, record
from clearhead.app.explorer.session import Opened
from clearhead.inside.attention import attention
from clearhead.inside.attribution import looks, paths
from clearhead.inside.inputs import prepare
from clearhead.inside.trace import trace
from tests.browser.test_numbers import INPUTS, column_of, shown
from tests.explorer.toys import hostile, serving, toy

pytestmark = pytest.mark.ledger("F2")
TEXT = "they speak of the king"
COVERED = """() => {
  const box = (one) => document.querySelector(one).getBoundingClientRect();
  return box(".tour").bottom - box("section.toured").top;
}"""


def selected(seen):
    """What each view says it is looking at: the token of the chips, lens, next, attention, and the answer."""
    return seen.page.evaluate(
        """() => ({
          chip: Number(document.querySelector('#input-tokens [aria-pressed="true"]').dataset.token),
          next: Number(document.querySelector('#next-position').value),
          lens: Number(document.querySelector('#lens-grid [aria-selected="true"]').dataset.column),
          attention: Number(document.querySelector('#attention-query').value),
        })"""
    )


@pytest.mark.slow
def test_one_selection_and_the_address_keeps_it(watched, served, saved, tmp_path):
    """A token chosen anywhere is chosen everywhere; a reload opens on the same text, token, head and view."""
    seen = watched().open(served("decoder").url)
    seen.read(TEXT)
    for section, ready in (("lens", "td[data-value]"), ("next", "tbody tr"), ("attention", "canvas.heat")):
        seen.look(section, ready)
    seen.page.click('#attention-grid [data-head="1.1"]')
    seen.page.wait_for_selector('#attention-head[data-head="1.1"]')
    seen.page.select_option("#attention-query", "2")
    assert selected(seen) == dict.fromkeys(("chip", "next", "lens", "attention"), 2)
    seen.page.locator("#input-tokens .chip").nth(3).click()
    assert selected(seen) == dict.fromkeys(("chip", "next", "lens", "attention"), 3)
    labels = prepare(toy("decoder"), TEXT).tokens.labels
    assert seen.texts("#attention-row") == [labels[3]]
    seen.look("ablate", "[data-heads]").first.click()
    seen.page.locator("#ablate-answer", has_text=f"read at “{labels[3]}”").wait_for()
    seen.page.click("#ablate-reset")
    seen.look("compare", "#compare-run").click()
    chosen = "[...document.querySelectorAll('#compare-shown [data-position][aria-pressed=true]')]"
    seen.wait(f"() => {chosen}.map((chip) => chip.dataset.position).join() === '3'")
    seen.look("attention", "canvas.heat")
    seen.wait("() => location.hash.includes('position=3') && location.hash.includes('head=1.1')")
    again = watched().open(seen.page.url)
    again.look("attention", "canvas.heat")
    assert again.texts("#input-tokens .chip > span") == list(labels)
    assert again.page.get_attribute("#attention-head", "data-head") == "1.1"
    assert again.page.input_value("#attention-query") == "3"
    again.page.keyboard.press("Escape")
    assert again.page.input_value("#attention-query") == str(len(labels) - 1)
    file, _ = saved(seen, tmp_path / "page.html")
    file.page.locator('#attention-head[data-head="1.1"]').wait_for()
    assert file.page.input_value("#attention-query") == "3"
    assert [*seen.wrong, *again.wrong, *file.wrong] == []


def test_small_weights_are_said_as_they_are(live):
    """A weight of a thousandth is no 0 %: chips hold two digits of what `attention` gives."""
    watched, prepared, given = shown(live, "decoder")
    pattern = attention(prepared.m, *given, budget=None).of("self")[0].pattern[0]
    watched.look("attention", "canvas.heat")
    watched.page.click('#attention-grid [data-head="0.0"]')
    watched.page.wait_for_selector('#attention-head[data-head="0.0"]')
    row = len(pattern) - 1
    watched.page.select_option("#attention-query", str(row))
    path = "`run/${clearhead.store.get('run').run}/attention/self/0`"
    body = watched.page.evaluate(f"clearhead.source.get({path})")
    assert body["pattern"]["type"] == "f32"
    said = [float(text.split()[0]) / 100 for text in watched.texts("#attention-large .looks .chip small")]
    assert said == pytest.approx(pattern[row].tolist(), rel=0.06)
    lines = watched.page.locator("#attention-large .link").count()
    assert lines == sum(weight > 0.02 for weight in pattern[row].tolist())


@pytest.mark.slow
def test_the_tour_shows_what_it_tells(watched, served):
    """Its head is open while it speaks of it, cross-attention too, and its card covers nothing of it."""
    seen = watched().open(served("encoder-decoder").url)
    seen.read("Ein Hund", "speak of it")
    seen.page.click("#tour")
    seen.page.locator(".tour").wait_for()
    titles = []
    while seen.page.locator("#tour-next").inner_text() == "Next":
        titles.append(seen.texts("#tour-title")[0])
        if titles[-1] == "Two stacks":
            seen.page.locator('#attention-head[data-head^="cross."]').wait_for()
        if titles[-1] == "Where it looks":
            words = seen.texts("#tour-words")[0]
            head, row, share = re.match(r"In head (\S+), “(.+)” gives ([\d.]+ %)", words).groups()
            seen.page.locator(f'#attention-head[data-head="{head}"]').wait_for()
            seen.page.locator("#attention-row", has_text=row).wait_for()
            assert share in seen.texts("#attention-large .looks small")
        assert seen.page.evaluate(COVERED) <= 1  # both at once: the page may be scrolling
        seen.page.click("#tour-next")
    assert {"Softmax", "Values are mixed", "Positions", "Two stacks"} <= set(titles)
    assert seen.wrong == []


def test_the_enlarged_head_is_beside_the_numbered_grid(watched, served):
    seen = watched(viewport={"width": 1440, "height": 900}).open(served("decoder").url)
    seen.look("attention", "canvas.heat")
    grid, large = (seen.page.locator(one).bounding_box() for one in ("#attention-grid", "#attention-large"))
    assert large["x"] >= grid["x"] + grid["width"] and large["y"] < grid["y"] + grid["height"]
    assert seen.texts("#attention-grid thead th")[1:] == ["0", "1", "2"]
    before = seen.page.locator("canvas.heat").bounding_box()["width"]
    context = "document.querySelector('canvas.heat').getContext('2d')"
    pixel = f"() => {context}.getImageData(0, 1, 1, 1).data.join()"
    for scale in ("most", "log"):
        was = seen.page.evaluate(pixel)
        seen.page.select_option("#attention-scale", scale)
        assert seen.page.evaluate(pixel) != was or scale == "most"
    seen.page.select_option("#attention-zoom", "2")
    assert seen.page.locator("canvas.heat").bounding_box()["width"] > before


@pytest.mark.parametrize("family", ["decoder", "encoder", "encoder-decoder", "classifier", "tagger", "vit"])
@pytest.mark.slow
def test_the_path_adds_up_and_is_what_inside_says(live, family):
    watched, prepared, (given, *target) = shown(live, family)
    column = column_of(family, prepared)
    watched.page.evaluate("place => clearhead.store.set('position', place)", column)
    watched.look("path", "[data-edge]")
    found = paths(prepared.m, given, position=column, target=target[0] if target else None)
    watched.near("#path-logit", found.logit)
    assert watched.values("#path-total") == pytest.approx([found.logit], abs=1e-4)
    listed = {f"{edge.part}/{edge.reader}/{edge.source}": edge.value for edge in found.strongest(12)}
    rows = watched.data("#path-table tr[data-edge]", "edge")
    assert [listed[row] for row in rows] == pytest.approx(watched.values("#path-table td.number"), abs=1e-5)
    gave = watched.values("#input-tokens .chip", "data-gave")
    assert gave == pytest.approx(found.sources.tolist(), abs=1e-5)
    edge = found.strongest(1)[0]
    watched.page.locator("#path-table button", has_text="Why?").first.click()
    watched.page.locator("#path-why h3").wait_for()
    reasons = looks(prepared.m, given, edge.part, edge.reader, edge.source, *target).edges
    why = sorted(reasons, key=lambda one: one.value < 0)[:6]  # what speaks for it comes first
    assert watched.values("#path-why [data-value]") == pytest.approx([one.value for one in why], abs=1e-4)


@pytest.mark.slow
def test_one_answer_against_another(watched, served, offline, tmp_path):
    """The rival is subtracted everywhere; the file of a run shows the same path without a network."""
    m, text = toy("decoder"), INPUTS["decoder"][0]
    seen = watched().open(served("decoder").url)
    seen.read(text)
    seen.look("path", "[data-edge]")
    best, second = (int(one) for one in seen.values("#answer-list [data-id]", "data-id")[:2])
    seen.page.locator("#answer-list [data-foil]").first.click()
    found = paths(m, text, best, against=second)
    seen.near("#path-logit", found.logit)
    seen.wait("foil => location.hash.includes(`foil=${foil}`)", second)
    file, tried = offline(export(record(m, "decoder", text), tmp_path / "page.html"))
    file.look("path", "[data-edge]")
    assert file.values("#path-logit") == pytest.approx([paths(m, text).logit], abs=1e-5)
    file.page.locator("#path-table button", has_text="Why?").first.click()
    file.page.locator("#path-why h3").wait_for()
    assert (file.wrong, tried) == ([], [])


@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
def test_inside_a_head_every_stop_is_a_step_of_the_trace(live, family):
    watched, prepared, (given, *target) = shown(live, family)
    part, head = ("blocks.1.cross", "cross.1.1") if target else ("blocks.1.attention", "1.1")
    watched.page.evaluate("([head]) => { clearhead.store.set('head', head); }", [head])
    watched.page.evaluate("() => clearhead.store.set('position', 2)")
    watched.look("head", "[data-source]")
    watched.page.locator("#head-which", has_text=f"Head {head}, read at").wait_for()
    steps = trace(prepared.m, given, *target)
    for place, name in ((1, "scores"), (2, "scaled"), (4, "pattern")):
        row = steps[f"{part}.{name}"].value[0, 1, 2]
        listed = [int(one) for one in watched.values("#head-table tr[data-source]", "data-source")]
        column = watched.values(f"#head-table tr td:nth-of-type({place})")
        assert column == pytest.approx(row[listed].tolist(), abs=1e-5)
    watched.page.locator("#head [data-stop=scale]").click()
    assert watched.page.locator("#head-table tbody tr:first-child .here").count() == 1
    assert watched.texts("#head-words .formula") == [steps[f"{part}.scaled"].formula]


@pytest.mark.slow
def test_an_unknown_word_and_a_missing_tokenizer_are_said(watched):
    """One plain sentence each: what the tokenizer does not know, and that there is none."""
    bare = ch.Model(toy("decoder").model)
    with serving(Opened("bare", lambda: bare, {"ids": [3, 4, 5]})) as served:
        seen = watched().open(served.url)
        assert "This model has no tokenizer: it reads token ids." in seen.texts("#input-about")[0]
        seen.page.fill("#input-text", "they speak")
        seen.page.click("#input-run")
        seen.page.locator("#input .problem", has_text="give token ids, whole numbers").wait_for()
        seen.read("3 4 5 6")
        assert seen.wrong == []
    with serving(Opened("words", lambda: hostile("classifier"))) as served:
        seen = watched().open(served.url)
        seen.read("nobody¦__proto__")
        assert "One of them is [UNK]" in seen.texts("#input-about")[0]
        assert seen.wrong == []
