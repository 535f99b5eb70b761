"""Time greedy decoding with the cache on the CPU, float32: clearhead and its peers in turn.

    python benchmarks/decode.py [--shape gpt2 smollm2] [--batches 1 2 4 8] [--new 48] [--rounds 3] [--save]

The shapes are those of GPT-2 124M and SmolLM2-135M, with random weights. The peers are transformers, for
GPT-2 CTranslate2 where it is installed, and clearhead without the step compiled from C.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

import clearhead as ch
from clearhead.run.generate.decode import greedy
from clearhead.run.kernels.prepare import prepared
from common import alternate, by_processor, report, save


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


SHAPES = {
    "gpt2": ch.ModelConfig(
        vocab_size=50257, d_model=768, n_layers=12, n_heads=12, max_positions=1024, activation="gelu_tanh"
    ),
    "smollm2": ch.ModelConfig(
        vocab_size=49152, d_model=576, n_layers=30, n_heads=9, n_kv_heads=3, d_ff=1536, gated=True,
        activation="silu", norm="rmsnorm", positions="rope", bias=False, max_positions=2048,
    ),
}  # fmt: skip


def peer_of(shape: str) -> torch.nn.Module:
    """Return transformers' model of the shape."""
    import transformers

    transformers.logging.set_verbosity_error()
    if shape == "gpt2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config()).eval()
    config = SHAPES[shape]
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size, hidden_size=config.d_model, num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads, num_key_value_heads=config.n_kv_heads,
            intermediate_size=config.d_ff, tie_word_embeddings=True,
        )
    ).eval()  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    results = []
    for shape in options.shape:
        torch.manual_seed(0)
        config = SHAPES[shape]
        plain, peer = ch.Transformer(config), peer_of(shape)
        model, before = prepared(plain), prepared(plain, native=False)
        folder = tempfile.TemporaryDirectory()
        compared = shape == "gpt2" and find_spec("ctranslate2") is not None
        other = translate2(peer, folder.name, torch.get_num_threads()) if compared else None
        for batch in options.batches:
            ids = torch.randint(config.vocab_size, (batch, options.prompt))
            jobs = {
                "clearhead": lambda ids=ids, model=model: greedy(model, ids, options.new),
                "clearhead without C": lambda ids=ids, model=before: greedy(model, ids, options.new),
                "transformers generate": lambda ids=ids, peer=peer: peer.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=options.new,
                    min_new_tokens=options.new,
                    do_sample=False,
                    pad_token_id=0,
                ),
            }
            if other is not None:
                jobs["ctranslate2"] = lambda ids=ids, other=other: other(ids, options.new)
            title = (
                f"CPU greedy decode, {shape} float32, batch {batch}, {options.prompt} + {options.new} tokens"
            )
            results.append(report(title, alternate(jobs, options.rounds), batch * options.new))
        folder.cleanup()
    if options.save:
        save(by_processor("cpu_decode"), results)


if __name__ == "__main__":
    main()
