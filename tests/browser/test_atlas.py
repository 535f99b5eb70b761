"""The head atlas, the bench of two texts, and what a saved file has of them."""

import json

import numpy as np
import pytest

from clearhead.app.explorer.record import export, record
from clearhead.inside.ablation import effect, effect_of_each
from clearhead.inside.attention import attention
from clearhead.inside.lens import contributions, followed
from clearhead.inside.patch import patch
from tests.browser.test_numbers import INPUTS
from tests.explorer.toys import toy

pytestmark = pytest.mark.ledger("F2", "K3")
ONE, TWO = "they speak of the king", "they speak of the men"


@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
@pytest.mark.slow
def test_a_file_has_the_inside_of_the_heads_it_opens_on(offline, family, tmp_path):
    """Every head where the page begins; elsewhere the file says what it has, and offers nothing else."""
    given, *target = INPUTS[family]
    made = record(toy(family), family, given, *target)
    seen, tried = offline(export(made, tmp_path / "page.html"))
    seen.look("head", "[data-source]")
    assert seen.texts("#head .problem") == [""] and seen.texts("#head-recorded") == [""]
    for entry in made["views"]["model"]["attentions"]:
        prefix = "" if entry["kind"] == "self" else f"{entry['kind']}."
        seen.page.evaluate("name => clearhead.store.set('head', name)", f"{prefix}{entry['layer']}.2")
        seen.page.locator("#head-which", has_text=f"Head {prefix}{entry['layer']}.2, read at").wait_for()
        assert seen.texts("#head .problem") == [""] and seen.texts("#head-recorded") == [""]
    if family == "decoder":
        seen.page.locator("#input-tokens .chip").nth(2).click()
        seen.page.locator("#head-recorded", has_text="only").wait_for()
        seen.look("path", "[data-go]").first.click()
        seen.page.locator("#path [data-edge]").first.wait_for()
        rows = "rows => rows.map((row) => [row.dataset.edge, row.textContent])"
        for edge in seen.page.eval_on_selector_all("#path-table tr", rows)[1:]:
            part, reader, source = edge[0].split("/")
            paths = (("Step through", f"stops/{part}/{reader}"), ("Why?", f"looks/{part}/{reader}/{source}"))
            for word, path in paths:
                assert (word in edge[1]) == (f"run/recorded/{path}" in made["views"])
    assert (seen.wrong, tried) == ([], [])


@pytest.mark.slow
def test_a_file_opens_on_the_selection_it_was_saved_with(watched, served, saved, tmp_path):
    """Another token, another head, one answer against another: all of it is in the file."""
    seen = watched().open(served("decoder").url)
    seen.read(INPUTS["decoder"][0])
    seen.look("path", "[data-edge]")
    seen.page.locator("#input-tokens .chip").nth(2).click()
    seen.page.locator("#answer-words", has_text="comes").wait_for()
    seen.page.locator("#answer-list [data-foil]").nth(1).click()
    seen.page.evaluate("() => clearhead.store.set('head', '1.2')")
    seen.wait("() => ['position=2', 'foil=', 'head=1.2'].every((one) => location.hash.includes(one))")
    seen.wait("() => document.querySelector('#path-sum').textContent.includes('less that of')")
    logit = seen.values("#path-logit")
    file, tried = saved(seen, tmp_path / "page.html")
    file.look("path", "[data-edge]")
    assert file.values("#path-logit") == pytest.approx(logit, abs=1e-6)
    file.look("head", "[data-source]")
    which = file.texts("#head-which")[0]
    assert which.startswith("Head 1.2, read at") and "(2)" in which
    assert file.texts("#head-recorded") == [""]
    assert (file.wrong, tried) == ([], [])


def coloured(seen, colour):
    """The number of each head in the atlas, by its name, once all of them are there."""
    seen.page.select_option("#attention-colour", colour)
    seen.wait("() => document.querySelectorAll('#attention-grid .head:not([data-value])').length === 0")
    values = "all => all.map((one) => [one.dataset.head, Number(one.dataset.value)])"
    return dict(seen.page.eval_on_selector_all("#attention-grid .head", values))


@pytest.mark.slow
def test_the_atlas_is_what_inside_says_live_and_in_a_file(watched, served, saved, tmp_path):
    """Each colour, the order, two heads and their difference; single parts off work without a model too."""
    m = toy("decoder")
    seen = watched().open(served("decoder").url)
    seen.read(ONE)
    seen.look("attention", "canvas.heat")
    effects = effect_of_each(m, ONE)
    heads = [name for name in effects.kl if ":" not in name]
    terms = {term.name: term.value for term in contributions(m, ONE).terms if term.head is not None}
    layers = attention(m, ONE, budget=None).of("self")
    patterns = {str(head.head): head for layer in layers for head in layer.heads()}
    assert coloured(seen, "off") == pytest.approx({name: effects.kl[name] for name in heads}, abs=1e-5)
    assert coloured(seen, "direct") == pytest.approx(terms, abs=1e-5)
    entropies = {name: float(one.entropy) for name, one in patterns.items()}
    assert coloured(seen, "entropy") == pytest.approx(entropies, abs=1e-5)
    coloured(seen, "off")
    seen.page.select_option("#attention-order", "most")
    assert seen.data("#attention-grid .head", "head") == sorted(heads, key=lambda name: -effects.kl[name])
    seen.page.select_option("#attention-order", "layer")
    seen.page.click('#attention-grid [data-head="0.1"]')
    seen.page.click('#attention-grid [data-head="1.2"]', modifiers=["Shift"])
    seen.page.locator('#attention-head[data-head="0.1"][data-beside="1.2"]').wait_for()
    less = patterns["0.1"].pattern - patterns["1.2"].pattern
    assert seen.values("#beside-most") == pytest.approx([less.flat[np.abs(less).argmax()]], abs=1e-5)
    assert seen.page.locator("#attention-large canvas.heat").count() == 3
    seen.wait("() => ['colour=off', 'beside=1.2'].every((one) => location.hash.includes(one))")
    file, tried = saved(seen, tmp_path / "page.html")
    file.page.locator('#attention-head[data-beside="1.2"]').wait_for()
    assert coloured(file, "off") == pytest.approx({name: effects.kl[name] for name in heads}, abs=1e-5)
    file.look("ablate", "[data-heads][data-value]")
    for selector, off in (("heads='1.2'", {"heads": "1.2"}), ("feedforwards='0'", {"feedforwards": "0"})):
        file.page.click(f"#ablate-grid [data-{selector}]")
        alone = effect(m, ONE, **off)
        file.near("#ablate-kl", alone.kl)
        ids = [int(one) for one in file.values("#ablate-table tbody tr", "data-id")]
        after = alone.after.softmax(-1)[ids].tolist()
        assert file.values("#ablate-table td[data-after]", "data-after") == pytest.approx(after, abs=1e-5)
        assert file.page.locator('#ablate-grid [aria-pressed="true"]').count() == 1
    assert not file.page.is_visible("#ablate-how")
    assert [*seen.wrong, *file.wrong, *tried] == []


def mapped(seen, selector):
    """The numbers of a map of both signs."""
    seen.page.locator(f"{selector} canvas.heat").first.wait_for()
    return json.loads(seen.page.locator(f"{selector} canvas.heat").first.get_attribute("data-values"))


@pytest.mark.slow
def test_the_bench_lays_two_texts_side_by_side(watched, served, saved, tmp_path):
    """Differences of lens and heads, and patches, equal `inside`; the address and a file bring it back."""
    m = toy("decoder")
    seen = watched().open(served("decoder").url)
    seen.read(ONE)
    seen.look("compare", "#compare-run")
    seen.page.fill("#compare-text", TWO)
    seen.page.click("#compare-run")
    best = contributions(m, ONE).choice
    token = int(effect_of_each(m, ONE).effects["0.0"].before.argmax())
    found = patch(m, ONE, TWO, parts=("heads", "residual"))
    sides = [{term.name: term.value for term in contributions(m, one, token).terms} for one in (ONE, TWO)]
    names = [f"{layer}.{head}" for layer in (0, 1) for head in range(3)]
    heads = [sides[0][name] - sides[1][name] for name in names]
    lensed = (followed(m, ONE, token) - followed(m, TWO, token)).flatten().tolist()

    def same(page):
        assert mapped(page, "#bench-heads") == pytest.approx(heads, abs=1e-5)
        assert mapped(page, "#bench-lens") == pytest.approx(lensed, abs=1e-5)
        for selector, one in zip(("#patch-heads", "#patch-tokens"), found.maps):
            assert mapped(page, selector) == pytest.approx(one.values.flatten().tolist(), abs=1e-5)

    same(seen)
    assert best in seen.texts("#bench-lens h4")[0]
    canvas = seen.page.locator("#patch-heads canvas.heat")
    box = canvas.bounding_box()
    canvas.click(position={"x": box["width"] * 5 / 6, "y": box["height"] / 4})
    seen.page.locator("#patch-said", has_text="head 1.2").wait_for()
    seen.page.locator("#patch-said button", has_text="Take it from B").click()
    expected = seen.page.evaluate("clearhead.store.get('off')")
    assert expected == "1.2" and seen.page.input_value("#ablate-how") == "second"
    seen.page.locator("#ablate-answer", has_text="From the second text: head 1.2").wait_for()
    seen.look("path", "[data-edge]")
    assert seen.page.locator("#path-table button", has_text="From B").count() > 0
    seen.look("compare", "#compare-kl")
    seen.wait("() => location.hash.includes('second=they')")
    again = watched().open(seen.page.url)
    again.page.locator("#compare-kl").wait_for()
    assert again.page.input_value("#compare-text") == TWO
    same(again)
    again.page.locator("#compare-shown [data-at]").nth(2).click()
    again.page.locator("#compare-shown [data-at='2'][aria-pressed=true]").wait_for()
    assert again.values("#compare-shown [data-at][aria-pressed=true]", "data-at") == [2]
    file, tried = saved(seen, tmp_path / "page.html")
    file.page.locator("#compare-kl").wait_for()
    same(file)
    assert not file.page.is_visible("#compare-run")
    assert [*seen.wrong, *again.wrong, *file.wrong, *tried] == []
