"""The loss of a batch: a sum over its targets and their number, whatever the model's head is for.

Sums, because batches are joined: the caller divides by the number of targets of everything that makes up one
step, so that a step of several small batches is the same as a step of one large batch.

The scores of a large vocabulary are the largest tensor of training. They are made for positions that have a
target only and, where there are many, for a piece of the positions at a time; the gradient of a piece is
taken before the next is begun.

Shapes: B batch, T length, D model, V vocabulary, C classes, N positions that have a target.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from clearhead.batches.batch import IGNORE, Batch
from clearhead.errors import InputError
from clearhead.model.dtypes import wide
from clearhead.model.experts import balance_loss
from clearhead.model.heads import Head, LanguageHead
from clearhead.model.transformer import Transformer

Answered = tuple[list[list[Any]], list[list[Any]]]  # of each row: what the model says, and what is right
RowLoss = Callable[[nn.Module, Tensor, Tensor, float], Tensor]

PIECE = 2**24  # scores that are made at once, at most; on a GPU more, see `default_chunk`
LARGE = 2**13  # words of a vocabulary from which on a kernel of our own is quicker than the compiler's


@dataclass(frozen=True)
class Objective:
    """What a head without a vocabulary learns."""

    loss: Callable[[Tensor, Batch, float], Tensor]  # logits, batch, smoothing -> [], summed over the targets
    answers: Callable[[Tensor, Batch], Answered]


def arguments_for(model: Transformer, batch: Batch) -> dict[str, Tensor]:
    """Return what the model takes of a batch: types are left out where the model has none."""
    arguments = batch.arguments()
    if model.config.n_types < 2:
        arguments.pop("types", None)
    return arguments


def batch_loss(
    model: Transformer,
    batch: Batch,
    smoothing: float = 0.0,
    chunk: int | None = None,
    balance: float = 0.01,
    objective: Objective | None = None,
) -> tuple[Tensor, int]:
    """The loss summed over the targets of `batch`, and how many they are.

    Args:
        model: compiled or not; the loss of a compiled model is compiled too.
        batch: on the model's device.
        smoothing: share of each target that is spread evenly over all classes; padding has no part in it.
        chunk: positions whose scores are made at a time, for lm and mlm; 0: all at once; None: by the
            vocabulary.
        balance: weight of the loss that spreads tokens evenly over experts, in training, where the model has
            them.
        objective: the task's; None: the usual one of the head.
    """
    config, arguments = model.config, arguments_for(model, batch)
    if isinstance(model.head, LanguageHead):
        hidden = model(**arguments, logits="none").hidden  # B T D
        chunk = default_chunk(config.vocab_size, hidden.device) if chunk is None else chunk
        loss = vocabulary_loss(model.head, hidden, batch, smoothing, chunk, compiled=_is_compiled(model))
    else:
        objective = objective or objective_of(config.head)
        loss = objective.loss(model(**arguments).logits, batch, smoothing)
    if config.n_experts and model.training and balance:
        loss = loss + balance * batch.n_targets * _balance(
            model, batch
        )  # so that it has its weight in the mean
    return loss, batch.n_targets


def default_chunk(vocab_size: int, device: torch.device) -> int:
    """How many positions to score at a time: on a GPU so many that, as float32, they take a sixteenth of its
    memory.

    Fewer are slower there: each piece adds to the gradient of the whole table.
    """
    scores = torch.cuda.get_device_properties(device).total_memory // 64 if device.type == "cuda" else PIECE
    return max(1, scores // vocab_size)


def summed(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Cross-entropy, summed over targets that are not IGNORE: scores [..., C] and classes [...] -> [].

    Or scores [B, C] and shares of classes [B, K]: classes from K on, which the batch has none of, have no
    share.
    """
    flat = wide(logits).reshape(-1, logits.shape[-1])
    if targets.is_floating_point():
        shares = nnf.pad(targets, (0, flat.shape[-1] - targets.shape[-1]))
        return nnf.cross_entropy(flat, shares, reduction="sum", label_smoothing=smoothing)
    return nnf.cross_entropy(
        flat, targets.reshape(-1), ignore_index=IGNORE, reduction="sum", label_smoothing=smoothing
    )


def span_loss(logits: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
    """Return the summed cross-entropy of an answer's first and last token: scores [B, T, 2] -> [].

    Only real tokens take part. The two ends of a row count half each, so that a row weighs as much as a label
    does elsewhere.
    """
    targets, mask = batch.targets, batch.mask
    scores = wide(logits).transpose(1, 2)  # B 2 T
    real = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask[:, None, :].expand_as(scores)
    log_p = scores.masked_fill(~real, -torch.inf).log_softmax(-1)
    asked = targets != IGNORE
    chosen = log_p.gather(-1, targets.clamp(min=0)[..., None])[..., 0]  # B 2
    even = log_p.masked_fill(~real, 0).sum(-1) / real.sum(-1)
    return -((1 - smoothing) * chosen + smoothing * even).masked_fill(~asked, 0).sum() / 2


def class_loss(logits: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
    """Return the summed cross-entropy of classes or tags: see `summed`."""
    return summed(logits, batch.targets, smoothing)


def class_answers(logits: Tensor, batch: Batch) -> Answered:
    """Return the best class of each row, and the right one."""
    return logits.argmax(-1)[:, None].tolist(), batch.targets[:, None].tolist()


def tag_answers(logits: Tensor, batch: Batch) -> Answered:
    """Return the best tags of each row's words, and the right ones."""
    asked = batch.targets != IGNORE
    best, right = (
        [row[where].tolist() for row, where in zip(rows, asked)]
        for rows in (logits.argmax(-1), batch.targets)
    )
    return best, right


def span_answers(logits: Tensor, batch: Batch) -> Answered:
    """Return the best first and last token of each row's answer, and the right ones."""
    scores = logits if batch.mask is None else logits.masked_fill(~batch.mask[..., None], -torch.inf)
    return scores.argmax(1).tolist(), batch.targets.tolist()


CLASSES = Objective(class_loss, class_answers)
TAGGED = Objective(class_loss, tag_answers)
SPANS = Objective(span_loss, span_answers)


def objective_of(head: str | None) -> Objective:
    """Return the usual objective of a head without a vocabulary."""
    usual = {"classifier": CLASSES, "tagger": TAGGED, "span": SPANS}
    if head not in usual:
        raise InputError(
            f'a model with head "{head}" has no loss: train one with lm, mlm, classifier, tagger or span'
        )
    return usual[head]


def vocabulary_loss(
    head: LanguageHead, hidden: Tensor, batch: Batch, smoothing: float, chunk: int, compiled: bool = False
) -> Tensor:
    """Cross-entropy over the vocabulary of hidden states [B, T, D], scored by `head` `chunk` positions at a
    time -> [].
    """
    rows, targets = hidden.reshape(-1, hidden.shape[-1]), batch.targets.reshape(-1)
    if batch.n_targets < targets.numel():
        asked = (targets != IGNORE).nonzero()[:, 0]
        rows, targets = rows[asked], targets[asked]  # N D, N
    of_rows = (
        row_loss if not compiled else quick_row_loss if _has_kernel(head, rows) else _compiled_row_loss()
    )
    pieces = -(-rows.shape[0] // chunk) if chunk else 1
    if pieces <= 1:
        return of_rows(head, rows, targets, smoothing)
    size = -(-rows.shape[0] // pieces)  # pieces of about one size
    if not torch.is_grad_enabled():
        starts = range(0, rows.shape[0], size)
        return torch.stack(
            [of_rows(head, rows[at : at + size], targets[at : at + size], smoothing) for at in starts]
        ).sum()
    return cast(Tensor, _pieces(head, rows, targets, smoothing, size, of_rows))


def row_loss(head: nn.Module, rows: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """Score rows [N, D] and sum their cross-entropy with targets [N] -> []."""
    return summed(head(rows, None), targets, smoothing)


def quick_row_loss(head: nn.Module, rows: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """Compute `row_loss` by a kernel that never holds the scores in float32."""
    from clearhead.fast.triton_loss import CrossEntropy

    return cast(Tensor, CrossEntropy.apply(head(rows, None), targets, smoothing))  # type: ignore[no-untyped-call]


def _has_kernel(head: LanguageHead, rows: Tensor) -> bool:
    fitting = rows.is_cuda and rows.dtype != torch.float64 and head.out.out_features >= LARGE
    return fitting and importlib.util.find_spec("triton") is not None


@functools.cache
def _compiled_row_loss() -> RowLoss:
    return torch.compile(row_loss)


def _is_compiled(model: nn.Module) -> bool:
    return hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None


def _pieces(head: Head, rows: Tensor, targets: Tensor, smoothing: float, size: int, of_rows: RowLoss) -> Any:
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    return _InPieces.apply(functools.partial(of_rows, head), smoothing, size, targets, rows, *trained)  # type: ignore[no-untyped-call]


class _InPieces(torch.autograd.Function):
    """A loss whose gradient is taken piece by piece in the forward pass, so that nothing is kept or computed
    twice.
    """

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
            piece = slice(start, start + size)
            with torch.enable_grad():
                here = rows[piece].detach().requires_grad_()
                loss = loss_of(here, targets[piece], smoothing)
            total += loss.detach()
            with torch.autocast(rows.device.type, enabled=False):  # as in any backward pass
                gradient[piece], *of_weights = torch.autograd.grad(loss, (here, *trained))
            for so_far, found in zip(sums, of_weights):
                so_far += found
        ctx.save_for_backward(gradient, *(so_far.to(weight.dtype) for so_far, weight in zip(sums, trained)))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients that the forward pass took, scaled."""
        scaled = ((wide(gradient) * upstream).to(gradient.dtype) for gradient in ctx.saved_tensors)
        return (None, None, None, None, *scaled)


def _balance(model: Transformer, batch: Batch) -> Tensor:
    """Return the mean of the balance losses of the stacks that have experts."""
    stacks = [
        (model.decoder, batch.mask),
        (model.encoder, batch.source_mask if model.decoder is not None else batch.mask),
    ]
    return torch.stack([balance_loss(stack, mask) for stack, mask in stacks if stack is not None]).mean()
