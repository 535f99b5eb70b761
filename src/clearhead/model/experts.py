"""A mixture of experts in place of the feed-forward: a router sends each token to a few of many experts.

Nothing is dropped or padded. Tokens are sorted by expert, each expert works on its own run of rows, and the
outputs are added back to their tokens. The only Python loop is over experts.

Shapes: B batch, T length, N = B·T tokens, D model, X experts, A active experts per token.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from clearhead.config import StackSpec
from clearhead.model.dtypes import wide
from clearhead.model.feedforward import FeedForward, feedforward_steps
from clearhead.model.steps import INDEX, Pass, Step, linear_step
from clearhead.model.taps import SILENT, Tap


class Experts(nn.Module):
    """X feed-forwards and the router that chooses among them."""

    def __init__(self, spec: StackSpec) -> None:
        super().__init__()
        self.n_active = spec.n_active_experts
        self.order, self.renormalise = spec.router_order, spec.router_renormalise
        self.router = nn.Linear(spec.d_model, spec.n_experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(spec) for _ in range(spec.n_experts))
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
        counts = chosen.flatten().bincount(minlength=len(self.experts)).tolist()
        token = order // self.n_active  # which row each pair belongs to
        runs = zip(self.experts, torch.split(tap.step("sorted", rows[token]), counts))
        answers = [expert(run, tap.part(f"experts.{number}")) for number, (expert, run) in enumerate(runs)]
        answer = torch.cat(answers) * weights.flatten()[order, None]
        mixed = torch.zeros_like(rows).index_add(0, token, answer.to(rows.dtype)).view_as(x)
        return tap("out", tap.step("mixed", mixed))

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and numbers of the experts of each token: [N, X] -> [N, A] twice."""
        if self.order == "topk_softmax":
            top, chosen = wide(logits).topk(self.n_active, dim=-1)
            return top.softmax(-1).to(logits.dtype), chosen
        top, chosen = wide(logits).softmax(-1).topk(self.n_active, dim=-1)
        if self.renormalise:
            top = top / top.sum(-1, keepdim=True)
        return top.to(logits.dtype), chosen


def balance_loss(model: nn.Module, mask: Tensor | None = None) -> Tensor:
    """Compute X · Σ over experts of (share of choices) · (mean router probability) in the latest pass.

    It covers all layers of a training pass, and is least when tokens spread evenly over the experts. `mask`
    [B, T] leaves padding out.
    """
    mixtures = [part for part in model.modules() if isinstance(part, Experts)]
    routed = [part.routed for part in mixtures if part.routed is not None]
    if not routed:
        return torch.zeros(())
    if mask is not None:
        routed = [logits[mask.flatten()] for logits in routed]
    logits = torch.cat(routed)
    n_experts, n_active = logits.shape[-1], mixtures[0].n_active
    probability = wide(logits).softmax(-1)
    chosen = probability.topk(n_active, dim=-1).indices
    share = torch.zeros_like(probability).scatter(1, chosen, 1.0).mean(0)
    return n_experts * (share * probability.mean(0)).sum()


def expert_steps(spec: StackSpec, run: Pass, name: str, rows: int) -> Iterator[Step]:
    """Yield the steps of a mixture on `rows` tokens."""
    X, A, D = spec.n_experts, spec.n_active_experts, spec.d_model
    # Softmax over the chosen; or over all, then the chosen and their sum. Weights and indices come on top.
    softmax = A if spec.router_order == "topk_softmax" else X + A + 1
    kept = rows * (softmax * run.wide + A * (run.size + 3 * INDEX))
    yield linear_step(f"{name}.router", "feedforward", rows, D, X, False, kept=kept)
    rows *= A
    # The inputs of the experts, their outputs, and the weighted outputs.
    yield Step(f"{name}.sorted", "feedforward", kept=3 * rows * D * run.size)
    yield from feedforward_steps(spec, run, f"{name}.experts", rows, copies=X, idle=X - A)
