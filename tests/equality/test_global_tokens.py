"""Global tokens that a call names, or the question: against the formula, by blocks and densely."""

from __future__ import annotations

import pytest
import torch

import clearhead as ch
from clearhead.inside.checks.reference_float64 import reference_logits
from clearhead.variants import blocks
from clearhead.variants.global_attention import GlobalAttention
from tests.harness import build, gradients, some_ids

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


def test_a_pattern_shows_what_global_tokens_see():
    model, marked = encoder("global(2, given)"), marks((4,), length=9)
    with ch.record(model, "blocks.0.attention.pattern") as seen:
        model(some_ids(1, 9), global_mask=marked)
    pattern = seen["blocks.0.attention.pattern"][0, 0]
    assert (pattern[4] > 0).all() and (pattern[:, 4] > 0).all()
    assert (pattern[0] > 0).nonzero()[:, 0].tolist() == [0, 1, 4]
    assert torch.allclose(pattern.sum(-1), torch.ones(9))


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
