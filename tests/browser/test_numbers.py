"""Compare what the page shows with what `inside` computes for the same input, number by number."""

import io
import math
import re

import numpy as np
import pytest
import torch
from PIL import Image

import clearhead as ch
from clearhead.inside.ablation import effect
from clearhead.inside.attention import attention
from clearhead.inside.inputs import choices_of, prepare
from clearhead.inside.lens import contributions, lens
from clearhead.inside.trace import trace
from clearhead.run.generate.request import Request
from clearhead.run.generate.sequence import distribution
from tests.explorer.toys import picture, toy

pytestmark = pytest.mark.ledger("F2", "K1", "K2", "K3", "K9")
FAMILIES = ("decoder", "encoder", "encoder-decoder", "classifier", "vit")
INPUTS = {
    "decoder": ("The men, 12 of Straße 北京 speak",),
    "encoder": ("England [MASK] the king's men",),
    "encoder-decoder": ("Ein Hund läuft", "speak of it"),
    "classifier": ("Москва и люди; they shall",),
    "vit": (picture(3),),
    "tagger": ("they shall speak of England",),
    "vectors": ("they speak of the king",),
}
ANSWERING = (*FAMILIES, "tagger")
EVERY = (*ANSWERING, "vectors")
SETTINGS = [(0.7, 0, 1, 0), (1.5, 7, 1, 0), (1, 0, 0.35, 0), (1, 0, 1, 0.2), (0.85, 40, 0.8, 0.05)]
SETTINGS += [(0, 0, 1, 0), (2, 1, 0.01, 1)]


def shown(live, family):
    """The page with this family's input on it, and what `prepare` makes of it."""
    watched, (given, *target) = live(family), INPUTS[family]
    if not getattr(watched, "has_read", False):
        if family == "vit":
            buffer = io.BytesIO()
            Image.fromarray(given).save(buffer, "PNG")
            watched.see("picture.png", buffer.getvalue())
        else:
            watched.read(given, *target)
        watched.has_read = True
    watched.page.keyboard.press("Escape")  # what an earlier test has pinned
    return watched, prepare(toy(family), given, *target), (given, *target)


def column_of(family, prepared, wrote=False):
    """Where the page asks the model unless told otherwise; `wrote`: the target is what the model said."""
    mask = prepared.m.special.get("mask")
    if family == "encoder" and mask in prepared.tokens.ids:
        return prepared.tokens.ids.index(mask)
    if family in ("encoder", "tagger"):
        return prepared.tokens.special.index(False)
    return 0 if family in ("classifier", "vit") else len(prepared.tokens) - 1 - wrote


def scores_of(prepared):
    """[C, N] what the head says."""
    with torch.no_grad():
        return choices_of(prepared).scores(prepared.run().logits)[0]


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.mark.slow
def test_tokens(live, family):
    watched, prepared, _ = shown(live, family)
    watched.look("input", ".chip[data-token]")
    assert watched.texts("#input-tokens .chip > span") == list(prepared.tokens.labels)
    if family == "vit":
        return
    assert watched.values("#input-tokens .chip", "data-id") == list(prepared.tokens.ids)
    first = prepared.source_tokens or prepared.tokens
    if prepared.source_tokens is not None:
        assert watched.texts("#input-source .chip > span") == list(first.labels)
        assert watched.values("#input-source .chip", "data-id") == list(first.ids)
    chips = "#input-source" if prepared.source_tokens is not None else "#input-tokens"
    for place, (start, end) in enumerate(first.spans):
        watched.page.locator(f"{chips} .chip").nth(place).hover()
        marked = watched.texts("#input-marked mark")
        assert marked == ([first.text[start:end]] if end > start else [])


@pytest.mark.parametrize("family", EVERY, indirect=True)
@pytest.mark.slow
def test_flow(live, family):
    watched, prepared, given = shown(live, family)
    seen = trace(prepared.m, *given)
    length = None if family == "vit" else len(prepared.tokens)
    source = None if prepared.source is None else prepared.source.shape[1]
    price = ch.cost(prepared.m.config, length, source_length=source)
    watched.look("flow", "[data-group]")
    assert watched.values("#flow-totals", "data-parameters") == [price.parameters.total]
    assert watched.values("#flow-totals", "data-flops") == [price.flops.forward.total]
    closed = watched.page.locator("#flow-lane [aria-expanded=false]")
    while closed.count():
        closed.first.click()
    assert watched.data("#flow-lane [data-step]", "step") == [step.name for step in seen.steps]
    shapes = watched.texts("#flow-lane .step .shape .soft")
    assert shapes == [" × ".join(map(str, step.shape)) for step in seen.steps]
    ends = ("blocks.1.attention.pattern", "blocks.0.resid_mid")
    for step in [seen.steps[-1], *(step for step in seen.steps if step.name.endswith(ends))]:
        watched.page.locator(f'#flow-lane [data-step="{step.name}"]').click()
        watched.page.locator(f'#flow-step h3[data-step="{step.name}"]').wait_for()
        watched.page.locator("#flow-numbers td").first.wait_for()
        value = step.value.float()
        while value.ndim > 2:
            value = value[0]
        corner = (value if value.ndim == 2 else value.reshape(1, -1))[:6, :8]
        assert watched.values("#flow-numbers td") == pytest.approx(corner.flatten().tolist(), abs=1e-6)
        assert watched.texts("#flow-step .formula") == [step.formula]


@pytest.mark.parametrize("family", EVERY, indirect=True)
def test_attention(live, family):
    """Each pixel of a head has its weight's colour; thumbnails show entropy; chips show where tokens look."""
    watched, prepared, given = shown(live, family)
    maps = attention(prepared.m, *given, budget=None)
    for kind in dict.fromkeys(each.kind for each in maps.maps):
        watched.look("attention", ".head")
        if watched.page.locator("#attention [role=tab]").count():
            watched.page.click(f"#attention-tab-{kind}")
        prefix = "" if kind == "self" else f"{kind}."
        layers = maps.of(kind)
        upward = list(reversed(layers))  # the first layer is at the bottom
        names = [f"{prefix}{each.layer}.{number}" for each in upward for number in range(len(each.pattern))]
        watched.page.wait_for_selector(f'#attention-grid [data-head="{names[-1]}"]')
        assert watched.data("#attention-grid .head", "head") == names
        entropies = [head.entropy for each in upward for head in each.heads()]
        assert watched.values("#attention-grid .head", "data-entropy") == pytest.approx(entropies, abs=1e-5)
        head, pattern = names[-1], upward[-1].pattern[-1]
        watched.page.click(f'#attention-grid [data-head="{head}"]')
        watched.page.wait_for_selector(f'#attention-head[data-head="{head}"]')
        assert off_by(watched, pattern) <= 1 / 510 + 1e-6
        row = 2
        watched.page.select_option("#attention-query", str(row))
        said = [
            float(re.match(r"[\d.e+-]+", text)[0]) / 100
            for text in watched.texts("#attention-large .looks .chip small")
        ]
        assert said == pytest.approx(pattern[row].tolist(), rel=0.06, abs=1e-6)  # two digits and more
        assert watched.texts("#attention-row") == [upward[-1].queries.labels[row]]
        assert watched.texts("#attention-large .looks .chip > span") == list(upward[-1].keys.labels)


def off_by(watched, pattern) -> float:
    """Return how far the enlarged heat map's colours are from those of a pattern, as a weight.

    Half a level of 255 is 1/510.
    """
    shades = watched.page.evaluate(
        """async () => {
          const { amountTable } = await import("/colour.js");
          const canvas = document.querySelector("#attention-large canvas.heat");
          const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
          const shape = [canvas.height, canvas.width];
          return { table: Array.from(amountTable()), pixels: Array.from(data), shape };
        }"""
    )
    table = np.array(shades["table"]).reshape(256, 3)
    pixels = np.array(shades["pixels"]).reshape(*shades["shape"], 4)[..., :3]
    assert list(pattern.shape) == shades["shape"]
    same = (pixels[:, :, None] == table).all(-1)  # T S 256: several levels may share a colour
    assert same.any(-1).all(), "a pixel has a colour that stands for nothing"
    distance = np.abs(np.arange(256) / 255 - pattern[..., None])
    return float(np.where(same, distance, np.inf).min(-1).max())


@pytest.mark.parametrize("family", ANSWERING, indirect=True)
def test_lens(live, family):
    watched, prepared, given = shown(live, family)
    seen = lens(prepared.m, *given, top=5)
    watched.look("lens", "td[data-value]")
    shows = {"p": seen.top_probabilities[..., 0], "final": seen.chosen_probabilities, "entropy": seen.entropy}
    for name, expected in shows.items():
        watched.page.select_option("#lens-shows", name)
        cells = expected.flip(0).flatten().tolist()  # the first layer is at the bottom
        assert watched.values("#lens-grid td") == pytest.approx(cells, rel=1e-6, abs=1e-6)
    assert watched.values("#lens-grid td", "data-id") == seen.top[..., 0].flip(0).flatten().tolist()
    upward = list(reversed(seen.top_names))
    assert watched.texts("#lens-grid td .token") == [cell[0] for layer in upward for cell in layer]
    column = len(seen.columns) - 1
    watched.page.click(f'#lens-grid td[data-layer="1"][data-column="{column}"]')
    best = seen.top_probabilities[1, column].tolist()
    assert watched.values("#lens-detail .candidates td") == pytest.approx(best, abs=1e-6)
    found = contributions(prepared.m, given[0], position=column, target=given[1] if given[1:] else None)
    watched.near("#lens-logit", found.logit)
    pairs = "nodes => nodes.map((node) => [node.dataset.term, Number(node.dataset.value)])"
    terms = watched.page.eval_on_selector_all("#lens-parts [data-term]", pairs)
    assert sum(value for _, value in terms) == pytest.approx(found.logit, abs=1e-4)
    listed = {term.name: term.value for term in found.terms}
    for name, value in terms[:10]:
        assert listed[name] == pytest.approx(value, abs=1e-6)
    assert watched.values("#lens-sum") == pytest.approx([found.total], abs=1e-6)


@pytest.mark.parametrize("family", ANSWERING, indirect=True)
def test_next(live, family):
    """Check the probabilities of what comes next at every column, and of the tokens that follow if known."""
    watched, prepared, _ = shown(live, family)
    scores, column = scores_of(prepared), column_of(family, prepared)
    watched.look("next", "#next-table tbody tr")
    for place in dict.fromkeys([column, 0, column]):
        if len(scores) > 1:
            watched.page.select_option("#next-position", str(place))
        probabilities = scores[place].double().softmax(-1)
        best = probabilities.topk(min(20, len(probabilities)))
        wanted = ",".join(map(str, best.indices.tolist()))
        watched.wait(
            "wanted => [...document.querySelectorAll('#next-table tbody tr')]"
            ".map((row) => row.dataset.id).join() === wanted",
            wanted,
        )
        shares = watched.values("#next-table td.number:not(.soft)")
        assert shares == pytest.approx(best.values.tolist(), abs=1e-6)
        choices = choices_of(prepared)
        assert watched.texts("#next-table tbody th") == [choices.name(one) for one in best.indices.tolist()]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["decoder", "encoder", "encoder-decoder"], indirect=True)
def test_sliders_are_the_sampling_functions(live, family):
    watched, prepared, _ = shown(live, family)
    logits = scores_of(prepared)[column_of(family, prepared)]
    watched.look("next", "#next-table tbody tr")
    watched.wait("() => !document.querySelector('#input-tinted').hidden")

    def questions():  # but for those of other views, which are asked ahead meanwhile
        return [address for address in watched.requests if "/next" in address]

    asked = questions()
    assert asked
    for temperature, top_k, top_p, min_p in SETTINGS:
        watched.sample_by(temperature, top_k, top_p, min_p)
        request = Request(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        expected = distribution(logits[None], request)[0]
        ids = [int(one) for one in watched.values("#next-table tbody tr", "data-id")]
        # Logits are in float32, of one token or of all at once.
        shown_shares = watched.values("#next-table td.number:not(.soft)")
        assert shown_shares == pytest.approx(expected[ids].tolist(), rel=1e-5, abs=1e-7)
        left_out = "rows => rows.map((row) => 'gone' in row.dataset)"
        gone = watched.page.eval_on_selector_all("#next-table tbody tr", left_out)
        assert gone == [float(expected[one]) == 0 for one in ids]
        assert watched.values("#next-kept") == [int((expected > 0).sum())]
    watched.page.click("#next-reset")
    assert questions() == asked, "a slider asked the server"


@pytest.mark.slow
@pytest.mark.parametrize("family", ANSWERING, indirect=True)
def test_ablation(live, family):
    watched, prepared, (given, *target) = shown(live, family)
    watched.look("ablate", "[data-heads]")
    position = column_of(family, prepared)
    head = "cross.1.2" if family == "encoder-decoder" else "1.2"
    parts = [("heads", head), ("feedforwards", "0"), ("layers", "1")]
    off = {"heads": [], "feedforwards": [], "layers": []}
    for (kind, name), how in zip(parts, ("zero", "mean", "zero")):
        off[kind].append(name)
        watched.page.select_option("#ablate-how", how)
        watched.page.click(f'#ablate-grid [data-{kind}="{name}"]')
        asked = {"how": how, "target": target[0] if target else None, "position": position}
        expected = effect(prepared.m, given, **off, **asked)
        watched.near("#ablate-kl", expected.kl, 1e-6)
        ids = [int(one) for one in watched.values("#ablate-table tbody tr", "data-id")]
        for side, logits in (("before", expected.before), ("after", expected.after)):
            shares = watched.values(f"#ablate-table td[data-{side}]", f"data-{side}")
            assert shares == pytest.approx(logits.softmax(-1)[ids].tolist(), abs=1e-6)
    watched.page.click("#ablate-reset")
    watched.page.locator("#ablate-answer", has_text="Everything is on").wait_for()


def test_cost(live, family):
    watched, prepared, _ = shown(live, family)
    watched.look("cost", "#cost-parameters")
    config = prepared.m.config
    for length, batch, dtype in ((17, 3, "bfloat16"), (40, 1, "float32")):
        watched.page.select_option("#cost-dtype", dtype)
        for name, value in (("batch", batch), *([("length", length)] if family != "vit" else [])):
            watched.page.fill(f"#cost-{name}", str(value))
            watched.page.dispatch_event(f"#cost-{name}", "change")
        price = ch.cost(config, None if family == "vit" else length, batch, dtype)
        watched.wait(
            "flops => Number(document.querySelector('#cost-flops')?.dataset.value) === flops",
            price.flops.forward.total,
        )
        assert watched.values("#cost-parameters") == [price.parameters.total]
        assert price.memory.weights in watched.values("#cost .cost-memory td")


@pytest.mark.slow
def test_compare(live, family):
    watched, prepared, (given, *_) = shown(live, family)
    other = given if family == "vit" else "they speak of the king"
    watched.look("compare", "#compare-run")
    if family != "vit":
        watched.page.fill("#compare-text", other)
    watched.page.click("#compare-run")
    second = prepare(prepared.m, other)
    wrote = family == "encoder-decoder"
    columns = (column_of(family, prepared), column_of(family, second, wrote))
    p, q = (scores_of(each)[place].double() for each, place in zip((prepared, second), columns))
    kl = float((p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum()) / math.log(2)
    watched.near("#compare-kl", kl, 1e-6)
    assert (kl > 1e-6) == (family != "vit")  # the picture is compared with itself


def test_nothing_was_wrong_and_nothing_left_this_machine(live, family):
    watched, _, _ = shown(live, family)  # the tests before this one have looked at every view
    assert watched.wrong == []
    assert watched.requests
    asked = [address for address in watched.requests if not address.startswith(("data:", "blob:"))]
    assert {address.split("/")[2].split(":")[0] for address in asked} == {"127.0.0.1"}
