"""Greedy decoding on the CPU with the cache, 124M GPT-2 shape, float32: clearhead and transformers, in turn.

python benchmarks/decode.py [--batches 1 2 4 8] [--new 48] [--rounds 3] [--save]
"""

from __future__ import annotations

import argparse

import torch

import clearhead as ch
from clearhead.generate.decode import greedy
from clearhead.generate.prepare import prepared
from common import alternate, report, save


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    config = ch.ModelConfig(vocab_size=50257, d_model=768, n_layers=12, n_heads=12, max_positions=1024, activation="gelu_tanh")
    model = prepared(ch.Transformer(config))

    from transformers import GPT2Config, GPT2LMHeadModel, logging

    logging.set_verbosity_error()
    peer = GPT2LMHeadModel(GPT2Config()).eval()
    results = []
    for batch in options.batches:
        ids = torch.randint(config.vocab_size, (batch, options.prompt))
        jobs = {
            "clearhead": lambda ids=ids: greedy(model, ids, options.new),
            "transformers generate": lambda ids=ids: peer.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=options.new,
                min_new_tokens=options.new,
                do_sample=False,
                pad_token_id=50256,
            ),
        }
        title = f"CPU greedy decode, GPT-2 124M float32, batch {batch}, {options.prompt} + {options.new} tokens"
        results.append(report(title, alternate(jobs, options.rounds), batch * options.new))
    if options.save:
        save("cpu_decode", results)


if __name__ == "__main__":
    main()
