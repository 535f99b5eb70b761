"""Compare the loss of a batch with cross-entropy written out, with its pieces, and with small batches."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as nnf
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import clearhead as ch
from clearhead.core.stack import Block
from clearhead.errors import InputError
from clearhead.learn import losses
from clearhead.learn.batches.batch import IGNORE, Batch
from clearhead.learn.losses import Terms, balance_loss, batch_loss, default_chunk
from clearhead.learn.tasks.table import TASKS
from tests.harness import V, build, gradients, some_ids, worst

pytestmark = pytest.mark.ledger("H3", "H5")
LANGUAGE = {
    "tied": {},
    "untied, with bias": {"tie_embeddings": False, "head_bias": True},
    "scaled and capped": {"logit_scale": 0.3, "logit_softcap": 5.0},
    "narrow table": {"d_embedding": 8},
    "mlm": {"family": "encoder"},
    "encoder-decoder": {"family": "encoder-decoder"},
}


def language_batch(model: ch.Transformer, rows: int = 4, length: int = 9, seed: int = 3) -> Batch:
    """Rows of unequal length, some targets IGNORE."""
    ids, targets = some_ids(rows, length, seed), some_ids(rows, length, seed + 1)
    lengths = torch.arange(rows) % 4 + length - 3
    mask = torch.arange(length) < lengths[:, None]
    targets[~mask] = IGNORE
    if model.config.family == "encoder":
        targets[torch.rand(targets.shape, generator=torch.Generator().manual_seed(seed)) < 0.6] = IGNORE
    source = some_ids(rows, 6, seed + 2) if model.config.family == "encoder-decoder" else None
    return Batch(ids, targets, mask, source=source, source_mask=None if source is None else mask[:, :6])


def all_at_once(model: ch.Transformer, batch: Batch, smoothing: float = 0.0) -> Tensor:
    """Every score of every position, and PyTorch's cross-entropy."""
    logits = model(**batch.arguments()).logits.flatten(0, -2)
    return nnf.cross_entropy(
        logits, batch.targets.flatten(), ignore_index=IGNORE, reduction="sum", label_smoothing=smoothing
    )


def assert_same_gradients(model: ch.Transformer, a: Tensor, b: Tensor, tolerance: float = 1e-6) -> None:
    """Loss and gradients are equal, relative to the largest gradient."""
    theirs = gradients(model, b)
    size = max(1.0, *(g.abs().max().item() for g in theirs.values() if g is not None))
    assert worst(a, b) <= tolerance * max(1.0, b.item())
    for name, mine in gradients(model, a).items():
        assert (mine is None) == (theirs[name] is None), name
        if mine is not None:
            assert worst(mine, theirs[name]) <= tolerance * size, name


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("changes", LANGUAGE.values(), ids=LANGUAGE)
def test_a_loss_in_pieces_is_the_loss(changes, smoothing):
    model = build(**changes)
    batch = language_batch(model)
    for chunk in (0, 1, 5, 1000, None):
        loss, count = batch_loss(model, batch, smoothing, chunk)
        assert count == int((batch.targets != IGNORE).sum()) > 5
        assert_same_gradients(model, loss / count, all_at_once(model, batch, smoothing) / count)


@pytest.mark.parametrize("changes", [{}, {"family": "encoder"}], ids=["lm", "mlm"])
def test_no_tensor_holds_all_scores(changes):
    """Make V so large that a row of scores outweighs all else; the largest tensor is a piece or the table."""
    vocab, chunk = 3000, 8
    model = build(vocab_size=vocab, **changes).train()
    ids = some_ids(8, 16, vocab=vocab)
    batch, sizes = Batch(ids, some_ids(8, 16, seed=2, vocab=vocab)), []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))
            return out

    with Watch():
        batch_loss(model, batch, 0.1, chunk)[0].backward()
    assert max(sizes) == vocab * model.config.d_model < ids.numel() * vocab / 4
    sizes.clear()
    with Watch():
        batch_loss(model, batch, 0.1, 0)[0].backward()
    assert max(sizes) == ids.numel() * vocab  # the watch sees it where it is


def test_scores_are_made_for_targets_only():
    model, seen = build(family="encoder"), []
    batch = language_batch(model)
    model.head.register_forward_hook(lambda module, given, out: seen.append(out.numel()))
    batch_loss(model, batch, chunk=0)
    assert seen == [batch.n_targets * V]


def test_pieces_without_gradients(monkeypatch):
    model = build()
    batch = language_batch(model)
    with torch.no_grad():
        loss, count = batch_loss(model, batch, 0.1, 4)
        assert worst(loss / count, all_at_once(model, batch, 0.1) / count) < 1e-6
    assert 2**25 < default_chunk(50_000, torch.device("cpu")) * 50_000 * 4 <= 2**26  # bytes
    monkeypatch.setattr(losses, "CPU_LOGITS", 3 * V)
    rows = []
    model.head.register_forward_hook(lambda module, given, out: rows.append(out.shape[0]))
    batch_loss(model, batch)
    assert max(rows) <= 3 and sum(rows) == batch.n_targets


TERMS = {
    "z": Terms(z_loss=0.01),
    "future": Terms(future_tokens=(0.5, 0.0, 0.25)),
    "r-drop": Terms(r_drop=2.0),
    "all": Terms(0.01, 2.0, (0.5,)),
}


@pytest.mark.parametrize("chunk", [0, 3])
@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
def test_terms_are_their_formulas(terms, chunk):
    """Against a loop over positions in float64; of two passes with other dropout, those that were run."""
    copies = 1 + bool(terms.r_drop)
    model, passes = build(dropout=0.3 if terms.r_drop else 0.0).double().train(), []
    batch = replace(language_batch(model), documents=torch.tensor([[0] * 5 + [1] * 4] * 4))
    model.register_forward_hook(lambda module, given, out: passes.extend(out.hidden.chunk(copies)))
    loss, count = batch_loss(model, batch, 0.1, chunk, terms=terms)
    wanted, scored = 0.0, 0
    logits = [model.head(hidden, None).log_softmax(-1) for hidden in passes]
    sums = [model.head(hidden, None).exp().sum(-1).log() for hidden in passes]
    for row, place in (batch.targets != IGNORE).nonzero().tolist():
        scored += 1
        for log_p, total in zip(logits, sums):
            here, own = log_p[row, place], 0.0
            for ahead, weight in enumerate((1.0, *terms.future_tokens)):
                at = place + ahead
                if at < 9 and (place < 5) == (at < 5) and batch.targets[row, at] != IGNORE:
                    own -= weight * (0.9 * here[batch.targets[row, at]] + 0.1 * here.mean())
            wanted += (own + terms.z_loss * total[row, place] ** 2) / len(logits)
        if terms.r_drop:
            p, q = (log_p[row, place] for log_p in logits)
            wanted += terms.r_drop / 4 * ((p.exp() * (p - q)).sum() + (q.exp() * (q - p)).sum())
    assert (count, len(passes)) == (scored, copies)
    assert_same_of_one_graph(model, loss, wanted)


def assert_same_of_one_graph(model: ch.Transformer, loss: Tensor, wanted: Tensor) -> None:
    """Two losses of the same passes, and their gradients."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    ours, theirs = (
        torch.autograd.grad(x, weights, retain_graph=True, allow_unused=True) for x in (loss, wanted)
    )
    assert worst(loss, wanted) < 1e-9 * float(wanted) and float(wanted) > 1
    assert all(worst(a, b) < 1e-9 for a, b in zip(ours, theirs) if b is not None)
    assert [a is None for a in ours] == [b is None for b in theirs]


def test_without_dropout_two_passes_have_the_loss_of_one():
    model = build(n_mtp_layers=1, n_experts=2, n_active_experts=1, dropout=0.0).double().train()
    batch = language_batch(model)
    once, twice = (
        batch_loss(model, batch, terms=Terms(r_drop=weight, mtp_weight=0.3))[0] for weight in (0.0, 2.0)
    )
    assert worst(once, twice) < 1e-12 * float(once)


def test_r_drop_of_classes_is_its_formula():
    model, outs = build(family="encoder", n_classes=3, dropout=0.3).double().train(), []
    model.register_forward_hook(lambda module, given, out: outs.extend(out.logits.log_softmax(-1).chunk(2)))
    batch = Batch(some_ids(4, 6), torch.tensor([0, 2, 1, 1]))
    loss, _ = TASKS["classify"].batch_loss(model, batch, terms=Terms(r_drop=1.5))
    p, q = outs
    wanted = sum(
        -(p[row, label] + q[row, label]) / 2
        + 1.5 / 4 * sum((p[row, c].exp() - q[row, c].exp()) * (p[row, c] - q[row, c]) for c in range(3))
        for row, label in enumerate((0, 2, 1, 1))
    )
    assert_same_of_one_graph(model, loss, wanted)


def test_pieces_with_checkpointed_activations_frozen_parts_and_scaled_losses(monkeypatch):
    model = build(norm="rmsnorm", n_experts=3).train()
    batch = language_batch(model)
    wanted = gradients(model, batch_loss(model, batch, 0.1, 0)[0] / 7)
    forward = Block.forward
    with monkeypatch.context() as patch:
        patch.setattr(
            Block, "forward", lambda self, *given: checkpoint(forward, self, *given, use_reentrant=False)
        )
        found = gradients(model, batch_loss(model, batch, 0.1, 4)[0] / 7)
    assert all(worst(found[name], wanted[name]) < 1e-5 for name in wanted)
    model.head.out.weight.requires_grad_(False)
    batch_loss(model, batch, 0.1, 4)[0].backward()
    assert model.head.out.weight.grad is None
    assert worst(model.decoder.norm.weight.grad / 7, wanted["decoder.norm.weight"]) < 1e-5


@pytest.mark.parametrize("changes", [{}, {"logit_softcap": 5.0, "family": "encoder"}], ids=["lm", "mlm"])
def test_pieces_under_autocast(changes):
    model = build(**changes)
    batch = language_batch(model)
    exact = gradients(model, all_at_once(model, batch))
    with torch.autocast("cpu", torch.bfloat16):
        plain, pieces = (batch_loss(model, batch, chunk=chunk)[0] for chunk in (0, 5))
    assert plain.dtype == pieces.dtype == torch.float32
    plain_gradient, piece_gradient = gradients(model, plain), gradients(model, pieces)
    for name, wanted in exact.items():
        if wanted is not None:
            rounding = worst(plain_gradient[name], wanted)
            assert worst(piece_gradient[name], wanted) <= 1.5 * rounding + 1e-3 * wanted.abs().max(), name


@pytest.mark.slow
def test_pieces_of_a_compiled_model(monkeypatch):
    compiled = torch.compile(losses.row_loss, backend="aot_eager")
    monkeypatch.setattr(losses, "_compiled_row_loss", lambda: compiled)
    model = build(logit_softcap=5.0, n_layers=1)
    fast = torch.compile(model, backend="aot_eager")
    batch = language_batch(model)
    for chunk in (0, 5):
        loss, wanted = batch_loss(fast, batch, 0.1, chunk)[0], batch_loss(model, batch, 0.1, 0)[0]
        assert_same_gradients(model, loss, wanted)


@pytest.mark.parametrize(("head", "places"), [("classifier", 0), ("tagger", 1)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_classes_of_texts_and_tokens(head, places, smoothing):
    model = build(family="encoder", head=head, n_classes=5)
    batch = language_batch(model)
    tags = some_ids(4, 9, vocab=5).where(batch.targets != IGNORE, IGNORE)
    targets = tags if places else some_ids(4, 1, vocab=5)[:, 0]
    batch = Batch(batch.ids, targets, batch.mask)
    loss, count = batch_loss(model, batch, smoothing)
    assert count == int((targets != IGNORE).sum())
    assert_same_gradients(model, loss, all_at_once(model, batch, smoothing))


def test_spans_are_chosen_among_real_tokens():
    model = build(family="encoder", head="span")
    given = language_batch(model)
    batch = Batch(given.ids, torch.tensor([[1, 4], [0, 0], [2, 7], [5, 5]]), given.mask)
    logits, total, smooth = model(batch.ids, batch.mask).logits.double(), 0.0, 0.0
    for row in range(4):
        length = int(batch.mask[row].sum())
        for end in (0, 1):
            log_p = logits[row, :length, end].log_softmax(0)
            total -= log_p[batch.targets[row, end]].item() / 2
            smooth -= log_p.mean().item() / 2
    loss, count = batch_loss(model, batch)
    assert count == 4 and loss.item() == pytest.approx(total, rel=1e-6)
    assert batch_loss(model, batch, 0.1)[0].item() == pytest.approx(0.9 * total + 0.1 * smooth, rel=1e-6)
    smoothed = gradients(model, batch_loss(model, batch, 0.1)[0]).values()
    assert all(gradient is None or gradient.isfinite().all() for gradient in smoothed)


TAGGER = {"family": "encoder", "head": "tagger", "n_classes": V}
SOME = [{}, {"family": "encoder"}, {"family": "encoder-decoder"}, {"n_experts": 3}, TAGGER]


@pytest.mark.parametrize("changes", SOME, ids=["lm", "mlm", "encoder-decoder", "experts", "tagger"])
def test_padding_changes_no_loss_and_no_gradient(changes):
    model = build(**changes).train()
    batch = language_batch(model)

    def longer(x: Tensor | None, value: float) -> Tensor | None:
        return None if x is None else nnf.pad(x, (0, 3), value=value)

    more = {"source": longer(batch.source, 2), "source_mask": longer(batch.source_mask, False)}
    own = longer(batch.ids, 1), longer(batch.targets, IGNORE), longer(batch.mask, False)
    loss, count = batch_loss(model, batch, 0.1, 4)
    padded_loss, padded_count = batch_loss(model, Batch(*own, **more), 0.1, 4)
    assert count == padded_count
    assert_same_gradients(model, padded_loss / count, loss / count)


@pytest.mark.parametrize("chunk", [0, 3, None])
@pytest.mark.parametrize("changes", [{}, {"family": "encoder"}, TAGGER])
def test_a_batch_without_targets_has_zero_loss_and_zero_gradients(changes, chunk):
    model = build(**changes)
    loss, count = batch_loss(model, Batch(some_ids(), torch.full((2, 8), IGNORE)), 0.1, chunk)
    assert count == 0 and loss.item() == 0
    assert all(g is None or not g.any() for g in gradients(model, loss).values())


def part(batch: Batch, rows: slice, length: int) -> Batch:
    """Some rows of a batch, cut to `length`."""
    more = {} if batch.source is None else {"source": batch.source[rows]}
    more |= {} if batch.source is None else {"source_mask": batch.source_mask[rows]}
    return Batch(batch.ids[rows, :length], batch.targets[rows, :length], batch.mask[rows, :length], **more)


@pytest.mark.parametrize("changes", LANGUAGE.values(), ids=LANGUAGE)
def test_four_batches_of_two_are_one_of_eight(changes, differences):
    """Each is cut to its own longest row; dividing by the targets of all of them makes the sums one mean."""
    model = build(**changes)
    batch = language_batch(model, rows=8)
    lengths = [int(batch.mask[start : start + 2].sum(1).max()) for start in range(0, 8, 2)]
    parts = [part(batch, slice(2 * i, 2 * i + 2), length) for i, length in enumerate(lengths)]
    assert len({small.n_targets for small in parts}) > 1 and len(set(lengths)) > 1
    loss, count = batch_loss(model, batch, 0.1)
    assert count == sum(small.n_targets for small in parts)
    whole = gradients(model, loss / count)
    for small in parts:
        (batch_loss(model, small, 0.1, 4)[0] / count).backward()
    for name, parameter in model.named_parameters():
        assert differences.see("accumulated", parameter.grad, whole[name]) < 1e-6, name


def test_experts_are_balanced_by_the_mean_of_targets():
    model = build(n_experts=4)
    batch = language_batch(model)
    plain, count = batch_loss(model, batch)  # not in training: the loss is the loss
    assert worst(plain / count, all_at_once(model, batch) / count) < 1e-6
    model.train()
    total, _ = batch_loss(model, batch, balance=0.5)
    assert total.item() / count == pytest.approx(
        plain.item() / count + 0.5 * balance_loss(model, batch.mask).item(), rel=1e-6
    )
    both = build(n_experts=4, family="encoder-decoder").train()
    batch = language_batch(both)
    plain, total = (batch_loss(both, batch, balance=weight)[0] for weight in (0.0, 0.5))
    stacks = ((both.encoder, batch.source_mask), (both.decoder, batch.mask))
    each = [balance_loss(stack, mask).item() for stack, mask in stacks]
    assert (total - plain).item() == pytest.approx(0.5 * batch.n_targets * sum(each) / 2, rel=1e-4)
    assert all(math.isfinite(value) and value >= 1 for value in each)


def test_a_head_without_a_loss_says_so():
    with pytest.raises(InputError, match='head "embedding" has no loss'):
        batch_loss(build(family="encoder", head="embedding"), Batch(some_ids(), some_ids()))


def test_what_counts_as_a_target():
    tagged = torch.tensor([[1, IGNORE, 0], [1, 1, IGNORE]])
    ids, vectors = torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3, 5)
    pictures = torch.zeros(2, 3, 8, 8)
    cases = [
        (Batch(ids, tagged), 4, False),
        (Batch(vectors, tagged), 4, False),  # a tag for each vector
        (Batch(ids, tagged[:, :2]), 2, True),  # an answer's two ends
        (Batch(pictures, torch.tensor([1, 0])), 2, False),
        (Batch(pictures, torch.full((2, 3), 1 / 3)), 2, False),  # shares of three classes, and three channels
    ]
    for batch, count, span in cases:
        assert batch.n_targets == count and batch.is_span is span
