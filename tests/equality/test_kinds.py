"""Every kind of attention in the equality matrix, and long rows by blocks against the dense mask."""

from __future__ import annotations

import pytest
import torch

import clearhead as ch
from clearhead.core.config.kinds import KINDS, read_kind
from clearhead.inside.checks.reference_float64 import reference_logits
from clearhead.variants import blocks
from tests.equality.test_matrix import Case
from tests.harness import build, gradients, in_pieces, some_ids

# Every kind that is registered, with sizes that matter in short rows, and more of some.
TEXTS = [str(kind().shortened(3)) for kind in KINDS.values()] + [
    "window(3, sinks=2)",
    "dilated(2, 3, sinks=1)",
    "strided(3, sinks=1)",
    "blocks(2, 1, 2, 0, 1)",
    "blocks(2, 3, 0, 0, 2, sinks=1)",
    "blocks(2, 1, 1, counted=blocks, repeat=2)",
    "blocks(2, 3, 1, 1, counted=blocks, repeat=3, full=7)",
    "blocks(1, 3, 2, 1, repeat=1, full=20)",
    "global(2, sinks=1)",
    "linear(relu)",
    "linear(favor, 20, seed=3)",
]
MIXED = [("full", "linear"), ("window(3, sinks=1)", "gated-delta"), ("blocks(2, 1, 1)", "dilated(2, 2)")]
LONG = [
    "window(20)",
    "strided(13, sinks=3)",
    "global(20)",
    "window(20, sinks=3)",
    "dilated(8, 3, sinks=2)",
    "blocks(32, 3, 5)",
    "blocks(24, 3)",
]
BLOCKS = [
    "blocks(32, 3, 5, 7, 1)",
    "blocks(32, 1, 4, 0, 2)",
    "blocks(24, 3, 1, 1, counted=blocks, repeat=3, full=200)",
]


HALVES = ("gated-delta", "low-rank", "global")  # the first is for decoders, the others for encoders


def model_of(attention, **choices) -> ch.Transformer | None:
    """The model, or None where the config refuses the kind in this family."""
    texts = [attention] if isinstance(attention, str) else attention
    refused = {"encoder": ("gated-delta",), "decoder": HALVES[1:]}.get(choices["family"], HALVES)
    kinds = [read_kind(text) for text in texts]
    ends = choices["family"] != "encoder" and any(
        getattr(kind, name, 0) for kind in kinds for name in ("last", "full")
    )
    if not ends and not any(text.startswith(refused) for text in texts):
        return build(attention=attention, **choices)
    with pytest.raises(ch.ConfigError, match=r"it is for|where its text ends"):
        build(attention=attention, **choices)
    return None


@pytest.mark.ledger("J1", "J2", "C5", "D1")
@pytest.mark.parametrize("attention", [*TEXTS, *MIXED], ids=str)
@pytest.mark.parametrize("family", ["encoder", "decoder", "encoder-decoder"])
def test_every_kind_is_the_same_however_it_is_run(family, attention, differences):
    if not isinstance(attention, str) and family == "encoder-decoder":
        return  # its encoder has one layer here
    cases = (("learned", 4), ("rope", 2)) if isinstance(attention, str) else (("learned", 2),)
    for number, (positions, heads) in enumerate(cases):
        choices = {"family": family, "positions": positions, "n_kv_heads": heads, "attention": attention}
        if model_of(**choices) is None:
            return
        case = Case(differences, number, **choices)
        case.backward()
        with torch.no_grad():
            case.padded()
            case.saved()
            if case.causal:
                case.cached()
                case.future()
            alone = case.model(case.ids[:1], **{name: x[:1] for name, x in case.source.items()}).logits
            case.equal("alone", alone, case.logits[:1])
            weights = case.model.state_dict()
            formula = reference_logits(case.model.config, weights, case.ids, **case.source)
            case.equal("formula", case.logits.double().cpu().float(), formula.float())


MIXTURE = {"n_experts": 2, "d_expert": 9, "d_shared_expert": 10}


@pytest.mark.ledger("D5", "C5", "D1")
@pytest.mark.parametrize("family", ["encoder", "decoder", "encoder-decoder"])
def test_gated_heads_and_a_shared_expert_are_the_same_however_they_are_run(family, differences):
    own = {"attention": ("linear", "gated-delta"), "dense_layers": (1,)} if family == "decoder" else {}
    # The decoder of seed 0 moves by 1.1e-5 when its weights move by one unit of their last place.
    for number, more in enumerate(
        ({}, {"d_value": 6, "gated": True, "parallel": family != "encoder-decoder"}), start=1
    ):
        choices = {"family": family, "n_kv_heads": 2, "attention_gate": True, **MIXTURE, **own, **more}
        case = Case(differences, number, **choices)
        case.backward()
        with torch.no_grad():
            case.padded()
            case.saved()
            if case.causal:
                case.cached()
                case.future()
            formula = reference_logits(case.model.config, case.model.state_dict(), case.ids, **case.source)
            case.equal("formula", case.logits.double().cpu().float(), formula.float())


@pytest.mark.parametrize("attention", [*TEXTS, *MIXED], ids=str)
@pytest.mark.parametrize("family", ["encoder", "decoder"])
def test_packed_documents_do_not_meet(family, attention):
    model = model_of(attention, family=family, positions="rope", n_kv_heads=2)
    if model is None:
        return
    ids, documents = some_ids(2, 11), torch.tensor([[0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 2]]).expand(2, -1)
    if "low-rank" in attention:
        with pytest.raises(ch.InputError, match="packed documents must not meet"):
            model(ids, documents=documents)
        return
    with torch.no_grad():
        alone = torch.cat([model(piece).logits for piece in ids.split((4, 2, 5), dim=1)], dim=1)
        assert (model(ids, documents=documents).logits - alone).abs().max() < 1e-5
        if family == "decoder":
            cached = in_pieces(model, ids, [3, 1, 4, 3], ch.Cache(), documents=documents)
            assert (cached - alone).abs().max() < 1e-5


@pytest.mark.ledger("J1", "J2", "L7")
@pytest.mark.parametrize("attention", [*LONG, *BLOCKS])
@pytest.mark.parametrize("family", ["encoder", "decoder"])
def test_blocks_are_the_dense_mask(family, attention, monkeypatch):
    """Rows so long that keys are gathered by blocks: plain, padded, packed, forward and backward."""
    plans, plan_blocks = [], blocks.plan_blocks

    def watched(*given):
        plans.append(plan_blocks(*given))
        return plans[-1]

    monkeypatch.setattr(blocks, "plan_blocks", watched)
    length = 620
    for positions in ("rope", "alibi", "relative"):
        choices = {"family": family, "positions": positions, "n_kv_heads": 2, "n_layers": 1}
        model = model_of(attention, **choices, max_positions=length)
        if model is None:
            return
        ids, mask = some_ids(2, length), torch.ones(2, length, dtype=torch.bool)
        mask[1, :90], mask[0, 300:320] = False, False
        documents = (torch.arange(length) // 210)[None].expand(2, -1)
        for given in ({}, {"mask": mask}, {"documents": documents}):
            real = given.get("mask", torch.ones_like(mask))
            plans.clear()
            blocked = model(ids, **given).logits[real]
            assert given or plans[0] is not None, "blocks were not used"
            with ch.attending(model, "eager"):
                dense = model(ids, **given).logits[real]
            assert (blocked - dense).abs().max() < 1e-5
            if positions == "rope":
                generator = torch.Generator().manual_seed(1)
                weights = torch.randn(dense.shape, generator=generator) / dense.numel() ** 0.5
                mine, theirs = (gradients(model, (logits * weights).sum()) for logits in (blocked, dense))
                assert max(float((mine[name] - theirs[name]).abs().max()) for name in theirs) < 1e-4


def test_a_long_prompt_in_blocks_goes_on_as_one_pass():
    """Prompts read in pieces that are long enough for blocks, into growing and window caches."""
    for attention in ("window(20, sinks=3)", "dilated(8, 3)", "strided(20)", "blocks(32, 3, 5, 0, 1)"):
        model = build(attention=attention, positions="rope", max_positions=700)
        ids = some_ids(2, 640)
        with torch.no_grad():
            whole = model(ids).logits
            for form in (ch.Cache, ch.WindowCache):
                assert (in_pieces(model, ids, [300, 330, 1, 9], form()) - whole).abs().max() < 1e-5


WRONG = {
    "windw(3)": 'did you mean "window"',
    "window(0)": "size 0: it must be a whole number, 1 or more",
    "window(3, 4, 5)": 'has "5": window takes size, sinks',
    "window(size=2, size=3)": "gives size twice",
    "window(size=2, 3)": 'has "3" after a number with a name: give it a name too',
    "linear(foo)": "choose from elu, relu, favor",
    "full(3)": "full takes nothing in brackets",
    "blocks(4, 2)": "choose an odd number of blocks",
    "blocks(4, full=9)": "has full 9, and a decoder does not know where its text ends",
    "blocks(4, repeat=2)": "has repeat 2: set first",
    "blocks(4, counted=words)": "choose from tokens, blocks",
    "low-rank(4)": "it is for encoders",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_kind_is_named(text):
    with pytest.raises(ch.ConfigError, match=WRONG[text].replace("(", r"\(")):
        build(attention=text)


@pytest.mark.parametrize("attention", ["linear", "gated-delta", "low-rank(4)"])
def test_what_has_no_meaning_is_refused(attention):
    family = "encoder" if attention.startswith("low") else "decoder"
    for choice, says in (
        ({"attention_softcap": 5.0}, "no scores for attention_softcap"),
        ({"attention_sink": True}, "no softmax for attention_sink"),
        ({"positions": "alibi"}, "could add a bias"),
        ({"window": 4}, "leave window out"),
        ({"attention": (attention, "full"), "layer_groups": 1}, "give both the same kind"),
    ):
        with pytest.raises(ch.ConfigError, match=says):
            build(**{"family": family, "attention": attention, **choice})
    with pytest.raises(ch.ConfigError, match="do not repeat"):
        build(attention=("full", "linear", "full"))


def test_a_state_does_not_step_back():
    model, cache = build(attention="linear"), ch.Cache()
    model(some_ids(2, 5), cache=cache)
    with pytest.raises(ch.InputError, match="cannot step back to 3 of 5 tokens"):
        cache.crop(3)
    cache.crop(0)
    with torch.no_grad():
        ids = some_ids(2, 6, seed=4)
        assert torch.equal(model(ids, cache=cache).logits, model(ids, cache=ch.Cache()).logits)


def test_kinds_read_back_as_written():
    for text in [*TEXTS, *LONG, *BLOCKS]:
        kind = read_kind(text)
        assert read_kind(str(kind)) == kind


def test_columns_join_what_blocks_found():
    """Strided attention with a sink, a soft-cap, pruned heads and narrow values."""
    more = {"attention_sink": True, "attention_softcap": 5.0, "d_value": 6}
    more["pruned_heads"] = {"blocks.0.attention": (1,)}
    model = build(attention="strided(20)", positions="alibi", n_layers=1, max_positions=620, **more)
    ids = some_ids(2, 620)
    with torch.no_grad():
        found = model(ids).logits
        with ch.attending(model, "eager"):
            assert (found - model(ids).logits).abs().max() < 1e-5
