"""Time greedy decoding with the cache on the CPU, 124M GPT-2 shape, float32: clearhead and its peers in turn.

The peers are transformers and, where it is installed, CTranslate2.

python benchmarks/decode.py [--batches 1 2 4 8] [--new 48] [--rounds 3] [--save]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

import clearhead as ch
from clearhead.fast.prepare import prepared
from clearhead.generate.decode import greedy
from common import alternate, report, save


def translate2(peer: object, folder: str, threads: int) -> Callable[[Tensor, int], object]:
    """Convert the same weights for CTranslate2; give it a vocabulary, as its converter asks for files."""
    import ctranslate2
    from ctranslate2.converters.transformers import GPT2Loader

    spec = GPT2Loader().get_model_spec(peer)
    words = [f"t{number}" for number in range(50257)]
    spec.register_vocabulary(words)
    spec.config.bos_token = spec.config.eos_token = words[-1]
    spec.config.unk_token = words[-2]
    spec.validate()
    spec.optimize(quantization=None)
    spec.save(folder)
    generator = ctranslate2.Generator(folder, device="cpu", compute_type="float32", intra_threads=threads)

    def run(ids: Tensor, new: int) -> object:
        prompts = [[words[token] for token in row] for row in ids.tolist()]
        return generator.generate_batch(
            prompts, max_length=new, min_length=new, include_prompt_in_result=False
        )

    return run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    config = ch.ModelConfig(
        vocab_size=50257, d_model=768, n_layers=12, n_heads=12, max_positions=1024, activation="gelu_tanh"
    )
    model = prepared(ch.Transformer(config))

    from transformers import GPT2Config, GPT2LMHeadModel, logging

    logging.set_verbosity_error()
    peer = GPT2LMHeadModel(GPT2Config()).eval()
    results = []
    folder = tempfile.TemporaryDirectory()
    other = (
        translate2(peer, folder.name, torch.get_num_threads())
        if find_spec("ctranslate2") is not None
        else None
    )
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
        if other is not None:
            jobs["ctranslate2"] = lambda ids=ids: other(ids, options.new)
        title = (
            f"CPU greedy decode, GPT-2 124M float32, batch {batch}, {options.prompt} + {options.new} tokens"
        )
        results.append(report(title, alternate(jobs, options.rounds), batch * options.new))
    if options.save:
        save("cpu_decode", results)
    folder.cleanup()


if __name__ == "__main__":
    main()
