"""What each kind of model has of its own: words, patches, similarity, ribbon, drawers; live and in a file."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
import torch
from PIL import Image

import clearhead as ch
from clearhead.app.explorer.findings import findings
from clearhead.app.explorer.record import export, record
from clearhead.app.explorer.session import Opened
from clearhead.inside.attention import attention
from clearhead.inside.attribution import looks, paths
from clearhead.inside.geometry import neighbours
from clearhead.inside.inputs import prepare
from clearhead.inside.interventions import steering, steering_vector
from clearhead.inside.logit_attribution import firing
from clearhead.inside.story import explain
from clearhead.run.api import load
from tests.explorer.toys import serving, toy, unpacked
from tests.harness import build, scramble
from tests.inside.test_heads import induction_models
from tests.llava import sized_directory, tiled_directory
from tests.test_speech import folder, sounds  # noqa: F401

pytestmark = pytest.mark.ledger("F2", "K3", "L11")
LANE = "document.getElementById('flow-lane')"
OVER = f"() => {LANE}.scrollWidth - {LANE}.clientWidth"
TEXTS = ("they speak of the king", "the men shall not")


@pytest.mark.slow
def test_an_encoder_decoder_opens_on_its_alignment(watched, served, saved, tmp_path):
    m, (text, written) = toy("encoder-decoder"), TEXTS
    seen = watched().open(served("encoder-decoder").url)
    assert seen.texts("nav a[aria-current]") == ["Alignment"]
    seen.read(text, written)
    seen.page.evaluate("() => clearhead.store.set('position', 2)")
    patterns = torch.tensor(attention(m, text, written).of("cross")[1].pattern)
    best = patterns.mean(0)[2].sort(descending=True).values[:5].tolist()
    came = paths(m, text, position=2, target=written).memory.tolist()
    file, tried = saved(seen, tmp_path / "page.html")
    for page in (seen, file):
        page.look("ribbon", ".ribbon-chosen")
        page.near("#ribbon-list .number", best[0])
        assert page.values("#ribbon-list .number") == pytest.approx(best, abs=1e-6)
        page.wait("() => document.querySelector('#input-source [data-gave]')")
        assert page.values("#input-source .chip", "data-gave") == pytest.approx(came, abs=1e-5)
        page.page.select_option("#ribbon-head", "0.1")
        one = torch.tensor(attention(m, text, written).of("cross")[0].pattern)[1, 2].max()
        page.near("#ribbon-list .number", float(one))
    assert (seen.wrong, file.wrong, tried) == ([], [], [])


@pytest.mark.slow
def test_drawers_show_neurons_a_map_and_steering(watched, served):
    m, text = toy("decoder"), TEXTS[0]
    seen = watched().open(served("decoder").url)
    seen.read(text)
    seen.look("drawers", "summary")
    for name in ("neurons", "map", "steer"):
        seen.page.evaluate("id => { document.getElementById(id).open = true; }", f"drawer-{name}")
    seen.page.locator("[data-neuron]").first.wait_for()
    found = firing(m, text, count=8)
    assert seen.data("[data-neuron]", "neuron") == [neuron.name for neuron in found.neurons]
    values = [neuron.value for neuron in found.neurons]
    assert seen.values("[data-neuron] td.number") == pytest.approx(values, abs=1e-5)
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


@pytest.mark.parametrize("family", ["decoder", "vit"])
@pytest.mark.slow
def test_examples_state_what_was_found_on_this_model(watched, family):
    found = findings(toy(family))
    assert len(found) == 5
    with serving(Opened(family, lambda: toy(family)), examples=True) as here:
        seen = watched().open(here.url)
        seen.wait("() => !document.getElementById('input-examples').hidden")
        assert seen.texts("#input-examples .soft") == [one["says"] for one in found]
        with seen.another_run():
            seen.page.locator("#input-examples summary").click()
            seen.page.locator("#input-examples button").nth(1).click()
        if family == "vit":
            with seen.another_run():
                seen.page.locator("#input-image ~ details summary").click()
                seen.page.locator(".pad").focus()
                for key in (" ", "ArrowUp", "ArrowLeft", " "):
                    seen.page.keyboard.press(key)
        else:
            head, source = re.match(r"head (\S+) brings “(.+)” to", found[1]["says"]).groups()
            seen.look("path", "[data-edge]")
            rows = seen.texts("#path-table tr[data-edge]")
            values = seen.values("#path-table tr[data-edge] td.number")
            first = next(row for row, value in zip(rows, values, strict=True) if value > 0)
            assert head in first and source in first
        assert seen.wrong == []


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


MOST = "() => document.querySelector('#attention-large .spectrogram')?.dataset.most"


@pytest.mark.slow
def test_where_a_token_was_heard(folder, watched, saved, tmp_path):  # noqa: F811
    import soundfile

    m, file = ch.load(folder), io.BytesIO()
    soundfile.write(file, sounds()[3], 16_000, format="WAV", subtype="FLOAT")
    (tmp_path / "clip.wav").write_bytes(file.getvalue())
    heard = attention(m, tmp_path / "clip.wav", kinds=["cross"])
    said = m.transcribe(tmp_path / "clip.wav").ids
    with serving(Opened("speech", lambda: m)) as served:
        seen = watched().open(served.url)
        clip = {"name": "clip.wav", "mimeType": "audio/wav", "buffer": file.getvalue()}
        with seen.another_run():
            seen.page.set_input_files("#input-sound", clip)
        ids = seen.page.evaluate("clearhead.store.get('run').tokens.ids")
        assert ids[-len(said) :] == said  # it is read in one window, without times
        shape = seen.page.evaluate("clearhead.store.get('run').sound.shape")
        assert shape == [8, 100] and seen.page.locator("#input-picture .spectrogram").count() == 1
        seen.look("attention", "#attention-large .spectrogram")
        copy, tried = saved(seen, tmp_path / "page.html")
        for page in (seen, copy):
            page.look("attention", "#attention-large .spectrogram")
            name = page.page.get_attribute("#attention-head", "data-head")
            layer, head = (int(part) for part in name.split(".")[-2:])
            pattern = heard.of("cross")[layer].pattern[head]
            for place in (len(ids) - 1, 2):
                page.page.select_option("#attention-query", str(place))
                page.wait(f"most => ({MOST})() === most", str(int(np.argmax(pattern[place]))))
        assert not seen.wrong and not copy.wrong and not tried


@pytest.mark.parametrize(("made", "mark"), [(tiled_directory, "<image>"), (sized_directory, "<|image_pad|>")])
@pytest.mark.slow
def test_where_a_token_looked_in_a_picture(watched, tmp_path, made, mark):
    """The head's row is laid over the image, patch by patch; the strongest patch is the reddest there."""
    m, file = ch.load(made(tmp_path / "m")), io.BytesIO()
    for block in m.model.main.blocks:  # patches of one colour are alike: the looks at them are to differ
        block.attention.q.weight.data *= 100
    image = np.full((32, 48, 3), 90, dtype=np.uint8)
    Image.fromarray(image).save(file, "PNG")
    text = f"{mark}\nWhat is it?"
    with serving(Opened("images", lambda: m)) as served:
        seen = watched().open(served.url)
        seen.page.fill("#input-text", "What is it?")
        with seen.another_run():
            seen.page.set_input_files(
                "#input-image", {"name": "a.png", "mimeType": "image/png", "buffer": file.getvalue()}
            )
        assert seen.page.input_value("#input-text") == text
        assert seen.page.locator("#input-picture .patches").count() == 1
        seen.page.evaluate("() => clearhead.store.set('head', '1.2')")
        seen.look("attention", "#attention-large .patches")
        seen.page.locator("#attention-head[data-head='1.2']").wait_for()
        row = attention(m, ch.ImagePrompt(text, [image])).of("self")[1].pattern[2][-1]
        labels = seen.page.evaluate("clearhead.store.get('run').tokens.labels")
        seen.page.select_option("#attention-query", str(len(labels) - 1))
        places = {
            at: tuple(map(int, label.split(","))) for at, label in enumerate(labels) if label[0].isdigit()
        }
        assert len(places) == 24  # 2 x 3 tiles of 2 x 2 vectors, or 4 x 6 squares
        shown = unpacked(seen.page.evaluate("clearhead.store.get('run').picture"))
        assert shown.shape == (3, 32, 48) and np.abs(shown - 90 / 255).max() <= 1 / 255  # its own colours
        most = places[max(places, key=lambda at: row[at])]
        assert tuple(seen.page.evaluate(WARMEST)) == most
        seen.look("drawers", "summary")
        seen.page.evaluate("() => { document.getElementById('drawer-neurons').open = true; }")
        seen.page.locator("[data-neuron]").first.wait_for()
        assert not seen.wrong


# The row and column of the patch with the warmest middle.
WARMEST = """() => {
  const canvas = document.querySelector("#attention-large .patches");
  const [wide, high] = [canvas.width / 6, canvas.height / 4];
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const warm = (row, column) => {
    const at = 4 * (Math.floor((row + 0.5) * high) * canvas.width + Math.floor((column + 0.5) * wide));
    return data[at] - data[at + 2];
  };
  const places = Array.from({ length: 24 }, (_, i) => [Math.floor(i / 6), i % 6]);
  return places.reduce((best, place) => (warm(...place) > warm(...best) ? place : best));
}"""


IDS = [3, 7, 1, 9, 4, 12] * 2 + [3, 7]
LAST = len(IDS) - 1
BACK = """() => [...document.querySelectorAll("#path-picture .path-why")].map((one) => one.textContent)"""


@pytest.mark.slow
def test_the_path_of_a_repeated_token_runs_through_two_heads(watched, saved, tmp_path_factory, tmp_path):
    """The sentence names the head that copies, a dashed arc the head that had looked one token back."""
    m = load(induction_models(tmp_path_factory) / "2")
    told = explain(m, IDS)  # before the page removes parts of the same model
    with serving(Opened("repeats", lambda: m, {"ids": IDS})) as here:
        seen = watched().open(here.url)
        seen.look("path", "[data-edge]")
        file, tried = saved(seen, tmp_path / "page.html")
        for page in (seen, file):
            copies = next(edge for edge in paths(m, IDS).strongest(20) if edge.value > 0)
            assert copies.part.startswith("1.") and (IDS[copies.source - 1], IDS[copies.source]) == (7, 1)
            page.page.locator("#story").wait_for()
            said = "".join(page.page.locator("#story").inner_text().split())
            assert said == "".join(told.sentence.replace("“", "").replace("”", "").split())
            assert told.decides(told.effects[0])
            found = looks(m, IDS, copies.part, LAST, copies.source).edges
            at_source = (one for one in found if one.value > 0 and one.reader == copies.source)
            back = next(one for one in at_source if one.part[0].isdigit())
            assert back.part.startswith("0.") and back.source == copies.source - 1  # it looks one token back
            words = f"from “7” ({back.source}) to “1” ({back.reader})"
            page.wait(f"() => ({BACK})().some((one) => one.includes('{words}'))")
            arc = next(one for one in page.page.evaluate(BACK) if words in one)
            assert arc.startswith(f"head {back.part}: ")
            assert float(arc.split()[2]) == pytest.approx(back.value, rel=0.01)
        assert (seen.wrong, file.wrong, tried) == ([], [], [])


def test_denoising_appears_step_by_step(offline, tmp_path):
    """A file of a diffusion model opens on it; each step shows what it keeps, and the masks that are left."""
    made = record(toy("diffusion"), "diffusion", "The king")
    body = made["views"]["run/recorded/denoising"]
    kept = [sorted(zip(step["positions"], step["confidence"])) for step in body["steps"]]
    seen, tried = offline(export(made, tmp_path / "page.html"))
    seen.page.locator("#denoising-grid td.fresh").first.wait_for()
    assert seen.texts("nav a[aria-current]") == ["Denoising"]
    assert seen.values("#denoising-grid td.fresh") == [p for step in kept for _, p in step]
    assert seen.page.locator("#denoising-text .masked").count() == 0
    seen.page.click("#denoising-back")
    assert seen.page.locator("#denoising-text .masked").count() == len(kept[-1])
    assert seen.values("#denoising-text .fresh") == [p for _, p in kept[-2]]
    assert not seen.page.locator("#denoising-grid tbody tr").last.is_visible()
    seen.page.click("#denoising-next")
    seen.page.click("#denoising-play")
    assert seen.texts("#denoising-place") == [f"step 1 of {len(kept)}"]
    seen.wait("() => document.getElementById('denoising-place').textContent.startsWith('step 2 ')")
    assert (seen.wrong, tried) == ([], [])


def test_heads_of_hybrid_layers_are_shown_and_not_turned_off(watched):
    """The page says that their state-space mixer has no pattern; the other layer's heads can be off."""
    m = ch.Model(build(attention=("full", "hybrid(d_state=5)"), positions="rope", seed=2))
    with serving(Opened("hybrid", lambda: m, {"ids": [3, 1, 4, 1, 5]})) as served:
        seen = watched().open(served.url)
        offered = {}
        for name in ("0.1", "1.1"):
            seen.page.evaluate("name => clearhead.store.set('head', name)", name)
            seen.look("attention", f"#attention-head[data-head='{name}']")
            offered[name] = seen.page.get_by_role("button", name=f"Turn off head {name}").count()
        assert offered == {"0.1": 1, "1.1": 0}
        assert "not the state-space mixer next to them: 1" in seen.page.inner_text("#attention")
        assert len(seen.data("#attention [data-head^='1.'].head", "head")) == 4
        seen.look("ablate", "[data-heads]")
        assert {name.split(".")[0] for name in seen.data("#ablate [data-heads]", "heads")} == {"0"}
        assert seen.wrong == []
