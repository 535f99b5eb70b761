"""The loss of a batch, for every head: the sum over its targets, and their number.

The loss is a sum because batches are accumulated: the caller divides by the number of targets of the whole
step, so that a step of several small batches equals a step of one large batch.

The logits of a large vocabulary are the largest tensor of training. They are computed only for positions that
have a target and, where there are many, for a chunk of positions at a time. The gradient of a chunk is taken
before the next chunk begins.

Shapes: B batch, T length, D model, V vocabulary, C classes, N positions that have a target.
"""

import functools
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.utils.checkpoint import checkpoint

from clearhead.core import dtypes, heads, transformer
from clearhead.core.stack import Stack
from clearhead.errors import refuse
from clearhead.learn.batches.batch import IGNORE, Batch
from clearhead.learn.recipe import TrainPlan
from clearhead.variants import routing
from clearhead.variants.costs import chunk_rows

Answered = tuple[list[list[Any]], list[list[Any]]]  # of each row: the model's answers, and the right ones
RowLoss = Callable[[nn.Module, Tensor, Tensor, float], Tensor]


@dataclass(frozen=True)
class Terms:
    """What the recipe adds to the cross-entropy of a batch in training; see `TrainPlan`."""

    z_loss: float = 0.0
    r_drop: float = 0.0
    future_tokens: tuple[float, ...] = ()
    mtp_weight: float = 0.0

    @classmethod
    def of(cls, plan: TrainPlan) -> Self:
        """Return the terms of a recipe."""
        return cls(plan.z_loss, plan.r_drop, plan.future_tokens, plan.mtp_weight)

    @property
    def of_logits(self) -> bool:
        """Whether the loss of a row of logits is more than its cross-entropy."""
        return bool(self.z_loss or self.r_drop or self.future_tokens)


NO_TERMS = Terms()
CPU_LOGITS = 2**24  # computed at once, at most; on a GPU more, see `default_chunk`
LARGE_VOCABULARY = 2**13  # from this size on our own kernel is faster than the compiler's


def token_losses(
    head: heads.LanguageHead, hidden: Tensor, targets: Tensor, chunk: int, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the positions [N] of [B, T] that have a target, and the cross-entropy of each [N].

    Logits are those of `chunk` positions at a time, and computed again for their gradient; 0: of all. They
    are divided by the `temperature`.
    """
    rows, flat = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    positions = (flat != IGNORE).nonzero()[:, 0]

    def cross_entropies(some: Tensor) -> Tensor:
        logits = dtypes.wide(head(rows[some], None))
        logits = logits if temperature == 1 else logits / temperature
        return nnf.cross_entropy(logits, flat[some], reduction="none")

    if not chunk or len(positions) <= chunk:
        return positions, cross_entropies(positions)
    again = torch.is_grad_enabled()
    return positions, torch.cat(
        [
            checkpoint(cross_entropies, some, use_reentrant=False) if again else cross_entropies(some)
            for some in torch.split(positions, chunk)
        ]
    )


def answer_logprobs(head: heads.LanguageHead, hidden: Tensor, batch: Batch, chunk: int) -> Tensor:
    """Return the log-probability of the targets of a row's two documents: [B, T, D] -> [B, 2]."""
    assert batch.documents is not None
    positions, each = token_losses(head, hidden, batch.targets, chunk)
    slots = batch.documents.reshape(-1)[positions] + 2 * (positions // batch.targets.shape[1])
    return each.new_zeros(2 * len(batch)).index_add(0, slots, -each).view(-1, 2)


def vocabulary_losses(head: heads.LanguageHead, hidden: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """Return the cross-entropy of each row: states [B, T, D], targets [B, T] -> [B]."""
    positions, each = token_losses(head, hidden, targets, chunk)
    return each.new_zeros(targets.numel()).index_put((positions,), each).view(targets.shape).sum(1)


def arguments_for(model: transformer.Transformer, batch: Batch) -> dict[str, Tensor]:
    """Return the model's inputs of a batch, with its images; no token types where the model has none."""
    arguments = {
        name: value
        for name, value in batch.arguments().items()
        if name != "types" or model.config.n_types > 1
    }
    if batch.vectors is not None:
        embedded = model.main.embedding.front(batch.ids)
        arguments["vectors"] = torch.where(batch.vectors.isnan(), embedded, batch.vectors.to(embedded))
    return arguments


def batch_loss(
    model: transformer.Transformer,
    batch: Batch,
    smoothing: float = 0.0,
    chunk: int | None = None,
    balance: float = routing.BALANCE,
    own_loss: Callable[[transformer.Transformer, Batch], Tensor] | None = None,
    total: Callable[[Tensor], Tensor] = lambda value: value,
    terms: Terms = NO_TERMS,
) -> tuple[Tensor, int]:
    """Return the loss summed over the targets of `batch`, and the number of targets.

    The loss of a compiled model is compiled too. `smoothing` is the share of each target that is spread
    evenly over all classes. `chunk` positions are scored at a time, for lm and mlm (0: all; None: by the
    vocabulary). `balance` is the weight of the losses of routers, in training: that which spreads tokens
    evenly over experts, and that which teaches scores which tokens go through a layer. `own_loss` is the
    task's own (None: the cross-entropy of the head); `total` sums a value over the processes that share the
    rows of a batch. `terms` are for lm and mlm; a task's own loss has its own.
    """
    passed = batch.twice() if terms.r_drop and own_loss is None else batch
    config, arguments = model.config, arguments_for(model, passed)
    drafted = {"mtp": True} if model.training and terms.mtp_weight else {}
    if own_loss is None and isinstance(model.head, heads.LanguageHead):
        out = model(**arguments, logits="none", **drafted)
        hidden = out.hidden  # B T D
        chunk = default_chunk(config.vocab_size, hidden.device) if chunk is None else chunk
        wanted, compiled = model.main.own(batch.targets, IGNORE), _is_compiled(model)
        some = batch.n_targets < batch.targets.numel() or wanted is not batch.targets
        count = batch.n_scored if wanted is batch.targets else None
        row = None
        if terms.of_logits:
            row = functools.partial(termed_row_loss, terms)
            if terms.r_drop:
                hidden = torch.cat(hidden.chunk(2), -1)  # 2·B T D -> B T 2·D
            wanted = later_targets(wanted, batch.documents, len(terms.future_tokens))
        loss = vocabulary_loss(model.head, hidden, wanted, smoothing, chunk, some, compiled, count, row)
        for number, states in enumerate(out.mtp, 1):
            wanted = later_targets(passed.targets, passed.documents, number)[..., number]
            if passed.mask is not None:
                wanted = wanted.masked_fill(~passed.mask, IGNORE)
            scored = None if count is None else count * len(passed) // len(batch)
            later = vocabulary_loss(model.head, states, wanted, smoothing, chunk, True, compiled, scored)
            loss = loss + terms.mtp_weight / len(out.mtp) * later * len(batch) / len(passed)
    else:
        if own_loss is None:
            loss = head_loss(config.head, model(**arguments).required_logits, batch, smoothing)
        else:
            loss = own_loss(model, batch)
        loss = loss / model.main.copies
    if model.training and balance:
        # Multiply by the targets, because these losses are part of the mean.
        if config.router_correction:
            _level(model, passed, total, bool(drafted))
        elif config.n_experts:
            loss = loss + balance * batch.n_shared * _balance(model, passed, total, bool(drafted))
        if config.depth_capacity != 1:
            loss = loss + balance * batch.n_shared * routing.router_loss(model, total)
    return loss, batch.n_targets


def default_chunk(vocab_size: int, device: torch.device) -> int:
    """Return how many positions to score at a time."""
    if device.type == "cuda":
        return chunk_rows(vocab_size, torch.cuda.get_device_properties(device).total_memory)
    return max(1, CPU_LOGITS // vocab_size)


def summed(logits: Tensor, targets: Tensor, smoothing: float = 0.0, weights: Tensor | None = None) -> Tensor:
    """Return the cross-entropy summed over targets but IGNORE: logits [..., C] and classes [...] -> [].

    Targets may also be shares of classes [B, K], for logits [B, C]; classes from K on have a share of 0.
    `weights` [C] are of the classes.
    """
    flat = dtypes.wide(logits).reshape(-1, logits.shape[-1])
    if targets.is_floating_point():
        wanted = nnf.pad(targets, (0, flat.shape[-1] - targets.shape[-1]))
    else:
        wanted = targets.reshape(-1)
    weights = None if weights is None else weights.to(flat)
    return nnf.cross_entropy(
        flat, wanted, weights, ignore_index=IGNORE, reduction="sum", label_smoothing=smoothing
    )


def span_loss(logits: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
    """Return the summed cross-entropy of an answer's first and last token: logits [B, T, 2] -> [].

    Only real tokens count. Start and end count half each, so that a row weighs as much as a label.
    """
    targets, mask = batch.targets, batch.mask
    scores = dtypes.wide(logits).transpose(1, 2)  # B 2 T
    real = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask[:, None, :].expand_as(scores)
    log_p = scores.masked_fill(~real, -torch.inf).log_softmax(-1)
    chosen = log_p.gather(-1, targets.clamp(min=0)[..., None])[..., 0]  # B 2
    even = log_p.masked_fill(~real, 0).sum(-1) / real.sum(-1)
    return -((1 - smoothing) * chosen + smoothing * even).masked_fill(targets == IGNORE, 0).sum() / 2


def head_loss(head: str | None, logits: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
    """Return the usual loss of a head without a vocabulary, summed over the targets: []."""
    refuse(
        head not in ("classifier", "tagger", "span"),
        f'a model with head "{head}" has no loss: train one with lm, mlm, classifier, tagger or span',
    )
    return span_loss(logits, batch, smoothing) if head == "span" else summed(logits, batch.targets, smoothing)


def vocabulary_loss(
    head: heads.LanguageHead,
    hidden: Tensor,
    targets: Tensor,
    smoothing: float,
    chunk: int,
    some: bool = True,
    compiled: bool = False,
    count: int | None = None,
    row: RowLoss | None = None,
) -> Tensor:
    """Return the cross-entropy of hidden states [B, T, D] with targets [B, T], in chunks -> [].

    `some`: not every state has a target. `count`: score so many positions, as many as have a target at least,
    so that every shape is known without looking at the targets. `row`: a loss in place of the cross-entropy,
    which may take several targets of a state, [B, T, K]: the first says whether it counts.
    """
    rows, targets = hidden.reshape(-1, hidden.shape[-1]), targets.flatten(0, 1)
    first = targets if targets.ndim == 1 else targets[:, 0]
    if some and count is None:
        positions = (first != IGNORE).nonzero()[:, 0]
        rows, targets = rows[positions], targets[positions]  # N D, N
    elif count is not None and count < len(targets):
        positions = torch.sort(first == IGNORE, stable=True).indices[:count]
        rows, targets = rows[positions], targets[positions]  # N D, N
    row = row or _row_loss_for(head, rows, compiled, compiled or count is not None)
    of_rows = functools.partial(row, head)
    chunks = math.ceil(rows.shape[0] / chunk) if chunk else 1
    if chunks <= 1:
        return of_rows(rows, targets, smoothing)
    size = math.ceil(rows.shape[0] / chunks)  # of about equal size
    if not torch.is_grad_enabled():
        pairs = zip(torch.split(rows, size), torch.split(targets, size))
        return torch.stack([of_rows(some, wanted, smoothing) for some, wanted in pairs]).sum()
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    in_chunks: Any = _InChunks.apply
    return cast(Tensor, in_chunks(of_rows, smoothing, size, targets, rows, *trained))


def _row_loss_for(head: heads.LanguageHead, rows: Tensor, compiled: bool, quick: bool) -> RowLoss:
    """Choose our own kernel for large vocabularies on a GPU, if `quick`; else the compiled or plain loss."""
    large = rows.is_cuda and rows.dtype != torch.float64 and head.out.out_features >= LARGE_VOCABULARY
    if quick and large and importlib.util.find_spec("triton") is not None:
        return quick_row_loss
    return _compiled_row_loss() if compiled else row_loss


def row_loss(head: nn.Module, rows: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """Return the summed cross-entropy of rows [N, D] with targets [N] -> []."""
    return summed(head(rows, None), targets, smoothing)


def later_targets(targets: Tensor, documents: Tensor | None, count: int) -> Tensor:
    """Add the targets of the next `count` positions, of the same document: [B, T] -> [B, T, 1 + count]."""
    if not count:
        return targets
    ids = torch.zeros_like(targets) if documents is None else documents
    shifted = [targets]
    for offset in range(1, min(count + 1, targets.shape[1])):
        same = ids[:, offset:] == ids[:, :-offset]
        later = targets[:, offset:].where(same, IGNORE)
        shifted.append(nnf.pad(later, (0, offset), value=IGNORE))
    shifted += [torch.full_like(targets, IGNORE)] * (count + 1 - len(shifted))
    return torch.stack(shifted, -1)


def termed_row_loss(terms: Terms, head: nn.Module, rows: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """Return the loss of rows [N, D], or of two passes [N, 2·D], with `terms`; targets [N(, K)] -> []."""
    passes = rows.chunk(2, -1) if terms.r_drop else (rows,)
    targets = targets if targets.ndim == 2 else targets[:, None]
    counted, logits = targets[:, 0] != IGNORE, [dtypes.wide(head(each, None)) for each in passes]
    loss = logits[0].new_zeros(())
    for scores in logits:
        for weight, wanted in zip((1.0, *terms.future_tokens), targets.unbind(1)):
            loss = loss + weight * summed(scores, wanted, smoothing)
        if terms.z_loss:
            loss = loss + terms.z_loss * (scores.logsumexp(-1).square() * counted).sum()
    loss = loss / len(logits)
    return loss + terms.r_drop * divergence(logits[0], logits[1], counted) if terms.r_drop else loss


def divergence(a: Tensor, b: Tensor, counted: Tensor) -> Tensor:
    """Return a quarter of both divergences of two logits [N, C], summed over the rows that count -> [].

    R-Drop (Liang et al., 2021) adds half of them to the sum of two cross-entropies; ours is their mean.
    """
    a, b = (dtypes.wide(x).log_softmax(-1) for x in (a, b))
    both = ((a.exp() - b.exp()) * (a - b)).sum(-1)  # KL(a, b) + KL(b, a)
    return (both * counted).sum() / 4


def quick_row_loss(head: nn.Module, rows: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """Return the same by a kernel that never holds the logits in float32."""
    from clearhead.run.kernels.triton_loss import CrossEntropy

    apply: Any = CrossEntropy.apply
    return cast(Tensor, apply(head(rows, None), targets, smoothing))


@functools.cache
def _compiled_row_loss() -> RowLoss:
    return torch.compile(row_loss)


def _is_compiled(model: nn.Module) -> bool:
    return hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None


class _InChunks(torch.autograd.Function):
    """A loss whose gradient is taken chunk by chunk in the forward pass: nothing is kept for later."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        loss_of: Callable[[Tensor, Tensor, float], Tensor],
        smoothing: float,
        size: int,
        targets: Tensor,
        rows: Tensor,
        *trained: Tensor,
    ) -> Tensor:
        """Rows [N, D] and targets [N] -> the summed loss []."""
        total = torch.zeros((), dtype=torch.promote_types(rows.dtype, torch.float32), device=rows.device)
        gradient = torch.empty_like(rows)
        sums = [
            torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
            for weight in trained
        ]
        for start in range(0, rows.shape[0], size):
            chunk = slice(start, start + size)
            with torch.enable_grad():
                here = rows[chunk].detach().requires_grad_()
                loss = loss_of(here, targets[chunk], smoothing)
            total += loss.detach()
            with torch.autocast(rows.device.type, enabled=False):  # as in any backward pass
                gradient[chunk], *of_weights = torch.autograd.grad(loss, (here, *trained))
            for so_far, gradient_of in zip(sums, of_weights):
                so_far += gradient_of
        ctx.save_for_backward(gradient, *(so_far.to(weight.dtype) for so_far, weight in zip(sums, trained)))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients that the forward pass took, scaled."""
        scaled = ((dtypes.wide(gradient) * upstream).to(gradient.dtype) for gradient in ctx.saved_tensors)
        return (None, None, None, None, *scaled)


def balance_loss(
    model: nn.Module, mask: Tensor | None = None, total: Callable[[Tensor], Tensor] = lambda value: value
) -> Tensor:
    """Compute X · Σ over experts of (share of choices) · (mean router probability) in the latest pass.

    It covers all layers of a training pass, and is least when tokens spread evenly over the experts. `mask`
    [B, T] leaves padding out. Where rows are shared out, `total` sums counts, and losses add up.
    """
    choices = routing.tally(model, mask)
    if choices is None:
        return torch.zeros(())
    return routing.imbalance(choices, total(routing.counts_of(choices)))


def _stacks(model: transformer.Transformer, batch: Batch, mtp: bool) -> list[tuple[nn.Module, Tensor | None]]:
    """Return the stacks, with `mtp` its layers too, and which of their tokens of this process are real."""
    masks = (batch.mask, batch.source_mask if model.decoder is not None else batch.mask)
    stacks: list[Stack | None] = [model.decoder, model.encoder]
    pairs = [(stack, stack.worked_on(mask)) for stack, mask in zip(stacks, masks) if stack is not None]
    return [*pairs, *((layer, batch.mask) for layer in (model.mtp or ()) if mtp)]


def _balance(
    model: transformer.Transformer, batch: Batch, total: Callable[[Tensor], Tensor], mtp: bool
) -> Tensor:
    return torch.stack([balance_loss(*each, total) for each in _stacks(model, batch, mtp)]).mean()


def _level(
    model: transformer.Transformer, batch: Batch, total: Callable[[Tensor], Tensor], mtp: bool
) -> None:
    for each in _stacks(model, batch, mtp):
        routing.level(*each, total)
