"""Time one CPU training step of a small GPT: clearhead, transformers' GPT-2 and a minimal GPT, in turn.

python benchmarks/train_step.py [--rounds 12] [--save]
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import clearhead as ch
from common import alternate, by_processor, report, save
from minimal_gpt import MinimalGPT

LAYERS, HEADS, WIDTH, LENGTH, BATCH, VOCAB = 6, 6, 384, 256, 8, 65


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    ids, targets = torch.randint(VOCAB, (2, BATCH, LENGTH))

    config = ch.ModelConfig(
        vocab_size=VOCAB,
        d_model=WIDTH,
        n_layers=LAYERS,
        n_heads=HEADS,
        max_positions=LENGTH,
        activation="gelu_tanh",
    )
    ours, minimal = ch.Transformer(config), MinimalGPT(LAYERS, HEADS, WIDTH, LENGTH, VOCAB)
    models: dict[str, tuple[nn.Module, object]] = {
        "clearhead": (ours, lambda: ours(ids).logits),
        "minimal GPT": (minimal, lambda: minimal(ids)),
    }
    try:
        from transformers import GPT2Config, GPT2LMHeadModel

        peer = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCAB,
                n_positions=LENGTH,
                n_embd=WIDTH,
                n_layer=LAYERS,
                n_head=HEADS,
                resid_pdrop=0,
                embd_pdrop=0,
                attn_pdrop=0,
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
    result = report(
        f"CPU training step, GPT {LAYERS} x {WIDTH}, T {LENGTH}, B {BATCH}",
        alternate(jobs, options.rounds),
        BATCH * LENGTH,
    )
    if options.save:
        save(by_processor("cpu_train_step"), [result])


if __name__ == "__main__":
    main()
