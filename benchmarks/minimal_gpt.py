"""The least code that is a GPT, for others to be measured by: no options, nothing to look into."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MinimalBlock(nn.Module):
    """One projection for q, k and v, the fused kernel. Streams [B, T, D] -> [B, T, D]."""

    def __init__(self, heads: int, width: int, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=bias), nn.LayerNorm(width, bias=bias)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias), nn.Linear(width, width, bias)
        self.up, self.down = nn.Linear(width, 4 * width, bias), nn.Linear(4 * width, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = (
            part.view(B, T, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, D)
        )
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class MinimalGPT(nn.Module):
    """Ids [B, T] -> logits [B, T, V], by the table of tokens."""

    def __init__(
        self, layers: int, heads: int, width: int, length: int, vocab: int, bias: bool = True
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(MinimalBlock(heads, width, bias) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, bias=bias)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return self.norm(self.blocks(x)) @ self.tokens.weight.T
