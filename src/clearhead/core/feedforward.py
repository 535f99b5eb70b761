"""The feed-forward part: widen, activate, narrow, for each token by itself.

A mixture of experts may take its place: a router sends each token to a few of many feed-forwards. Nothing is
dropped or padded. Tokens are sorted by expert, each expert works on its own run of rows, and the outputs are
added back to their tokens. The only Python loop is over experts.

Shapes: B batch, T length, N = B·T tokens, D model, F feed-forward width, X experts, A active experts per
token.
"""

import dataclasses
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.core.config import StackSpec
from clearhead.core.dtypes import wide
from clearhead.core.steps import INDEX, Pass, Step, linear_step
from clearhead.core.taps import SILENT, Tap


def gelu_tanh(x: Tensor) -> Tensor:
    """Compute GELU by its tanh approximation."""
    return nnf.gelu(x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    """Compute GELU by its sigmoid approximation."""
    return x * torch.sigmoid(1.702 * x)


def relu2(x: Tensor) -> Tensor:
    """Compute ReLU, squared."""
    return torch.relu(x).square()


BALANCE = 0.01  # weight of the loss of routers


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": nnf.gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "silu": nnf.silu,
    "relu2": relu2,
}


class FeedForward(nn.Module):
    """down(activation(up(x))) or, if gated, down(activation(gate(x)) * up(x)).

    A clamp bounds gate and up; a shift is added to up.
    """

    def __init__(self, spec: StackSpec, width: int | None = None) -> None:
        super().__init__()
        width = width or spec.d_ff
        self.activation = ACTIVATIONS[spec.activation]
        self.clamp, self.shift = spec.gated_clamp, spec.gated_shift or None
        self.dropout = spec.feedforward_dropout
        self.gate = nn.Linear(spec.d_model, width, bias=spec.feedforward_bias) if spec.gated else None
        self.up = nn.Linear(spec.d_model, width, bias=spec.feedforward_bias)
        self.down = nn.Linear(width, spec.d_model, bias=spec.feedforward_bias)

    def forward(self, x: Tensor, tap: Tap = SILENT) -> Tensor:
        """Map [B, T, D] -> [B, T, D]."""
        pre, up = self.project(x)
        pre = tap.step("up" if up is None else "gate", pre)  # B T F
        if self.clamp is not None:
            pre = tap.step("gate_clamped", pre.clamp(max=self.clamp))
        post = tap.step("activated", self.activation(tap("pre", pre)))
        if up is not None:
            post = tap.step("gated", post * self._factor(tap.step("up", up), tap))
        post = tap("post", post)
        if self.training:
            post = nnf.dropout(post, self.dropout)
        return tap("out", tap.step("down", self.down(post)))  # B T D

    def project(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the input of the activation and, if gated, its factor: [B, T, D] -> [B, T, F]."""
        return (self.up(x), None) if self.gate is None else (self.gate(x), self.up(x))

    def _factor(self, up: Tensor, tap: Tap) -> Tensor:
        """Clamp and shift what the gate multiplies: [B, T, F] -> [B, T, F]."""
        if self.clamp is not None:
            up = tap.step("up_clamped", up.clamp(-self.clamp, self.clamp))
        return up if self.shift is None else tap.step("up_shifted", up + self.shift)


# What an activation keeps for the backward pass beside its output: its input, but for these.
ACTIVATION_COPIES = {"relu": 0, "quick_gelu": 2}


def feedforward_steps(
    spec: StackSpec, run: Pass, name: str, rows: int, F: int, copies: int = 1, idle: int = 0
) -> Iterator[Step]:
    """Yield the steps of a feed-forward, or of `copies` experts of which a token skips `idle`, on `rows`."""
    D, bias, wide_values = spec.d_model, spec.feedforward_bias, rows * F * run.size

    def experts(step: Step) -> Step:
        parameters, weights = copies * step.parameters, copies * step.weights
        return dataclasses.replace(step, parameters=parameters, weights=weights, idle=idle * step.parameters)

    for projection in ("gate", "up") if spec.gated else ("up",):
        activated = projection == "gate" or not spec.gated
        copies_kept = 1 + (ACTIVATION_COPIES.get(spec.activation, 1) if activated else 0)
        copies_kept += spec.gated_clamp is not None  # the input of the clamp
        kept = wide_values * copies_kept
        yield experts(linear_step(f"{name}.{projection}", "feedforward", rows, D, F, bias, kept=kept))
    if spec.feedforward_dropout:
        yield Step(f"{name}.dropout", "feedforward", kept=rows * F)
    kept = wide_values if spec.gated or spec.feedforward_dropout else 0
    yield experts(linear_step(f"{name}.down", "feedforward", rows, F, D, bias, kept=kept))


class Experts(nn.Module):
    """X feed-forwards and the router that chooses among them; perhaps one more that every token visits."""

    def __init__(self, spec: StackSpec) -> None:
        super().__init__()
        self.n_active = spec.n_active_experts
        self.order, self.renormalise = spec.router_order, spec.router_renormalise
        self.router = nn.Linear(spec.d_model, spec.n_experts, bias=spec.router_bias)
        self.experts = nn.ModuleList(FeedForward(spec, spec.d_expert) for _ in range(spec.n_experts))
        self.shared = FeedForward(spec, spec.d_shared_expert) if spec.d_shared_expert else None
        self.shared_gate = nn.Linear(spec.d_model, 1, bias=False) if self.shared else None
        self.routed: Tensor | None = None  # router logits of the latest pass in training, for `balance_loss`

    def __getstate__(self) -> dict[str, object]:
        """Leave the latest router logits out of copies."""
        return {**self.__dict__, "routed": None}

    def forward(self, x: Tensor, tap: Tap = SILENT) -> Tensor:
        """Map [B, T, D] -> [B, T, D]."""
        rows = x.reshape(-1, x.shape[-1])  # N D
        logits = tap("router", self.router(x)).view(rows.shape[0], -1)  # N X
        self.routed = logits if self.training else None
        weights, chosen = self.choose(logits)  # N A
        chosen, weights = tap.step("chosen", chosen), tap.step("weights", weights)

        order = chosen.flatten().argsort(stable=True)  # (token, choice) pairs, sorted by expert
        counts = chosen.flatten().bincount(minlength=logits.shape[-1])
        token = order // self.n_active  # which row each pair belongs to
        answers = self.answer(tap.step("sorted", rows[token]), counts, tap)  # N·A D
        answer = (answers * weights.flatten()[order, None]).to(rows.dtype)
        mixed = tap.step("mixed", torch.zeros_like(rows).index_add(0, token, answer).view_as(x))
        if self.shared is not None and self.shared_gate is not None:
            shared = self.shared(x, tap.part("shared"))
            share = tap.step("shared_gate", self.shared_gate(x)).sigmoid()  # B T 1
            mixed = tap.step("with_shared", mixed + share * shared)
        return tap("out", mixed)

    def answer(self, rows: Tensor, counts: Tensor, tap: Tap) -> Tensor:
        """Map rows [N·A, D], sorted by expert, of which each expert has `counts` [X] -> [N·A, D]."""
        runs = enumerate(torch.split(rows, counts.tolist()))
        return torch.cat([self.experts[number](run, tap.part(f"experts.{number}")) for number, run in runs])

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and numbers of the experts of each token: [N, X] -> [N, A] twice."""
        if self.order == "topk_softmax":
            top, chosen = wide(logits).topk(self.n_active, dim=-1)
            return top.softmax(-1).to(logits.dtype), chosen
        top, chosen = wide(logits).softmax(-1).topk(self.n_active, dim=-1)
        if self.renormalise:
            top = top / top.sum(-1, keepdim=True)
        return top.to(logits.dtype), chosen


def tally(model: nn.Module, mask: Tensor | None = None) -> Tensor | None:
    """Add up what the routers of the latest pass in training chose; None: nothing was routed.

    `mask` [B, T] leaves padding out.

    Returns: [2X + 1]: choices of each expert, number of tokens, probabilities of each expert. Only the last
        X have a gradient.
    """
    mixtures = [part for part in model.modules() if isinstance(part, Experts)]
    routed = [part.routed for part in mixtures if part.routed is not None]
    if not routed:
        return None
    logits = torch.cat([logits if mask is None else logits[mask.flatten()] for logits in routed])
    probability = wide(logits).softmax(-1)
    chosen = probability.topk(mixtures[0].n_active, dim=-1).indices
    counts = torch.zeros_like(probability).scatter(1, chosen, 1.0).sum(0)
    return torch.cat([counts, counts.new_tensor([len(logits)]), probability.sum(0)])


def counts_of(tally: Tensor) -> Tensor:
    """Return choices of each expert and the number of tokens: [..., 2X + 1] -> [..., X + 1]."""
    return tally[..., : tally.shape[-1] // 2 + 1].detach()


def imbalance(tally: Tensor, counts: Tensor) -> Tensor:
    """Compute X · Σ (share of choices) · (mean probability): [..., 2X + 1] -> [...].

    Of a tally that is a part of another one, the part of its loss; `counts` [..., X + 1] are of the other.
    """
    X, number = counts.shape[-1] - 1, counts[..., -1:].clamp(min=1)
    return X * (counts[..., :-1] / number * tally[..., X + 1 :] / number).sum(-1)


def expert_steps(spec: StackSpec, run: Pass, name: str, rows: int) -> Iterator[Step]:
    """Yield the steps of a mixture on `rows` tokens."""
    X, A, D = spec.n_experts, spec.n_active_experts, spec.d_model
    # Softmax over the chosen; or over all, then the chosen and their sum. Weights and indices come on top.
    softmax = A if spec.router_order == "topk_softmax" else X + A + 1
    each = softmax * run.wide + A * (run.size + 3 * INDEX)
    yield linear_step(f"{name}.router", "feedforward", rows, D, X, spec.router_bias, kept=rows * each)
    # The inputs of the experts, one for each product in half precision, their outputs, and these weighted.
    each = (3 if run.half and spec.gated else 2) * run.size + run.wide
    yield Step(f"{name}.sorted", "feedforward", kept=rows * A * D * each)
    yield from feedforward_steps(spec, run, f"{name}.experts", rows * A, spec.d_expert, X, idle=X - A)
    if spec.d_shared_expert:
        yield from feedforward_steps(spec, run, f"{name}.shared", rows, spec.d_shared_expert)
        copied = 2 + spec.gated if run.half else 0  # inputs: one for each product in half precision
        kept = rows * (D * (1 + copied) + 1) * run.size
        yield linear_step(f"{name}.shared_gate", "feedforward", rows, D, 1, bias=False, kept=kept)
