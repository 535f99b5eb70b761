"""Every kind of attention in the equality matrix, and long rows by blocks against the dense mask."""

from __future__ import annotations

import pytest
import torch

import clearhead as ch
from clearhead.core import masks
from clearhead.core.config.kinds import KINDS
from clearhead.inside.checks.reference_float64 import reference_logits
from clearhead.variants import block_attention, blocks
from clearhead.variants.blocks import plan_blocks
from clearhead.variants.checks import read_kind
from clearhead.variants.global_attention import GlobalAttention
from clearhead.variants.kinds import shortened
from tests.equality.test_matrix import Case
from tests.harness import GROUPED_EXPERTS, LATENT, build, gradients, in_pieces, pad, some_ids

# Every kind that is registered, with sizes that matter in short rows, and more of some.
TEXTS = [str(shortened(kind(), 3)) for kind in KINDS.values()] + [
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
SHARED = {"rope_fraction": 0.5, "d_value": 6}  # of latent kinds
MIXED = [
    ("latent(5, query_rank=7)", "full"),
    ("full", "linear"),
    ("window(3, sinks=1)", "gated-delta"),
    ("mamba2(groups=2, d_state=3, norm=groups, dt_max=0.4)", "none"),
    ("conv(2, bias=True)", "full"),
    ("blocks(2, 1, 1)", "dilated(2, 2)"),
]
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


RECURRENT = ("gated-delta", "mamba2", "hybrid", "conv")  # for decoders
HALVES = ("low-rank", "global", "block-causal")  # for encoders


def model_of(attention, **choices) -> ch.Transformer | None:
    """The model, or None where the config refuses the kind in this family."""
    texts = [attention] if isinstance(attention, str) else attention
    both = (*RECURRENT, *HALVES)
    refused = {"encoder": RECURRENT, "decoder": HALVES}.get(choices["family"], both)
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
    if family == "encoder-decoder":  # either choice alone: every kind has both in another family
        cases = cases[TEXTS.index(attention) % 2 :][:1]
    cases = (("rope", 4),) if "latent" in str(attention) else cases
    for number, (positions, heads) in enumerate(cases):
        choices = {"family": family, "positions": positions, "n_kv_heads": heads, "attention": attention}
        choices |= SHARED if "latent" in str(attention) else {}
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
ROUTED = {  # by groups, of sigmoids with a correction, or of a softmax
    "sigmoid": GROUPED_EXPERTS,
    "softmax": {
        **dict(
            GROUPED_EXPERTS, router_order="softmax_topk", router_correction=False, router_renormalise=False
        ),
        **dict(router_groups=2, n_active_groups=1, dense_layers=(0,)),
    },
}


@pytest.mark.ledger("D5", "C5", "D1", "W1")
@pytest.mark.parametrize("name", ROUTED)
def test_latent_heads_and_groups_of_experts_are_the_same_however_they_are_run(name, differences):
    choices = {"attention_sink": True, "norm": "rmsnorm", **LATENT, **ROUTED[name]}
    case = Case(differences, 1, family="decoder", n_kv_heads=4, **choices)
    case.backward()
    with torch.no_grad():
        case.padded()
        case.saved()
        case.cached()
        formula = reference_logits(case.model.config, case.model.state_dict(), case.ids)
        case.equal("formula", case.logits.double().cpu().float(), formula.float())


AXES = {  # three axes in a decoder (Qwen2.5-VL), two in the encoder of its images
    "decoder": {"family": "decoder", "rope_sections": (2, 1, 1), "norm": "rmsnorm", "n_kv_heads": 2},
    "part": {
        "family": "decoder",
        "rope_sections": (1, 1, 1),
        "rope_fraction": 0.75,
        "rope_layout": "interleaved",
    },
    "window": {"family": "decoder", "rope_sections": (1, 2, 1), "window": 3, "qk_norm": "head"},
    "encoder": {"family": "encoder", "rope_sections": (2, 2), "rope_axial": True},
}


@pytest.mark.ledger("J1", "C2", "C5", "D1", "W5")
@pytest.mark.parametrize("name", AXES)
def test_positions_on_several_axes_are_the_same_however_they_are_run(name, differences):
    """An image of 2 x 2 squares between texts: rotated by time, height and width; later text counts on."""
    case = Case(differences, 2, **{"positions": "rope", "d_head": 8, **AXES[name]})
    count = len(case.model.config.rope_sections)
    image = [[2, 2 + place // 2, 2 + place % 2][-count:] for place in range(4)]
    axes = torch.tensor([[0] * count, [1] * count, *image, [4] * count, [5] * count])
    case.source = {"axes": axes.repeat(2, 1, 1)}  # what every call takes
    plain = case.logits
    with torch.no_grad():
        case.logits = case.model(case.ids, axes=axes[None]).logits  # once for all rows
        assert (case.logits - plain).abs().max() > 1e-3
    case.backward()
    with torch.no_grad():
        case.saved()
        formula = reference_logits(case.model.config, case.model.state_dict(), case.ids, axes=axes[None])
        case.equal("formula", case.logits.double().cpu().float(), formula.float())
        for where in ("left", "right", "gaps"):
            ids, mask = pad(case.ids, where)
            spread = torch.full((*ids.shape, count), 3)
            spread[mask] = axes.repeat(2, 1)
            case.equal(
                "padded",
                case.model(ids, mask=mask, axes=spread).logits[mask].view_as(case.logits),
                case.logits,
            )
        if not case.causal:
            return
        case.future()
        for cache in (ch.Cache(), ch.WindowCache(), ch.Cache(reserve=9)):
            case.through("cached", [3, 2, 1, 2], cache)
        for split in (6, 7):  # the text after an image counts on by itself
            cache = ch.Cache()
            before = case.model(case.ids[:, :split], cache=cache, axes=axes[None, :split]).logits
            after = case.model(case.ids[:, split:], cache=cache).logits
            case.equal("cached", torch.cat([before, after], 1), case.logits)


@pytest.mark.ledger("J1", "C5", "D1", "W2")
@pytest.mark.parametrize(
    "attention", ["full", "window(3, sinks=1)", "latent(5, query_rank=7)", "gated-delta"]
)
def test_mtp_layers_are_the_same_however_they_are_run(attention, differences):
    """The states of three layers, each a token further."""
    shared = SHARED if "latent" in attention else {}
    choices = {"family": "decoder", "positions": "rope", "attention": attention, "n_mtp_layers": 3, **shared}
    case = Case(differences, 3, **choices)

    def states(ids: torch.Tensor, **given: torch.Tensor) -> torch.Tensor:
        return torch.stack(case.model(ids, mtp=True, **given).mtp)  # N B T D

    def known(x: torch.Tensor) -> torch.Tensor:
        """Those that have read no token past the end: [B, ...]."""
        return torch.cat([each[:, : x.shape[2] - 1 - number] for number, each in enumerate(x)], 1)

    probe = torch.randn(3, 2, 8, 16, generator=torch.Generator().manual_seed(4)) / 48
    found = {}
    for kernel in ("eager", "fused"):
        with ch.attending(case.model, kernel):
            whole = states(case.ids)
            loss = (known(whole) * known(probe)).sum()
            found[kernel] = whole, gradients(case.model, loss)
    (whole, learned), (fused, others) = found["eager"], found["fused"]
    case.equal("fused=eager", known(fused), known(whole))
    for name, gradient in learned.items():
        if name.startswith("mtp."):
            assert gradient is not None and (gradient.any() or name.endswith("k.bias")), name
            case.equal("gradients", others[name], gradient)
    with torch.no_grad():
        case.saved()
        case.equal("alone", known(states(case.ids[:1])), known(whole)[:1])
        for padding in (slice(0, 3), slice(8, 11)):
            mask = torch.ones(2, 11, dtype=torch.bool)
            mask[:, padding] = False
            ids = some_ids(2, 11, seed=9)
            ids[mask] = case.ids.flatten()
            padded = states(ids, mask=mask)[:, mask].view_as(whole)
            case.equal("padded", known(padded), known(whole))
        packed = case.ids.flatten()[None]
        documents = torch.arange(2).repeat_interleave(8)[None]
        joined = states(packed, documents=documents).view_as(whole)
        case.equal("packed", known(joined), known(whole))


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
    latent = "latent" in str(attention)
    given = {"n_kv_heads": 4, **SHARED} if latent else {"n_kv_heads": 2}
    model = model_of(attention, family=family, positions="rope", **given)
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
@pytest.mark.slow
def test_blocks_are_the_dense_mask(family, attention, monkeypatch):
    """Rows so long that keys are gathered by blocks: plain, padded, packed, forward and backward."""
    plans, plan_blocks = [], blocks.plan_blocks

    def watched(*given):
        plans.append(plan_blocks(*given))
        return plans[-1]

    monkeypatch.setattr(blocks, "plan_blocks", watched)
    length, bias = 620, ("alibi", "relative")[[*LONG, *BLOCKS].index(attention) % 2]
    for positions in ("rope", bias):
        choices = {"family": family, "positions": positions, "n_kv_heads": 2, "n_layers": 1}
        model = model_of(attention, **choices, max_positions=length)
        if model is None:
            return
        ids, mask = some_ids(2, length), torch.ones(2, length, dtype=torch.bool)
        mask[1, :90], mask[0, 300:320] = False, False
        documents = (torch.arange(length) // 210)[None].expand(2, -1)
        padded = [{"mask": mask}, {"documents": documents}]
        together = [{"mask": mask, "documents": documents}]
        for given in ({}, *(padded if positions == "rope" else together)):
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


# Global tokens that a call names, or the question: against the formula, by blocks and densely ---------------


SEPARATOR = 7


def encoder(attention: str, **choices) -> ch.Transformer:
    return build(family="encoder", attention=attention, n_layers=2, **choices)


def marks(*rows: tuple[int, ...], length: int) -> torch.Tensor:
    """A mask with these slots of each row."""
    made = torch.zeros(len(rows), length, dtype=torch.bool)
    for row, slots in zip(made, rows):
        row[list(slots)] = True
    return made


def with_questions(ids: torch.Tensor, *ends: int) -> torch.Tensor:
    """The same ids with the first separator of each row at its end; 0: with none."""
    ids = torch.where(ids == SEPARATOR, SEPARATOR + 1, ids)
    for row, end in zip(ids, ends):
        if end:
            row[[end, end + 3]] = SEPARATOR
    return ids


@pytest.mark.cpu
@pytest.mark.ledger("J1", "L7", "D1")
@pytest.mark.parametrize(
    "choices",
    [
        {"positions": "learned"},
        {"positions": "rope", "n_kv_heads": 2, "qk_norm": "head"},
        {"positions": "alibi", "attention_sink": True},
        {"positions": "relative", "attention_softcap": 5.0, "pruned_heads": {"blocks.0.attention": (1,)}},
    ],
    ids=lambda choices: choices["positions"],
)
def test_global_tokens_are_the_formula(choices):
    """Eager and fused, with another number of global tokens in each row, padding among them."""
    ids, mask = some_ids(3, 11), torch.ones(3, 11, dtype=torch.bool)
    mask[1, :3], mask[2, 6] = False, False
    given = {"mask": mask, "global_mask": marks((0, 4, 10), (), (6, 7), length=11)}
    for attention, more in (("global(3, given)", given), ("global(3, question, 7)", {"mask": mask})):
        model = encoder(attention, **choices)
        rows = with_questions(ids, 4, 7, 0)
        with torch.no_grad():
            formula = reference_logits(model.config, model.state_dict(), rows, **more).float()
            for kernel in ("eager", "fused"):
                with ch.attending(model, kernel):
                    assert (model(rows, **more).logits - formula)[mask].abs().max() < 1e-5


@pytest.mark.cpu
@pytest.mark.ledger("J1", "L7")
@pytest.mark.parametrize("positions", ["rope", "alibi", "learned"])
def test_global_tokens_by_blocks_are_the_dense_mask(positions, monkeypatch):
    """Long rows: plain, padded, packed; forward and backward."""
    plans, plan_blocks = [], blocks.plan_blocks
    monkeypatch.setattr(blocks, "plan_blocks", lambda *given: plans.append(plan_blocks(*given)) or plans[-1])
    length, pruned = 620, {"blocks.1.attention": (0, 1)}
    ids, mask = with_questions(some_ids(2, length), 5, 90), torch.ones(2, length, dtype=torch.bool)
    mask[1, :70], mask[0, 300:320] = False, False
    marked = marks((0, 3, 310, 500), (75,), length=length)
    documents = (torch.arange(length) // 310)[None].expand(2, -1)
    cases = [
        ("global(20, given)", {"global_mask": marked}),
        ("global(20, given)", {"global_mask": marked, "mask": mask, "documents": documents}),
        ("global(20, given)", {"mask": mask}),
        ("global(20, question, 7)", {"mask": mask}),
        ("global(20)", {"documents": documents}),
    ]
    turned, turn = [], GlobalAttention._absorbed
    monkeypatch.setattr(GlobalAttention, "_absorbed", lambda *given: turned.append(1) or turn(*given))
    more, cases = {}, cases[: 5 if positions == "rope" else 2]
    if positions == "learned":  # one global token in a row: keys and values of all are not computed
        more = {"attention_sink": True, "attention_softcap": 5.0}
        cases = [("global(20)", {}), ("global(20)", {"mask": mask})]
    for attention, given in cases:
        choices = {"positions": positions, "n_kv_heads": 2, "max_positions": length, "pruned_heads": pruned}
        choices |= more
        model = encoder(attention, **choices)
        real = given.get("mask", torch.ones_like(mask))
        plans.clear()
        blocked = model(ids, **given).logits[real]
        assert plans[0] is not None, "blocks were not used"
        with ch.attending(model, "eager"):
            dense = model(ids, **given).logits[real]
        assert (blocked - dense).abs().max() < 1e-5
        weights = torch.randn(dense.shape, generator=torch.Generator().manual_seed(1)) / dense.numel() ** 0.5
        mine, theirs = (gradients(model, (logits * weights).sum()) for logits in (blocked, dense))
        learned = [name for name, gradient in theirs.items() if gradient is not None]
        assert len(learned) == sum(gradient is not None for gradient in mine.values())
        assert max(float((mine[name] - theirs[name]).abs().max()) for name in learned) < 1e-4
    assert len(turned) == (2 * len(cases) if positions == "learned" else 0)


@pytest.mark.cpu
def test_a_pattern_shows_what_global_tokens_see():
    model, marked = encoder("global(2, given)"), marks((4,), length=9)
    with ch.record(model, "blocks.0.attention.pattern") as seen:
        model(some_ids(1, 9), global_mask=marked)
    pattern = seen["blocks.0.attention.pattern"][0, 0]
    assert (pattern[4] > 0).all() and (pattern[:, 4] > 0).all()
    assert (pattern[0] > 0).nonzero()[:, 0].tolist() == [0, 1, 4]
    assert torch.allclose(pattern.sum(-1), torch.ones(9))


@pytest.mark.cpu
@pytest.mark.ledger("I1")
def test_global_tokens_are_traced_priced_pruned_and_saved():
    model = encoder("global(3)", norm_position="post")
    traced = ch.trace(model, list(range(9)))
    assert traced.difference < 1e-5
    assert traced.parameters == sum(weight.numel() for weight in model.parameters())
    assert "x · Wk'" in traced["blocks.1.attention.k_global"].formula
    rows = {row.name: row for row in ch.check(model)}
    assert [(row.name, row.note) for row in rows.values() if not row.passed] == []
    assert rows["pruned = masked"].verdict == rows["saved = loaded"].verdict == "equal"


@pytest.mark.cpu
def test_wrong_global_tokens_are_refused():
    ids = some_ids(2, 9)
    with pytest.raises(ch.InputError, match="no layer has global tokens"):
        build(family="encoder")(ids, global_mask=torch.ones(2, 9, dtype=torch.bool))
    model = encoder("global(3, question, 7)")
    with pytest.raises(ch.InputError, match=r"global_mask is torch.int64: it must be boolean"):
        model(ids, global_mask=torch.ones_like(ids))
    with pytest.raises(ch.InputError, match=r"global_mask has shape \(2, 8\)"):
        model(ids, global_mask=torch.ones(2, 8, dtype=torch.bool))
    with pytest.raises(ch.InputError, match="give global_mask, or unpack them"):
        model(ids, documents=torch.zeros_like(ids))
    with pytest.raises(ch.ConfigError, match="separator below vocab_size"):
        encoder("global(3, question, 9999)")
    with pytest.raises(ch.ConfigError, match="choose from first, question, given"):
        encoder("global(3, last)")
    with pytest.raises(ch.ConfigError, match="shares its weights"):
        build(family="encoder", attention=("full", "global(3)"), n_layers=2, layer_groups=1)


@pytest.mark.cpu
@pytest.mark.ledger("J1", "L7")
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.slow
def test_global_tokens_compiled_and_in_bfloat16_are_the_plain_ones():
    """Rows so long that blocks are gathered, with another number of global tokens in each."""
    length = 300
    choices = {"positions": "rope", "max_positions": length, "n_kv_heads": 2}
    model, ids = encoder("global(20, given)", **choices), some_ids(2, length)
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[1, :3] = False
    given = {"mask": mask, "global_mask": marks((0, 4, 10), (7,), length=length)}
    # What is traced is ours; Inductor would compile for half a minute what it makes of the same operations.
    compiled = torch.compile(model, backend="eager")
    plain, traced = (call(ids, **given).logits[mask] for call in (model, compiled))
    assert (plain - traced).abs().max() < 1e-5
    mine, theirs = (gradients(model, logits.square().mean()) for logits in (traced, plain))
    assert max(float((mine[name] - theirs[name]).abs().max()) for name in theirs) < 1e-5
    half, plain = encoder("global(20, given)", **choices).bfloat16(), plain.detach()
    with torch.no_grad():
        blocked = half(ids, **given).logits[mask].float()
        with ch.attending(half, "eager"):
            dense = half(ids, **given).logits[mask].float()
    # Eight bits of mantissa, over two layers: as far from float32 by blocks as by the dense mask.
    assert (blocked - plain).abs().mean() < 0.02 * plain.std()
    assert (blocked - plain).abs().mean() < 1.5 * (dense - plain).abs().mean()


# `flex_attention` behind the predicates of the dense mask ------------------------------------------------


BLOCKED = [
    "window(20, sinks=3)",
    "dilated(8, 3)",
    "blocks(32, 1, 5, 0, 1)",
    "blocks(24, 1, 1, 1, counted=blocks, full=100)",
    "global(20)",
]
LENGTH = 620  # no whole number of blocks


@pytest.fixture
def short_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "FLEX_BLOCK", 32)


def cases() -> dict[str, dict[str, torch.Tensor]]:
    """Plain rows, padding of many kinds, packed documents."""
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[0, :90], mask[1, 300:320], mask[1, 550:] = False, False, False
    return {
        "plain": {},
        "padded": {"mask": mask},
        "packed": {"documents": (torch.arange(LENGTH) // 210)[None].expand(2, -1)},
    }


@pytest.mark.cpu
@pytest.mark.usefixtures("short_blocks")
@pytest.mark.ledger("J1", "J2")
@pytest.mark.parametrize("attention", BLOCKED)
@pytest.mark.parametrize("family", ["encoder", "decoder"])
def test_blocks_and_mask_are_those_of_the_dense_mask(family, attention):
    model = model_of(attention, family=family, positions="rope")
    if model is None:
        return
    kind, causal, ids = model.config.main.kinds[0], family == "decoder", some_ids(2, LENGTH)
    for given in cases().values():
        tokens = masks.tokens_from(2, LENGTH, ids.device, **given)
        tokens = kind.describe(tokens, causal, ids, None)
        plan = plan_blocks(tokens, tokens, kind, causal, lambda q, k: None, flexible=True)
        if plan is None:  # a dense mask is as good: padded rows meet more blocks
            assert given
            continue
        dense, _ = masks.compose(tokens, tokens, causal=causal, kind=kind)
        rows, slots = torch.arange(len(plan.index))[:, None, None], torch.arange(LENGTH)
        said = plan.mask.mask_mod(rows, None, slots[:, None], slots)
        assert torch.equal(said.expand_as(dense[:, 0]), dense[:, 0])
        # Every pair lies in a block that is met, but for queries that see all, which are attended apart.
        met = plan.mask.to_dense()[:, 0].bool().repeat_interleave(blocks.FLEX_BLOCK, 1)
        met = met.repeat_interleave(blocks.FLEX_BLOCK, 2)[:, :LENGTH, :LENGTH]
        if plan.globals is not None:
            met = met.scatter(1, plan.globals[..., None].expand(-1, -1, LENGTH), True)
        assert not (dense[:, 0] & ~met & tokens.real_mask()[..., None]).any()
        assert met.float().mean() < 0.75


@pytest.mark.cpu
@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("attention", [BLOCKED[0], BLOCKED[4]])
def test_its_numbers_are_those_of_the_dense_mask(attention, monkeypatch):
    family = "decoder" if attention == BLOCKED[0] else "encoder"
    model = build(
        family=family, attention=attention, positions="rope", n_kv_heads=2, d_head=16, n_layers=1,
        max_positions=LENGTH,
    )  # fmt: skip
    ids, used, attend = some_ids(2, LENGTH), [], block_attention.attend_flex
    # Its plain form, not traced: a processor's compiler need not know it.
    monkeypatch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(block_attention, "attend_flex", lambda *given: used.append(1) or attend(*given))
    for name, given in cases().items():
        real = given.get("mask", torch.ones(2, LENGTH, dtype=torch.bool))
        with torch.no_grad():
            plain, asked = model(ids, **given).logits[real], len(used)
            with ch.attending(model, "flex"):
                ours = model(ids, **given).logits[real]
            assert len(used) > asked or given
            with ch.attending(model, "eager"):
                dense = model(ids, **given).logits[real]
        assert max((ours - dense).abs().max(), (ours - plain).abs().max()) < 1e-5, name
    used.clear()
    with ch.attending(model, "flex"):  # with gradients a CPU gathers blocks
        assert (model(ids).logits - model(ids).logits.detach()).abs().max() == 0 and not used


@pytest.mark.cpu
@pytest.mark.usefixtures("short_blocks")
def test_it_attends_where_it_serves():
    config = {"attention": "window(20)", "positions": "rope", "d_head": 32}
    count = torch.arange(8192)[None]

    def chosen(dtype: torch.dtype = torch.bfloat16, **changes) -> bool:
        training = changes.pop("training", False)
        spec = build(**{**config, **changes}).config.main
        tokens = masks.TokenInfo(count, count, None, None, plain=True)
        return blocks.flex_serves(spec, spec.kinds[0], tokens, dtype, training)

    assert not chosen(), "a CPU has no backward pass of it"
    with torch.no_grad():
        assert chosen() and chosen(training=True)
        assert not chosen(dtype=torch.float64)
        assert not any(
            chosen(**changes)
            for changes in (
                {"d_head": 4},
                {"positions": "alibi"},
                {"attention_softcap": 5.0},
                {"attention_sink": True},
                {"attention_dropout": 0.1, "training": True},
                {"attention": "blocks(64, 3, 2, repeat=1)"},
            )
        )
