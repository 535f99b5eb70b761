"""What `generate` gives on a GPU without any flag: prompts of unequal length, from the first call on.

    python benchmarks/gpu_default.py [--shape qwen3-0.6b] [--rows 64] [--new 512] [--compiled]
        [--quantize int4] [--save]

A decoder of Qwen3-0.6B's shape with random weights in bfloat16, and prompts of 100 to 1,024 tokens; or one
of the shape of a Llama with 1.1 billion parameters, and prompts of 128; its weights in few bits where asked,
rounded to the nearest. Each variant is timed in a first call
and in a second one with other prompts: as it comes, step by step (`compile=False`), and with `--compiled`
with `compile=True` too, which takes a minute at first. Seconds include reading the prompts.
"""

from __future__ import annotations

import argparse
import random
import time

import torch

import clearhead as ch
from clearhead.run.quant.apply import quantize_model
from common import device_name, save

SHAPE = ch.ModelConfig(
    family="decoder", vocab_size=151_936, d_model=1024, n_layers=28, n_heads=16, n_kv_heads=8, d_head=128,
    d_ff=3072, gated=True, activation="silu", norm="rmsnorm", positions="rope", bias=False, qk_norm="head",
    tie_embeddings=True, max_positions=4096, rope_base=1e6,
)  # fmt: skip
LLAMA = ch.ModelConfig(
    family="decoder", vocab_size=32_000, d_model=2048, n_layers=22, n_heads=32, n_kv_heads=4, d_ff=5632,
    gated=True, activation="silu", norm="rmsnorm", positions="rope", bias=False, tie_embeddings=False,
    max_positions=2048,
)  # fmt: skip
# By name: the config, and the lengths of prompts.
SHAPES = {"qwen3-0.6b": (SHAPE, (100, 1024)), "llama-1.1b": (LLAMA, (128, 128))}


def prompts(rows: int, seed: int, shape: str = "qwen3-0.6b") -> list[list[int]]:
    """Draw rows of tokens."""
    draw, (config, lengths) = random.Random(seed), SHAPES[shape]
    return [[draw.randrange(config.vocab_size) for _ in range(draw.randint(*lengths))] for _ in range(rows)]


def main() -> None:
    """Time each variant twice, and print tokens a second."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--rows", type=int, nargs="+", default=[64])
    parser.add_argument("--new", type=int, default=512)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--quantize", choices=("int8", "int4"))
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = ch.Transformer(SHAPES[given.shape][0]).bfloat16().eval()
    if given.quantize:
        bits = {"int8": 8, "int4": 4}[given.quantize]
        model = quantize_model(model, ch.QuantPlan(bits, method="rtn")).model
    found = []
    for rows in given.rows:
        kept = {}
        for name, choice in {"default": None, "step by step": False, "compiled": True}.items():
            if name == "compiled" and not given.compiled:
                continue
            m = ch.Model(model)
            took = []
            for seed in (1, 2):
                asked = prompts(rows, seed, given.shape)
                torch.cuda.synchronize()
                start = time.perf_counter()
                answers = m.generate(asked, given.new, compile=choice)
                torch.cuda.synchronize()
                took.append(time.perf_counter() - start)
            kept[name] = [answer.ids for answer in answers]
            agree = sum(a == b for a, b in zip(kept[name], kept["default"])) / rows
            row = {
                "shape": given.shape,
                "rows": rows,
                "way": name,
                "weights": given.quantize or "bfloat16",
                "first_call_s": round(took[0], 2),
                "second_call_s": round(took[1], 2),
                "tokens_per_s_first": round(rows * given.new / took[0]),
                "tokens_per_s": round(rows * given.new / took[1]),
                "ms_a_step_with_prompts": round(1000 * took[1] / given.new, 2),
                "rows_equal_to_default": round(agree, 3),
                "device": device_name(),
                "torch": torch.__version__,
            }
            found.append(row)
            print(row, flush=True)
            del m
            torch.cuda.empty_cache()
    if given.save:
        save("_".join(filter(None, ("gpu_default", given.shape, given.quantize))), found)


if __name__ == "__main__":
    main()
