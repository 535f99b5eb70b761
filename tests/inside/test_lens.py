"""The lens and direct contributions: the last layer is the model's answer; the parts add up to the logit."""

from __future__ import annotations

import itertools
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import clearhead as ch
from clearhead.app.plot.prompts import draw_contributions, draw_lens
from clearhead.core.norms import LayerNorm, RMSNorm
from clearhead.inside.attribution import paths
from clearhead.inside.inputs import choices_of, prepare
from clearhead.inside.lens import contributions, lens, stopped_at
from clearhead.inside.names import states
from tests.harness import PATCHES, V, build, some_ids

pytestmark = pytest.mark.ledger("K6")
IDS, TARGET = some_ids(1)[0].tolist(), some_ids(1, 5, seed=3)[0].tolist()
PLACES = {
    "pre": {},
    "post": {"norm_position": "post"},
    "post, final norm": {"norm_position": "post", "final_norm": True},
    "sandwich": {"norm_position": "sandwich"},
    "output": {"norm_position": "output"},
    "parallel": {"parallel": True},
    "parallel sandwich": {"parallel": True, "norm_position": "sandwich", "parallel_norms": 2},
}
IMAGE = {**PATCHES, "n_channels": 1}
CLASSES = {"family": "encoder", "head": "classifier", "n_classes": 3}
HEADS = {
    "soft cap": {"logit_softcap": 2.0, "logit_scale": 0.5, "residual_scale": 0.3},
    "narrow table": {"d_embedding": 8, "head_bias": True, "embedding_norm": True, "tie_embeddings": True},
    "masked": {"family": "encoder", "n_types": 2},
    "masked, linear": {"family": "encoder", "head_transform": False},
    "classifier, first": {**CLASSES, "pooler": "tanh"},
    "classifier, mean": {**CLASSES, "pooling": "mean", "pooler": "relu"},
    "classifier, last": {"head": "classifier", "n_classes": 3},
    "tagger": {"family": "encoder", "head": "tagger", "n_classes": 3},
    "span": {"family": "encoder", "head": "span"},
    "image": {**CLASSES, "positions": "sinusoidal", **IMAGE},
    "experts": {"n_experts": 3, "positions": "alibi"},
    "shared layers": {"layer_groups": 1, "positions": "relative"},
    "pruned": {"pruned_heads": {"blocks.0.attention": (1,)}, "norm_unit_offset": True},
    "gated heads": {"attention_gate": True, "n_kv_heads": 2, "n_experts": 2, "d_shared_expert": 5},
    "wide values": {"d_value": 6, "positions": "sinusoidal"},
}


def inputs(config: ch.ModelConfig):
    """What to look at, and the target for a model of two stacks."""
    if config.input == "patches":
        return torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(0)), {}
    return IDS, {"target": TARGET} if config.family == "encoder-decoder" else {}


def matrix():
    """Models over norm position, norm, gate, tied table, grouped heads, positions and family."""
    for number, (family, place) in enumerate(
        itertools.product(("decoder", "encoder", "encoder-decoder"), PLACES)
    ):
        if family == "encoder-decoder" and "parallel" in place:
            continue
        for norm, gated, tied, groups, positions in itertools.product(
            ("layernorm", "rmsnorm"), (False, True), (False, True), (4, 2), ("learned", "rope")
        ):
            # A quarter of them, in which any two of the four choices still occur together.
            first = gated + tied + (groups == 4)
            second = tied + (positions == "rope") + number + (norm == "rmsnorm")
            if first % 2 == 0 and second % 2 == 0:
                choices = {"norm": norm, "gated": gated, "tie_embeddings": tied, "n_kv_heads": groups}
                choices |= {"family": family, "positions": positions, **PLACES[place]}
                yield f"{family} {place}", build(number, **choices)


def test_the_last_layer_is_the_models_answer_bit_for_bit():
    models = {name: build(**changes) for name, changes in HEADS.items()}
    for place, changes in PLACES.items():
        models |= {f"{place} {norm}": build(norm=norm, **changes) for norm in ("layernorm", "rmsnorm")}
    for place in ("pre", "post", "sandwich"):
        models[f"both, {place}"] = build(family="encoder-decoder", norm_position=place)
    for name, model in models.items():
        given, more = inputs(model.config)
        main_input = given if isinstance(given, torch.Tensor) else torch.tensor([more.get("target", given)])
        source = {"source": torch.tensor([given])} if more else {}
        with torch.no_grad(), ch.record(model, *states(model.main.spec)) as seen:
            logits = model(main_input, **source).logits
        assert torch.equal(stopped_at(model, seen[states(model.main.spec)[-1]]), logits), name
        found = lens(model, given, **more, top=2)
        assert found.chosen_ranks[-1].eq(1).all(), name
        assert found.divergence[-1].abs().max() == 0, name


def test_every_number_of_the_lens_by_hand():
    model = build(n_layers=3, logit_scale=3.0).double()
    found = lens(model, IDS, top=4)
    with torch.no_grad(), ch.record(model, "embedding", "blocks.*.resid_post") as seen:
        last = model(torch.tensor([IDS])).logits[0].numpy()
    head, norm = model.head.out.weight.detach().numpy(), model.decoder.norm
    assert found.layers == ("embedding", "block 0", "block 1", "block 2")
    for layer, name in enumerate(["embedding", *(f"blocks.{block}.resid_post" for block in range(3))]):
        for place, x in enumerate(seen[name][0].numpy()):
            x = (x - x.mean()) / np.sqrt(x.var() + norm.eps)
            x = x * norm.weight.detach().numpy() + norm.bias.detach().numpy()
            p = np.exp(head @ x * 3.0) / np.exp(head @ x * 3.0).sum()
            final = np.exp(last[place]) / np.exp(last[place]).sum()
            order = np.argsort(-p)
            assert found.top[layer, place].tolist() == order[:4].tolist()
            assert found.top_names[layer][place] == tuple(map(str, order[:4]))
            np.testing.assert_allclose(found.top_probabilities[layer, place], p[order[:4]], atol=1e-6)
            assert float(found.entropy[layer, place]) == pytest.approx(-(p * np.log2(p)).sum(), abs=1e-5)
            apart = (final * np.log2(final / p)).sum()
            assert float(found.divergence[layer, place]) == pytest.approx(apart, abs=1e-5)
            assert found.chosen[place] == final.argmax()
            assert int(found.chosen_ranks[layer, place]) == 1 + order.tolist().index(final.argmax())
            chosen = float(found.chosen_probabilities[layer, place])
            assert chosen == pytest.approx(p[final.argmax()], abs=1e-6)
            if place + 1 < len(IDS):
                assert found.true[place] == IDS[place + 1]
                assert int(found.true_ranks[layer, place]) == 1 + order.tolist().index(IDS[place + 1])
                true = float(found.true_probabilities[layer, place])
                assert true == pytest.approx(p[IDS[place + 1]], abs=1e-6)
    assert found.true[-1] == -1
    assert found.true_names[-1] is None
    assert found.true_probabilities[:, -1].isnan().all()
    plain = found.to_dict()
    assert json.loads(json.dumps(plain, allow_nan=False))["true_probabilities"][0][-1] is None


def test_columns_and_choices_of_each_head():
    span = lens(build(**HEADS["span"]), IDS, top=3)
    assert span.columns == ("begins", "ends") and span.kind == "place"
    assert span.chosen_names[0].split(":")[1] == str(IDS[int(span.chosen[0])])
    image = build(**HEADS["image"])
    assert lens(image, inputs(image.config)[0]).columns == ("whole image",)
    assert lens(build(**HEADS["classifier, mean"]), IDS).top_names[0][0][0].startswith("LABEL_")
    masked = ch.Model(build(**HEADS["masked"]), special={"mask": IDS[2]})
    true = [token for token in lens(masked, IDS).true.tolist() if token != -1]
    assert true == [token for token in IDS if token != IDS[2]]
    # Ask for more than one piece of columns, and for all choices.
    assert lens(build(), list(range(V)) * 2, top=99).top.shape == (3, 2 * V, V)
    for head in ("embedding", "none"):
        with pytest.raises(ch.InputError, match="gives vectors, not choices"):
            lens(build(family="encoder", head=head), IDS)
    with pytest.raises(ch.InputError, match="top 0 keeps nothing"):
        lens(build(), IDS, top=0)


@pytest.mark.slow
def test_contributions_add_up_to_the_logit(differences):
    cases = [*matrix(), *((name, build(**changes)) for name, changes in HEADS.items())]
    for number, (name, model) in enumerate(cases):
        given, more = inputs(model.config)
        against = [None, 1][number % 2]
        found = contributions(model, given, 0, **more, against=against, position=-1)
        total, logit = torch.tensor(found.total), torch.tensor(found.logit)
        assert differences.see("sum=logit", total, logit) <= 1e-5, name
        assert (found.capped is not None) == (model.config.logit_softcap is not None)
        if found.capped is not None:
            cap, said = model.config.logit_softcap, scores_of(model, given, more)
            other = said[1] if against is not None else said.mean()
            assert found.capped == pytest.approx(float(said[0] - other), abs=1e-5)
            before = cap * torch.atanh(said / cap)
            other = before[1] if against is not None else before.mean()
            assert found.logit == pytest.approx(float(before[0] - other), abs=1e-3)


def scores_of(model, given, more):
    """Return the last column of the model's scores [N], in float64."""
    prepared = prepare(model, given, **more)
    with torch.no_grad():
        return choices_of(prepared).scores(prepared.run().required_logits)[0, -1].double()


@pytest.mark.ledger("T1")
@pytest.mark.parametrize("family", ["decoder", "encoder", "encoder-decoder"])
def test_centred_contributions_add_up_to_the_logit_over_the_mean(family):
    """In float64, of a model whose output layer gives every token of the vocabulary a common lift."""
    model = build(family=family, head="mlm" if family == "encoder" else "lm").double()
    given, more = inputs(model.config)
    with torch.no_grad():
        model.head.out.weight += torch.randn(model.config.d_model, dtype=torch.float64)
    scores, found = scores_of(model, given, more), contributions(model, given, 3, **more)
    assert found.centred and found.against is None
    assert found.logit == pytest.approx(float(scores[3] - scores.mean()), abs=1e-10)
    assert found.total == pytest.approx(found.logit, abs=1e-10)
    assert found.probability == pytest.approx(float(scores.softmax(-1)[3]), abs=1e-12)
    sources = paths(model, given, 3, **more)
    assert sources.total == pytest.approx(found.logit, abs=1e-10)
    best, second = scores.topk(2).indices.tolist()
    beside = contributions(model, given, **more, against="runner-up")
    assert (beside.choice, beside.against) == (str(best), str(second)) and not beside.centred
    assert beside.total == pytest.approx(float(scores[best] - scores[second]), abs=1e-10)


def test_a_part_that_lifts_every_token_counts_for_nothing():
    """The planted part: the last feed-forward's bias is a direction whose logits are all alike."""
    model = build(tie_embeddings=False, feedforward_bias=True, norm="rmsnorm").double()
    last = model.main.blocks[-1].feedforward
    with torch.no_grad():
        model.main.norm.weight.fill_(1)
        model.head.out.weight[:, 0] = 1  # of every token
        last.down.weight.zero_()
        last.down.bias.zero_()[0] = 100
    term = f"feedforward {model.config.n_layers - 1}"
    found = {term.name: term.value for term in contributions(model, IDS, 3).terms}
    raw = model(torch.tensor([IDS])).logits.detach()[0, -1, 3]
    assert abs(found[term]) < 1e-9 and abs(float(raw)) > 1


def test_classes_that_may_all_hold_are_not_centred():
    """Each has a sigmoid, which what they gain alike does change; nor is a single number."""
    model = build(**HEADS["classifier, mean"])
    m = ch.Model(model)
    assert contributions(m, IDS, 0).centred
    multi = SimpleNamespace(theirs={"problem_type": "multi_label_classification"})
    m = ch.Model(model, description=multi)
    logit = float(model(torch.tensor([IDS])).logits.detach()[0, 0])
    found = contributions(m, IDS, 0)
    assert not found.centred and found.logit == pytest.approx(logit, abs=1e-6)
    assert found.probability == pytest.approx(1 / (1 + math.exp(-logit)), abs=1e-6)


def test_contributions_name_the_logit_of_the_model():
    model = build(n_layers=2)
    logits = model(torch.tensor([IDS])).logits[0].detach()
    centred = float(logits[2, 4] - logits[2].mean())
    assert contributions(model, IDS, 4, position=2).logit == pytest.approx(centred, abs=1e-6)
    assert contributions(model, IDS, "4", against="7").logit == pytest.approx(
        float(logits[-1, 4] - logits[-1, 7]), abs=1e-6
    )
    assert contributions(model, IDS).choice == str(int(logits[-1].argmax()))
    span = build(**HEADS["span"])
    said = span(torch.tensor([IDS])).logits[0].detach()
    assert contributions(span, IDS, 3, position=0, against=5).logit == pytest.approx(
        float(said[3, 0] - said[5, 0]), abs=1e-6
    )


def frozen_run(model: ch.Transformer, run, sizes: dict[nn.Module, torch.Tensor] | None):
    """Run with norms held at `sizes`, or as they are with None. Return the logits and the norms' sizes."""
    seen, hooks = {}, []

    def hook(norm, given, _):
        (x,) = given
        centred = x - x.mean(-1, keepdim=True) if isinstance(norm, LayerNorm) else x
        seen[norm] = (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt()
        scale = 1 + norm.weight if norm.unit_offset else norm.weight
        y = centred / (seen[norm] if sizes is None else sizes[norm]) * scale
        return y + norm.bias if isinstance(norm, LayerNorm) and norm.bias is not None else y

    for part in model.modules():
        if isinstance(part, LayerNorm | RMSNorm):
            hooks.append(part.register_forward_hook(hook))
    try:
        with torch.no_grad():
            return run(), seen
    finally:
        for one in hooks:
            one.remove()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
def test_a_head_is_what_is_missing_without_it(family, place):
    """Compute slowly: run with frozen norms and every other sublayer's answer held, one head's z at zero."""
    if family == "encoder-decoder" and "parallel" in place:
        pytest.skip("no place for cross-attention")
    model = build(family=family, n_kv_heads=2, residual_scale=0.7, **PLACES[place]).double()
    given, more = inputs(model.config)
    ids = torch.tensor([more.get("target", given)])
    source = {"source": torch.tensor([given])} if more else {}

    def run():
        logits = model(ids, **source).logits[0, -1]
        return logits[3] - logits.mean()

    taps = [name for name in ch.tap_names(model.config) if not name.startswith("encoder.")]
    outs = [name for name in taps if name.endswith(".out")]
    with ch.record(model, *outs) as seen:
        whole, sizes = frozen_run(model, run, None)
    found = contributions(model, given, 3, **more)
    assert found.logit == pytest.approx(float(whole), abs=1e-10)
    terms = {(term.kind, term.layer, term.head): term.value for term in found.terms if term.kind != "bias"}
    for name in outs:
        layer, kind = int(name.split(".")[1]), name.split(".")[2]
        held = {other: lambda x, y=seen[other]: y for other in outs if other != name}
        if kind == "feedforward":
            with ch.edit(model, {**held, name: torch.zeros_like}):
                without, _ = frozen_run(model, run, sizes)
            assert terms["feedforward", layer, None] == pytest.approx(float(whole - without), abs=1e-10)
            continue
        for head in range(4):
            without_head = torch.ones(1, 4, 1, 1, dtype=torch.float64).index_fill(1, torch.tensor([head]), 0)
            with ch.edit(model, {**held, name.replace(".out", ".z"): lambda z, kept=without_head: z * kept}):
                without, _ = frozen_run(model, run, sizes)
            term = terms["self" if kind == "attention" else kind, layer, head]
            assert term == pytest.approx(float(whole - without), abs=1e-10)


def test_wrong_names_are_refused_in_one_line():
    model = build()
    for change, words in (
        ({"token": 99}, "there is no token 99"),
        ({"token": "cat"}, "no tokenizer"),
        ({"position": 8}, "there is no position 8"),
        ({"token": 2, "against": 2}, "against itself"),
    ):
        with pytest.raises(ch.InputError, match=words):
            contributions(model, IDS, **change)
    with pytest.raises(ch.InputError, match='class "LABEL_9" is not known'):
        contributions(build(**HEADS["tagger"]), IDS, "LABEL_9")


@pytest.fixture(scope="module")
def stories(shared):
    folder = shared / "weights" / "stories260K"
    return folder, ch.load(folder / "hf", tokenizer=folder / "tok512.bin")


def test_a_trained_model_and_its_pictures(stories):
    _, m = stories
    text = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."
    text += " One day"
    found = lens(m, text)
    assert found.chosen_names[-1] == "," and found.true_names[:2] == ("·Once", "·upon")
    figure = draw_lens(found)
    cells = [cell.get_text() for axes in figure.axes for cell in axes.texts]
    assert len(cells) == len(found.layers) * len(found.columns)
    first = math.ceil(len(found.columns) / math.ceil(len(found.columns) / 20))  # columns of the first panel
    assert cells[:first] == [names[0] for names in found.top_names[-1]][:first]  # the last layer is on top
    assert any("probability of the token" in axes.get_ylabel() for axes in figure.axes)
    parts = contributions(m, text, against="·her")
    assert parts.total == pytest.approx(parts.logit, abs=1e-4)
    assert any("added to the logit" in axes.get_ylabel() for axes in draw_contributions(parts).axes)


def test_the_command(stories, clearhead, tmp_path):
    folder, _ = stories
    asked = ["lens", str(folder / "hf"), "Once upon a", "--tokenizer", str(folder / "tok512.bin")]
    body = clearhead(*asked, f"--json --plot {tmp_path}/lens.png").json
    assert body["chosen_names"][-1] == "·time" and (tmp_path / "lens.png").stat().st_size > 1000
    assert "·time" in clearhead(*asked).out
    body = clearhead(*asked, "--contributions --token", " time", "--against ·day --json").json
    assert (body["choice"], body["against"]) == ("·time", "·day")
    assert body["total"] == pytest.approx(body["logit"], abs=1e-4)
    for wrong in (["--token ·time"], ["--position 9"], ["--contributions --token", "girls and boys"]):
        clearhead.refuses("", *asked, *wrong)
