"""Every kind of model, live and as a file: no empty view, numbers of `inside`, the address restores it."""

import io
import json

import pytest
import torch
from PIL import Image

import clearhead as ch
from clearhead.app.explorer.findings import findings
from clearhead.app.explorer.record import export, record
from clearhead.app.explorer.session import Opened, first_given
from clearhead.inside.ablation import effect
from clearhead.inside.attribution import occlusion, paths
from clearhead.inside.geometry import similarity
from clearhead.inside.inputs import prepare
from clearhead.inside.patch import patch
from clearhead.inside.story import explain
from tests.browser.test_export import walk
from tests.browser.test_numbers import FAMILIES, INPUTS, column_of
from tests.explorer.toys import picture, serving, toy

pytestmark = pytest.mark.ledger("F2", "K3", "L11")
KINDS = ("decoder", "encoder", "vectors", "classifier", "tagger", "encoder-decoder", "vit")
PAIR = ("they speak of the king", "the men shall not")
BARE = """() => {
  const section = document.querySelector("#views section:not([hidden])");
  const body = section.querySelector(".body");
  const wrong = [...section.querySelectorAll(".problem")].map((one) => one.textContent).join("");
  return [wrong, body.querySelectorAll("canvas, table, svg, button, textarea, summary, progress").length];
}"""


def views_of(seen):
    """Open every view that is offered: none of them is empty or says that it cannot."""
    names = seen.data("nav a:not([hidden])", "view")
    for name in names:
        seen.page.evaluate("name => clearhead.open(name)", name)
        seen.wait("() => !document.querySelector('#views section:not([hidden]) [aria-busy]')")
        wrong, parts = seen.page.evaluate(BARE)
        assert wrong == "" and parts > 0, (name, wrong, parts)
    return names


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.slow
def test_every_kind_live_and_in_a_file(watched, served, saved, family, tmp_path):
    """A file shows what the live page shows: values, pixels of a head, texts; and asks for nothing."""
    m = toy(family)
    seen = watched().open(served(family).url)
    if family == "vectors":
        seen.page.fill("#input-pair", PAIR[1])
        seen.read(PAIR[0])
    elif family != "vit":
        seen.read(*INPUTS[family])
    given, *target = first_given(m, None)[:1] if family == "vit" else INPUTS.get(family, PAIR)
    if family in FAMILIES:
        first = walk(seen)
        file, tried = saved(seen, tmp_path / "as-it-opens.html")
        assert walk(file) == first
        assert {*seen.texts("nav a:not([hidden])")} - {*file.texts("nav a:not([hidden])")} == {"Compare"}
        assert not file.page.is_visible("#input-run") and "recording" in file.texts("#status")[0]
        assert (tmp_path / "as-it-opens.html").stat().st_size < 3_000_000
        assert (file.wrong, tried) == ([], [])
    views_of(seen)
    if family == "vectors":  # a model without choices has no view of choices
        names = ["Similarity", "Play", "Heads", "Step through", "Compare", "Flow", "Cost"]
        assert seen.texts("nav a:not([hidden])") == names and not seen.page.is_visible("#answer")
        seen.page.evaluate("() => { clearhead.store.set('head', '1.1'); clearhead.open('similar'); }")
        found = similarity(m, *PAIR)
        expected = {"#similar-cosine": found.cosine}
        listed = {"#similar-grid td": found.states.flatten().tolist()}
    else:
        column = column_of(family, prepare(m, given, *target))
        asked = {"position": column, **({"target": target[0]} if target else {})}
        found, off = paths(m, given, **asked), effect(m, given, ["0.1"], **asked)
        assert found.total == pytest.approx(found.logit, abs=1e-4)
        seen.page.evaluate("() => { clearhead.store.set('off', '0.1'); clearhead.open('path'); }")
        expected = {"#path-logit": found.logit, "#path-total": found.logit, "#ablate-kl": off.kl}
        listed = {"#worth-table .number": left_out(m, given, column)} if family in LEAVES_OUT else {}
    same(seen, expected, listed)
    file, tried = saved(seen, tmp_path / "page.html")
    assert "compare" not in views_of(file)
    same(file, expected, listed)
    if family == "vit":
        assert file.page.locator("#worth-pictures canvas").count() == 2
    same(seen, expected)
    last = list(expected)[-1][1:].split("-")[0]
    seen.wait("view => location.hash.includes(`view=${view}`)", last)
    address = seen.page.url
    seen.page.reload()  # an image is in no address: the page opens on its own again
    same(seen.ready(), expected)
    seen.wait("hash => location.hash === `#${hash}`", address.split("#")[1])
    assert (seen.wrong, file.wrong, tried) == ([], [], [])


LEAVES_OUT = ("classifier", "tagger", "vit")


def left_out(m, given, column):
    """What leaving out each word or patch changes, and what its gradient says, as the page lists them."""
    found = occlusion(m, given, position=column)
    order = range(len(found.units))
    if m.config.input == "patches":  # the largest first
        order = found.dropped.abs().argsort(descending=True).tolist()
    return [x for place in order for x in (float(found.dropped[place]), float(found.gradient[place]))]


def same(seen, expected, listed=None):
    """The numbers that `inside` computed, each where the page shows it."""
    for selector, values in (listed or {}).items():
        seen.page.evaluate("id => clearhead.open(id)", selector[1:].split("-")[0])
        seen.near(selector, values[0])
        assert seen.values(selector) == pytest.approx(values, abs=1e-5)
    for selector, value in expected.items():
        seen.page.evaluate("id => clearhead.open(id)", selector[1:].split("-")[0])
        seen.near(selector, value)


@pytest.mark.parametrize("name", ["ModernBert", "DebertaV2", "Electra"])
@pytest.mark.slow
def test_a_checkpoint_of_another_architecture_has_no_empty_view(watched, name, tmp_path):
    """Whisper's page is in `test_sound`."""
    transformers = pytest.importorskip("transformers")
    tokenizer = toy("encoder").tokenizer
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 32}
    sizes |= {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 64, "pad_token_id": 0}
    if name == "DebertaV2":
        sizes |= {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}
        sizes |= {"position_biased_input": False, "share_att_key": True, "norm_rel_ebd": "layer_norm"}
    config = getattr(transformers, f"{name}Config")(**sizes)
    torch.manual_seed(0)
    getattr(transformers, f"{name}ForMaskedLM")(config).save_pretrained(tmp_path)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    m = ch.load(tmp_path)
    with serving(Opened(name, lambda: m, {"text": INPUTS["encoder"][0]})) as here:
        seen = watched().open(here.url)
        assert {"path", "attention", "head", "lens", "next", "ablate", "flow"} <= set(views_of(seen))
        place = seen.page.evaluate("clearhead.store.get('position')")
        same(seen, {"#path-logit": paths(m, INPUTS["encoder"][0], position=place).logit})
        assert seen.wrong == []


@pytest.mark.parametrize("family", ["encoder", "classifier", "tagger", "encoder-decoder", "vit"])
@pytest.mark.slow
def test_patching_from_the_page_is_the_command_s(watched, served, saved, family, tmp_path):
    """Head by head and token by token, live and in a file; `test_the_bench` has the decoder's."""
    m, (given, *target) = toy(family), INPUTS[family]
    seen = watched().open(served(family).url)
    if family == "vit":
        seen.see("one.png", png(given))
        seen.look("compare", "#compare-image")
        other = picture(8)
        file = {"name": "two.png", "mimeType": "image/png", "buffer": png(other)}
        seen.page.set_input_files("#compare-image", file)
    else:
        seen.read(given, *target)
        seen.look("compare", "#compare-run")
        other = as_long(m, given)
        seen.page.fill("#compare-text", other)
    seen.page.click("#compare-run")
    column = column_of(family, prepare(m, given, *target))
    asked = {"position": column, "target": target[0] if target else None}
    found = patch(m, given, other, parts=("heads", "residual"), **asked)
    assert float(found.maps[0].values.nan_to_num().abs().max()) > 1e-3
    expected = {
        "#patch-heads": [one for one in found.maps if one.part.endswith("heads")],
        "#patch-tokens": [one for one in found.maps if one.part == "residual"],
    }
    seen.page.locator("#patch-tokens canvas.heat").first.wait_for()
    seen.wait("() => !document.querySelector('#compare [aria-busy]')")
    file, tried = saved(seen, tmp_path / "page.html")
    file.look("compare", "#patch-tokens canvas.heat")
    for page in (seen, file):
        for selector, maps in expected.items():
            shown = [json.loads(one) for one in page.data(f"{selector} canvas.heat", "values")]
            wanted = [one.values.flatten().tolist() for one in maps]
            assert [len(one) for one in shown] == [len(one) for one in wanted] != []
            for ours, theirs in zip(shown, wanted):
                known = [0.0 if x != x else x for x in theirs]
                assert [x or 0.0 for x in ours] == pytest.approx(known, abs=1e-4)
    assert (seen.wrong, file.wrong, tried) == ([], [], [])


def as_long(m, text):
    """Another text with as many tokens: one word of it is another."""
    words = text.split()
    new_words = ("the", "of", "men", "king", "shall", "speak", "England")
    changes = [
        (place, new) for place, word in enumerate(words) for new in new_words if word not in (new, "[MASK]")
    ]
    others = [" ".join([*words[:place], new, *words[place + 1 :]]) for place, new in changes]
    count = len(prepare(m, text).first_tokens)
    return next(other for other in others if len(prepare(m, other).first_tokens) == count)


def png(pixels):
    """Pixels as the bytes of a file."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.slow
def test_tokens_as_one_types_and_examples_in_a_file(watched, saved, tmp_path):
    """What is typed is shown as tokens before it is read; a file has the examples, each with its own path."""
    m, text = toy("decoder"), "they speak of England"
    with serving(Opened("decoder", lambda: m), examples=True) as here:
        seen = watched().open(here.url)
        before = seen.page.evaluate("clearhead.store.get('run').run")
        seen.page.fill("#input-text", text)
        seen.page.locator("#input-tokens .typed").first.wait_for()
        assert seen.texts("#input-tokens .typed") == list(prepare(m, text).tokens.labels)
        assert seen.page.evaluate("clearhead.store.get('run').run") == before
        seen.page.click("#input-run")
        seen.wait("before => clearhead.store.get('run').run !== before", before)
        seen.wait("() => !document.getElementById('input-examples').hidden")
        file, tried = saved(seen, tmp_path / "page.html")
        found = findings(m)
        assert file.texts("#input-examples .soft") == [one["says"] for one in found]
        file.page.locator("#input-examples summary").click()
        file.page.locator("#input-examples button").nth(2).click()
        file.page.evaluate("() => clearhead.open('path')")
        file.near("#path-logit", paths(m, found[1]["text"]).logit)
        assert "compare" not in views_of(file)
        file.page.click("#input-own")
        file.page.evaluate("() => clearhead.open('path')")
        file.near("#path-logit", paths(m, text).logit)
        assert (seen.wrong, file.wrong, tried) == ([], [], [])


QUOTES = str.maketrans("", "", "“”")  # the page sets tokens apart


def test_a_file_of_the_command_has_examples_too(offline, tmp_path):
    """The first thing that the page answers: which head moved this, and from where."""
    m = toy("decoder")
    made = record(m, "decoder", PAIR[0], examples=findings(m)[:1])
    seen, tried = offline(export(made, tmp_path / "page.html"))
    said = seen.page.locator("#story").inner_text()
    assert "".join(said.split()) == "".join(explain(m, PAIR[0]).sentence.translate(QUOTES).split())
    assert "contributed most" not in seen.page.locator("#input-tinted").inner_text()  # no second claim
    assert (seen.wrong, tried) == ([], [])
