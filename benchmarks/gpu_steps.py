"""Time the recorded steps of a decoder on a GPU alone, without the prompts: what bounds `generate` there.

    PYTHONPATH=src python benchmarks/gpu_steps.py [--rows 1 2 32] [--few-rows 1]
        [--weights bfloat16 int8 int4] [--save]

A Llama shape with 1.1 billion parameters, random weights, prompts of 128 tokens, 255 steps. Beside tokens a
second stands the share of the step that reading all weights once would take, at the rate of a large sum.
"""

from __future__ import annotations

import argparse

import torch

import clearhead as ch
from clearhead.run.generate.decode import Prompts, prefill_fixed
from clearhead.run.generate.steps import CompiledStep, slots_bucket
from clearhead.run.kernels.prepare import prepared
from clearhead.run.quant.apply import quantize_model
from common import device_name, save
from gpu_default import LLAMA, prompts
from gpu_kernels import seconds_of

PROMPT, STEPS, ROUNDS = 128, 255, 5
BITS = {"int8": 8, "int4": 4}


def bandwidth() -> float:
    """Return bytes a second that a sum over 2 GB reads."""
    large = torch.ones(1 << 30, dtype=torch.bfloat16, device="cuda")
    large.sum()
    return large.nbytes / min(seconds_of(large.sum) for _ in range(ROUNDS))


def bytes_of(weights: str) -> float:
    """Return the size of all weights that a step reads; of few bits, with scales and offsets."""
    table = LLAMA.vocab_size * LLAMA.d_model  # of which a step reads one row; the head is as large
    layers = ch.cost(LLAMA).parameters.total - 2 * table
    if weights not in BITS:
        return 2 * (layers + table)
    plan = ch.QuantPlan(BITS[weights])
    layer, head = (plan.grid_of(bits).bits_per_weight for bits in (plan.bits, 8))
    return (layers * layer + table * head) / 8


@torch.inference_mode()
def step_seconds(model: ch.Transformer, rows: int) -> float:
    """Return the seconds of one step for so many rows."""
    step = CompiledStep(model, rows, slots_bucket(PROMPT + STEPS + 1), backend=None)
    took = []
    for _ in range(ROUNDS):
        given = Prompts(prompts(rows, rows, "llama-1.1b"))
        step.ids[:rows, 0] = prefill_fixed(model, given, step.cache).argmax(-1)
        took.append(seconds_of(lambda: step.run(STEPS)))
    return min(took) / STEPS


def main() -> None:
    """Time each kind of weights at each number of rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 32])
    parser.add_argument("--few-rows", type=int, nargs="+", default=[1], help="the same, of few bits")
    parser.add_argument("--weights", nargs="+", default=["bfloat16", *BITS], choices=["bfloat16", *BITS])
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    rate, found = bandwidth(), []
    print(f"a sum reads {rate / 1e12:.2f} TB/s", flush=True)
    for weights in given.weights:
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = ch.Transformer(LLAMA).bfloat16().eval()
        if weights in BITS:
            model = quantize_model(model, ch.QuantPlan(BITS[weights], method="rtn")).model
        fast = prepared(model)
        for rows in given.few_rows if weights in BITS else given.rows:
            seconds = step_seconds(fast, rows)
            row = {
                "weights": weights,
                "rows": rows,
                "ms_a_step": round(seconds * 1e3, 4),
                "tokens_per_s": round(rows / seconds),
                "share_of_reading": round(bytes_of(weights) / rate / seconds, 3),
                "sum_tb_per_s": round(rate / 1e12, 2),
                "device": device_name(),
                "torch": torch.__version__,
            }
            found.append(row)
            print(row, flush=True)
        del model, fast
        torch.cuda.empty_cache()
    if given.save:
        save("gpu_steps", found)


if __name__ == "__main__":
    main()
