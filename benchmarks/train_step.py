"""One CPU training step of a small GPT: clearhead, transformers' GPT-2 and a hand-written minimal GPT, in turn.

python benchmarks/train_step.py [--rounds 12] [--save]
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clearhead as ch
from common import alternate, report, save

LAYERS, HEADS, WIDTH, LENGTH, BATCH, VOCAB = 6, 6, 384, 256, 8, 65


class MinimalBlock(nn.Module):
    """The least code that is a GPT block: one projection for q, k and v, the fused kernel, no options."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = (part.view(B, T, HEADS, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, D))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class MinimalGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(MinimalBlock() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        return self.norm(self.blocks(x)) @ self.tokens.weight.T


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    ids, targets = torch.randint(VOCAB, (2, BATCH, LENGTH))

    config = ch.ModelConfig(vocab_size=VOCAB, d_model=WIDTH, n_layers=LAYERS, n_heads=HEADS, max_positions=LENGTH, activation="gelu_tanh")
    ours, minimal = ch.Transformer(config), MinimalGPT()
    models: dict[str, tuple[nn.Module, object]] = {
        "clearhead": (ours, lambda: ours(ids).logits),
        "minimal GPT": (minimal, lambda: minimal(ids)),
    }
    try:
        from transformers import GPT2Config, GPT2LMHeadModel

        peer = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCAB, n_positions=LENGTH, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
            )
        )
        models["transformers GPT-2"] = (peer, lambda: peer(ids, use_cache=False).logits)
    except ImportError:
        print("transformers is not installed: its row is left out")

    def step(model: nn.Module, forward: object) -> object:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def once() -> None:
            optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(forward().flatten(0, 1), targets.flatten()).backward()
            optimizer.step()

        return once

    jobs = {name: step(*pair) for name, pair in models.items()}
    result = report(f"CPU training step, GPT {LAYERS} x {WIDTH}, T {LENGTH}, B {BATCH}", alternate(jobs, options.rounds), BATCH * LENGTH)
    if options.save:
        save("cpu_train_step", [result])


if __name__ == "__main__":
    main()
