"""Longformer's base shape at 4,096 tokens: forward passes beside transformers' own class, in turn.

    python benchmarks/longformer.py [--layers 12] [--length 4096] [--rounds 2] [--save]

12 layers of 768, window 512, one row, float32, the same weights in both: without global tokens, and with the
first token global. Times are processor time, so that other work on the machine falls out. Beside them stands
the time of the linear layers alone, which both leave to the same library: no attention, however quick, could
be faster than that.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import transformers
from torch import Tensor, nn

import clearhead as ch
from common import device_name, save


def timed(job: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """Return the processor time of one run, all threads together, and what it returns."""
    start = time.process_time()
    answer = job()
    return time.process_time() - start, answer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.LongformerConfig(
        vocab_size=50265, max_position_embeddings=options.length + 2, type_vocab_size=1, attention_window=512,
        num_hidden_layers=options.layers,
    )  # fmt: skip
    theirs = transformers.LongformerModel(config, add_pooling_layer=False).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = ch.load(folder).model
    ids = torch.randint(3, 50000, (1, options.length))
    whole, first = torch.ones_like(ids), torch.zeros_like(ids, dtype=torch.bool)
    first[:, 0] = True
    states = torch.randn(options.length, 768), torch.randn(options.length, 3072)
    square, up, down = nn.Linear(768, 768), nn.Linear(768, 3072), nn.Linear(3072, 768)

    def linear() -> Tensor:
        for _ in range(options.layers):
            for _ in range(4):
                square(states[0])
            up(states[0])
            down(states[1])
        return states[0]

    jobs: dict[str, dict[str, Callable[[], Tensor]]] = {
        "no global token": {
            "clearhead": lambda: ours(ids).hidden,
            "transformers": lambda: theirs(ids, attention_mask=whole).last_hidden_state,
            "linear layers alone": linear,
        },
        "the first token global": {
            "clearhead": lambda: ours(ids, global_mask=first).hidden,
            "transformers": lambda: (
                theirs(ids, attention_mask=whole, global_attention_mask=first.long()).last_hidden_state
            ),
            "linear layers alone": linear,
        },
    }
    results = []
    with torch.inference_mode():
        print(f"[{device_name()}, torch {torch.__version__}, transformers {transformers.__version__}]")
        for title, some in jobs.items():
            taken: dict[str, list[float]] = {name: [] for name in some}
            answers: dict[str, Tensor] = {}
            for _ in range(options.rounds):
                for name, job in some.items():
                    took, answers[name] = timed(job)
                    taken[name].append(took)
            gap = float((answers["clearhead"] - answers["transformers"]).abs().max())
            seconds = {name: statistics.median(times) for name, times in taken.items()}
            beyond = {name: took - seconds["linear layers alone"] for name, took in seconds.items()}
            row = {
                "title": title,
                "device": device_name(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "layers": options.layers,
                "length": options.length,
                "processor_seconds": {name: round(took, 2) for name, took in seconds.items()},
                "transformers_over_clearhead": round(seconds["transformers"] / seconds["clearhead"], 2),
                "transformers_over_linear_layers": round(
                    seconds["transformers"] / seconds["linear layers alone"], 2
                ),
                "beyond_linear_layers": round(beyond["transformers"] / beyond["clearhead"], 2),
                "largest_difference": gap,
            }
            results.append(row)
            print(f"{title}: {row['processor_seconds']}, largest difference {gap:.1e}\n  clearhead is "
                  f"{row['transformers_over_clearhead']} x; linear layers alone would be "
                  f"{row['transformers_over_linear_layers']} x; beyond them clearhead is "
                  f"{row['beyond_linear_layers']} x", flush=True)  # fmt: skip
    if options.save:
        save("longformer_cpu", results)


if __name__ == "__main__":
    main()
