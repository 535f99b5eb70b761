"""A mixture of experts in place of the feed-forward: a router sends each token to a few of many feed-forwards.

No token is dropped and none is padded: tokens are sorted by expert, each expert works on its own run of rows, and the
answers are added back where they came from. The only Python loop is over experts.

Shapes: B batch, T length, N = B·T tokens, D model, X experts, A active experts per token, F feed-forward width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from clearhead.config import ModelConfig
from clearhead.model.dtypes import wide
from clearhead.model.feedforward import FeedForward
from clearhead.model.taps import SILENT, Tap


class Experts(nn.Module):
    """X feed-forwards and the router that chooses among them."""

    def __init__(self, config: ModelConfig, d_ff: int) -> None:
        super().__init__()
        self.n_active = config.n_active_experts
        self.order, self.renormalise = config.router_order, config.router_renormalise
        self.router = nn.Linear(config.d_model, config.n_experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(config, d_ff) for _ in range(config.n_experts))
        self.routed: Tensor | None = None  # router logits of the latest pass in training, for `balance_loss`

    def __getstate__(self) -> dict[str, object]:
        """What a copy is made of: not what the latest pass left behind."""
        return {**self.__dict__, "routed": None}

    def forward(self, x: Tensor, tap: Tap = SILENT) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        rows = x.reshape(-1, x.shape[-1])  # N D
        logits = tap("router", self.router(x)).view(rows.shape[0], -1)  # N X
        self.routed = logits if self.training else None
        weights, chosen = self.choose(logits)  # N A

        order = chosen.flatten().argsort(stable=True)  # (token, choice) pairs, sorted by expert
        counts = chosen.flatten().bincount(minlength=len(self.experts)).tolist()
        token = order // self.n_active  # which row each pair belongs to
        runs = zip(self.experts, torch.split(rows[token], counts))
        answers = [expert(run, tap.inside(f"experts.{number}")) for number, (expert, run) in enumerate(runs)]
        answer = torch.cat(answers) * weights.flatten()[order, None]
        return tap("out", torch.zeros_like(rows).index_add(0, token, answer.to(rows.dtype)).view_as(x))

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and numbers of the experts each token visits: [N, X] -> [N, A] twice."""
        if self.order == "topk_softmax":
            top, chosen = wide(logits).topk(self.n_active, dim=-1)
            return top.softmax(-1).to(logits.dtype), chosen
        top, chosen = wide(logits).softmax(-1).topk(self.n_active, dim=-1)
        if self.renormalise:
            top = top / top.sum(-1, keepdim=True)
        return top.to(logits.dtype), chosen


def balance_loss(model: nn.Module, mask: Tensor | None = None) -> Tensor:
    """X · Σ over experts of (share of choices) · (mean router probability), over all layers of the latest training pass.

    It is least when tokens spread evenly over the experts. `mask` [B, T] leaves padding out.
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
