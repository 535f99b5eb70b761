"""Time a long generation on the CPU: the cost of a token as the row grows, and the share of attention in it.

The work that grows with the row is attention over its keys: the same queries, keys and values through
PyTorch's kernel alone, timed in the same run at the same lengths. Whatever else grew would show as a rest
that grows. Times are CPU time of the process, with one thread unless told otherwise, and of the quickest
tenth: a busy machine only ever adds.

python benchmarks/long.py [--new 4000] [--every 500] [--window 0] [--text] [--penalties] [--threads 1]
    [--save]
"""

from __future__ import annotations

import argparse
import itertools
import time

import torch
import torch.nn.functional as nnf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import clearhead as ch
from clearhead.run.generate.decode import Continuation, Ends, Prompts, decode
from clearhead.run.generate.request import Request
from clearhead.run.generate.stream import TextStream
from clearhead.run.kernels.prepare import prepared
from common import device_name, save


def quickest(times: list[float]) -> float:
    """The tenth part of the times is below this."""
    return sorted(times)[len(times) // 10]


def attention_seconds(config: ch.ModelConfig, keys: int) -> float:
    """Of one token in all layers: one query per head over this many keys in a buffer made for more."""
    E, heads = config.d_model // config.n_heads, config.n_kv_heads or config.n_heads
    q = torch.randn(1, heads, config.n_heads // heads, E)
    # Each layer has keys of its own, which the caches must hold in turn.
    shape = (2, config.n_layers, 1, heads, config.max_positions, E)
    k, v = torch.randn(shape)[..., :keys, :]
    # Weights are read in between, and push keys out of the caches.
    others = torch.randn(config.n_layers, 4 * config.d_model, config.d_model)
    times = []
    for _ in range(50):
        took = 0.0
        for layer in range(config.n_layers):
            others[layer].sum()
            start = time.process_time()
            nnf.scaled_dot_product_attention(q, k[layer], v[layer])
            took += time.process_time() - start
        times.append(took)
    return quickest(times)


def byte_tokenizer() -> Tokenizer:
    """One token per byte."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    tokenizer.train_from_iterator(
        [], trainers.BpeTrainer(vocab_size=256, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    )
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--new", type=int, default=4000)
    parser.add_argument("--every", type=int, default=500)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--window", type=int, default=0, help="keys that each layer sees; 0: all")
    parser.add_argument("--text", action="store_true", help="stream the text with a stop string, too")
    parser.add_argument(
        "--penalties", action="store_true", help="penalties and no-repeat n-grams, which look back"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    config = ch.ModelConfig(
        vocab_size=256,
        d_model=options.width,
        n_layers=options.layers,
        n_heads=8,
        n_kv_heads=4,
        positions="rope",
        norm="rmsnorm",
        gated=True,
        bias=False,
        max_positions=options.new + 1,
        window=options.window or None,
    )
    model, stamps = prepared(ch.Transformer(config)), []
    stream = TextStream(byte_tokenizer(), stop=("never said",)) if options.text else None

    def watch(number: int, row: Continuation) -> None:
        if stream is not None:
            stream.push(row.ids[-1])
        stamps.append(time.process_time())

    looking = (
        {"repetition_penalty": 1.1, "frequency_penalty": 0.01, "no_repeat_ngram": 6}
        if options.penalties
        else {}
    )
    prompts = Prompts([[1]])
    decode(model, Request(), prompts)
    request = Request(max_new_tokens=options.new, temperature=1.0, **looking)
    decode(model, request, prompts, Ends(on_token=watch))
    steps = [later - earlier for earlier, later in itertools.pairwise(stamps)]
    print(
        f"{options.new} tokens, width {options.width}, {options.layers} layers  "
        f"[{device_name()}, torch {torch.__version__}]"
    )
    print("        tokens   ms a token   attention alone   all the rest")
    curve = []
    for start in range(0, len(steps), options.every):
        piece = steps[start : start + options.every]
        middle = start + len(piece) // 2
        whole = quickest(piece) * 1e3
        attention = attention_seconds(config, min(middle, options.window or middle)) * 1e3
        rest = whole - attention
        curve.append(
            {
                "from": start,
                "ms": round(whole, 3),
                "attention_ms": round(attention, 3),
                "rest_ms": round(rest, 3),
            }
        )
        print(f"  {start:>5} - {start + len(piece):>5}{whole:>13.3f}{attention:>18.3f}{rest:>15.3f}")
    grown, attended = (curve[-1][key] - curve[0][key] for key in ("ms", "attention_ms"))
    print(
        f"  grown by {grown:.3f} ms a token, of which attention alone {attended:.3f}; "
        f"all the rest by {grown - attended:+.3f}"
    )
    if options.save:
        result = {"device": device_name(), "torch": torch.__version__, "curve": curve}
        result |= {"grown_ms": round(grown, 3), "attention_grown_ms": round(attended, 3)}
        save("long_window" if options.window else "long", [result])


if __name__ == "__main__":
    main()
