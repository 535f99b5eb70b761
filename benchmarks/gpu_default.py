"""What `generate` gives on a GPU without any flag: prompts of unequal length, from the first call on.

    python benchmarks/gpu_default.py [--rows 64] [--new 512] [--compiled] [--save]

A decoder of Qwen3-0.6B's shape with random weights in bfloat16, and prompts of 100 to 1,024 tokens. Each
variant is timed in a first call and in a second one with other prompts: as it comes, step by step
(`compile=False`), and with `--compiled` also with `compile=True`, which takes a minute at first. Seconds are
those of the clock and include reading the prompts.
"""

from __future__ import annotations

import argparse
import random
import time

import torch

import clearhead as ch
from common import device_name, save

SHAPE = ch.ModelConfig(
    family="decoder", vocab_size=151_936, d_model=1024, n_layers=28, n_heads=16, n_kv_heads=8, d_head=128,
    d_ff=3072, gated=True, activation="silu", norm="rmsnorm", positions="rope", bias=False, qk_norm="head",
    tie_embeddings=True, max_positions=32_768, rope_base=1e6,
)  # fmt: skip
LENGTHS = (100, 1024)


def prompts(rows: int, seed: int) -> list[list[int]]:
    """Draw rows of tokens of unequal length."""
    draw = random.Random(seed)
    return [[draw.randrange(SHAPE.vocab_size) for _ in range(draw.randint(*LENGTHS))] for _ in range(rows)]


def main() -> None:
    """Time each variant twice, and print tokens a second."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[64])
    parser.add_argument("--new", type=int, default=512)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = ch.Transformer(SHAPE.replace(max_positions=4096)).bfloat16().eval()
    found = []
    for rows in given.rows:
        kept = {}
        for name, choice in {"default": None, "step by step": False, "compiled": True}.items():
            if name == "compiled" and not given.compiled:
                continue
            m = ch.Model(model)
            took = []
            for seed in (1, 2):
                asked = prompts(rows, seed)
                torch.cuda.synchronize()
                start = time.perf_counter()
                answers = m.generate(asked, given.new, compile=choice)
                torch.cuda.synchronize()
                took.append(time.perf_counter() - start)
            kept[name] = [answer.ids for answer in answers]
            agree = sum(a == b for a, b in zip(kept[name], kept["default"])) / rows
            row = {
                "rows": rows,
                "way": name,
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
        save("gpu_default", found)


if __name__ == "__main__":
    main()
