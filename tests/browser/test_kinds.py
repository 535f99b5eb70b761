"""What each kind of model has of its own: words, patches, similarity, ribbon, drawers; live and in a file."""

import re

import pytest
import torch

import clearhead as ch
from clearhead.app.explorer.findings import findings
from clearhead.app.explorer.session import Opened
from clearhead.inside.attention import attention
from clearhead.inside.attribution import occlusion, paths
from clearhead.inside.geometry import neighbours, similarity
from clearhead.inside.inputs import prepare
from clearhead.inside.logit_attribution import firing
from clearhead.inside.patch import steering, steering_vector
from tests.browser.test_export import offline
from tests.browser.test_numbers import column_of, shown
from tests.explorer.toys import serving, toy
from tests.harness import scramble

NEAR = """([selector, value]) => {
  const node = document.querySelector(selector);
  return Boolean(node) && Math.abs(Number(node.dataset.value) - value) < 1e-5;
}"""
OVER = (
    "() => { const lane = document.getElementById('flow-lane'); return lane.scrollWidth - lane.clientWidth; }"
)
TEXTS = ("they speak of the king", "the men shall not")


def saved(seen, watched, path):
    """The page of a file that this page saved, with the network off, and what it tried to reach."""
    with seen.page.expect_download() as waiting:
        seen.page.click("#export")
    waiting.value.save_as(path)
    file, tried = offline(watched)
    return file.open(path.as_uri()), tried


@pytest.mark.ledger("F2")
@pytest.mark.parametrize("family", ["classifier", "tagger", "vit"])
@pytest.mark.slow
def test_words_and_patches_left_out(live, watched, family, tmp_path):
    page, prepared, (given, *_) = shown(live, family)
    column = column_of(family, prepared)
    page.page.evaluate("place => clearhead.store.set('position', place)", column)
    found = occlusion(prepared.m, given, position=column)
    order = (
        found.dropped.abs().argsort(descending=True).tolist() if family == "vit" else range(len(found.units))
    )
    file, tried = saved(page, watched, tmp_path / "page.html")
    for seen in (page, file):
        seen.look("worth", "[data-unit]")
        seen.wait(
            "first => document.querySelector('#worth-table [data-unit]')?.dataset.unit === first",
            found.units[order[0]],
        )
        values = [x for place in order for x in (float(found.dropped[place]), float(found.gradient[place]))]
        assert seen.values("#worth-table .number") == pytest.approx(values, abs=1e-5)
        assert len(seen.texts("#worth-pictures canvas")) == (2 if family == "vit" else 0)
    assert (page.wrong, file.wrong, tried) == ([], [], [])


@pytest.mark.ledger("F2")
@pytest.mark.slow
def test_a_sentence_encoder_compares_two_texts(watched, served, tmp_path):
    """It opens on the similarity of both texts; the address and the file keep them."""
    m = toy("vectors")
    seen = watched().open(served("vectors").url)
    seen.page.fill("#input-pair", TEXTS[1])
    seen.read(TEXTS[0])
    found = similarity(m, *TEXTS)
    seen.wait(NEAR, ["#similar-cosine", found.cosine])
    cells = found.states.flatten().tolist()
    assert seen.values("#similar-grid td") == pytest.approx(cells, abs=1e-5)
    seen.wait("() => location.hash.includes('pair=')")
    again = watched().open(seen.page.url)
    again.page.locator("#similar-cosine").wait_for()
    assert again.values("#similar-cosine") == pytest.approx([found.cosine], abs=1e-5)
    file, tried = saved(seen, watched, tmp_path / "page.html")
    file.look("similar", "td[data-value]")
    assert file.values("#similar-grid td") == pytest.approx(cells, abs=1e-5)
    assert file.texts("nav a:not([hidden])")[0] == "Similarity"
    assert (seen.wrong, file.wrong, tried) == ([], [], [])


@pytest.mark.ledger("F2")
@pytest.mark.slow
def test_an_encoder_decoder_opens_on_its_alignment(watched, served, tmp_path):
    m, (text, written) = toy("encoder-decoder"), TEXTS
    seen = watched().open(served("encoder-decoder").url)
    assert seen.texts("nav a[aria-current]") == ["Alignment"]
    seen.read(text, written)
    seen.page.evaluate("() => clearhead.store.set('position', 2)")
    patterns = torch.tensor(attention(m, text, written).of("cross")[1].pattern)
    best = patterns.mean(0)[2].sort(descending=True).values[:5].tolist()
    came = paths(m, text, position=2, target=written).memory.tolist()
    file, tried = saved(seen, watched, tmp_path / "page.html")
    for page in (seen, file):
        page.look("ribbon", ".ribbon-chosen")
        page.wait(NEAR, ["#ribbon-list .number", best[0]])
        assert page.values("#ribbon-list .number") == pytest.approx(best, abs=1e-6)
        page.wait("() => document.querySelector('#input-source [data-gave]')")
        assert page.values("#input-source .chip", "data-gave") == pytest.approx(came, abs=1e-5)
        page.page.select_option("#ribbon-head", "0.1")
        one = torch.tensor(attention(m, text, written).of("cross")[0].pattern)[1, 2].max()
        page.wait(NEAR, ["#ribbon-list .number", float(one)])
    assert (seen.wrong, file.wrong, tried) == ([], [], [])


@pytest.mark.ledger("F2")
@pytest.mark.slow
def test_drawers_show_neurons_a_map_and_steering(watched, served):
    m, text = toy("decoder"), TEXTS[0]
    seen = watched().open(served("decoder").url)
    seen.read(text)
    seen.look("drawers", "summary")
    for name in ("neurons", "map", "steer"):
        seen.page.locator(f"#drawer-{name} > summary").click()
    seen.page.locator("[data-neuron]").first.wait_for()
    found = firing(m, text, count=8)
    listed = seen.page.eval_on_selector_all("[data-neuron]", "rows => rows.map((row) => row.dataset.neuron)")
    assert listed == [one.name for one in found.neurons]
    assert seen.values("[data-neuron] td.number") == pytest.approx(
        [one.value for one in found.neurons], abs=1e-5
    )
    seen.page.locator("#drawer-map .number").first.wait_for()
    near = neighbours(m, prepare(m, text).tokens.ids[-1], 8)
    assert seen.values("#drawer-map .number") == pytest.approx(list(near.scores), abs=1e-5)
    seen.page.fill("#steer-toward", TEXTS[0])
    seen.page.fill("#steer-away", TEXTS[1])
    seen.page.fill("#steer-layer", "1")
    seen.page.fill("#steer-strength", "4")
    seen.page.click("#steer-go")
    seen.page.locator("[data-side=after]").wait_for()
    with steering(m, steering_vector(m, *TEXTS, 1), 1, 4.0):
        after = m.generate(text, 24, num_beams=1).text
    said = [one.strip() for one in seen.texts("#steer-out p")]
    assert said == [m.generate(text, 24, num_beams=1).text.strip(), after.strip()]
    assert seen.wrong == []


@pytest.mark.ledger("F2")
@pytest.mark.parametrize("family", ["decoder", "vit"])
@pytest.mark.slow
def test_examples_state_what_was_found_on_this_model(watched, family):
    found = findings(toy(family))
    assert len(found) == 5
    with serving(Opened(family, lambda: toy(family)), examples=True) as here:
        seen = watched().open(here.url)
        seen.wait("() => !document.getElementById('input-examples').hidden")
        assert seen.texts("#input-examples .soft") == [one["says"] for one in found]
        before = seen.page.evaluate("clearhead.store.get('run').run")
        seen.page.locator("#input-examples summary").click()
        seen.page.locator("#input-examples button").nth(1).click()
        seen.wait("before => clearhead.store.get('run').run !== before", before)
        if family == "vit":
            before = seen.page.evaluate("clearhead.store.get('run').run")
            seen.page.locator("#input-image ~ details summary").click()
            seen.page.locator(".pad").focus()
            for key in (" ", "ArrowUp", "ArrowLeft", " "):
                seen.page.keyboard.press(key)
            seen.wait("before => clearhead.store.get('run').run !== before", before)
        else:
            head, source = re.match(r"head (\S+) brings “(.+)” to", found[1]["says"]).groups()
            seen.look("path", "[data-edge]")
            rows = seen.texts("#path-table tr[data-edge]")
            values = seen.values("#path-table tr[data-edge] td.number")
            first = next(row for row, value in zip(rows, values, strict=True) if value > 0)
            assert head in first and source in first
        assert seen.wrong == []


@pytest.mark.ledger("F2")
def test_flow_forks_folds_and_fits(watched):
    """q, k and v stand side by side, four blocks are one and a fold, and nothing is wider than the screen."""
    sizes = {"vocab_size": 20, "d_model": 16, "n_layers": 4, "n_heads": 2, "max_positions": 16}
    deep = ch.Model(scramble(ch.Transformer(ch.ModelConfig(**sizes)), 3).eval())
    with serving(Opened("deep", lambda: deep, {"ids": [1, 2, 3, 4]})) as here:
        seen = watched(viewport={"width": 1440, "height": 900}).open(here.url)
        seen.look("flow", "[data-group]")
        assert "blocks 1 to 3" in " ".join(seen.texts("#flow-lane [data-group] strong"))
        assert seen.page.evaluate(OVER) <= 1
        seen.page.click('[data-group="blocks.0.attention"]')
        boxes = [seen.page.locator(f'[data-step="blocks.0.attention.{one}"]').bounding_box() for one in "qkv"]
        assert len({round(box["x"]) for box in boxes}) == 1 and len({round(box["y"]) for box in boxes}) == 3
        seen.page.click('[data-step="blocks.0.attention.q"]')
        seen.page.locator("#flow-numbers .scale-bar").wait_for()
        low, high = re.findall(r"-?[\d.e-]+", seen.texts("#flow-numbers .scale-bar")[0].split(":")[1])
        assert float(low) == -float(high) < 0
        assert seen.wrong == []
