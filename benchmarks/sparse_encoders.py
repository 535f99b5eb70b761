"""Encoders with sparse attention, at their base size: a forward pass here against transformers' own class.

    python benchmarks/sparse_encoders.py longformer [--lengths 4096] [--layers 12] [--rounds 2] [--save]

Random weights, saved by transformers and read here; one row without padding, float32, both as they are
loaded. Longformer has a window of 512 and stands twice, without global tokens and with the first one global;
`bigbird` has blocks of 64. The two models take turns. Times are processor time, all threads together, so that
other work on the machine falls out. Beside them stands the time of the linear layers alone, which both leave
to the same library: no attention, however quick, could be faster than that, so `at_most` is the most by which
anything that computes them in float32 could be quicker than transformers. The largest difference of a last
state is given too.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import clearhead as ch
from common import alternate, report, save

LINEAR = "linear layers alone"
# Their config, their model, and the options of the base size.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bigbird": ("BigBirdConfig", "BigBirdModel", {"block_size": 64, "num_random_blocks": 3}),
    "longformer": (
        "LongformerConfig",
        "LongformerModel",
        {"vocab_size": 50265, "type_vocab_size": 1, "attention_window": 512, "max_position_embeddings": 4098},
    ),
}


def linear_layers(layers: int, length: int) -> Callable[[], None]:
    """A job of the products of the base size alone: four of attention and two of the feed-forward a layer."""
    states = torch.randn(length, 768), torch.randn(length, 3072)
    square, up, down = nn.Linear(768, 768), nn.Linear(768, 3072), nn.Linear(3072, 768)

    def job() -> None:
        for _ in range(layers):
            for _ in range(4):
                square(states[0])
            up(states[0])
            down(states[1])

    return job


@torch.inference_mode()
def compare(
    name: str, length: int, layers: int, rounds: int, warm: int, first_global: bool
) -> dict[str, object]:
    """Time both models on the same ids."""
    config_name, model_name, options = CASES[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**options, num_hidden_layers=layers)
    theirs = getattr(transformers, model_name)(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = ch.load(folder).model
    ids = torch.randint(100, theirs.config.vocab_size, (1, length))
    answers: dict[str, Tensor] = {}
    marked = torch.zeros_like(ids, dtype=torch.bool)
    marked[:, 0] = first_global
    to_ours = {"global_mask": marked} if name == "longformer" else {}
    to_theirs = {"global_attention_mask": marked.long()} if first_global else {}

    def run_ours() -> None:
        answers["clearhead"] = ours(ids, logits="none", **to_ours).hidden

    def run_theirs() -> None:
        answers["transformers"] = theirs(ids, attention_mask=torch.ones_like(ids), **to_theirs)[0]

    jobs = {"clearhead": run_ours, "transformers": run_theirs, LINEAR: linear_layers(layers, length)}
    seconds = alternate(jobs, rounds, warm, clock=time.process_time)
    gap = float((answers["clearhead"] - answers["transformers"]).abs().max())
    which = ", the first token global" if first_global else ""
    row = report(f"{name}, {layers} layers, {length} tokens{which}", seconds, length)
    shares = {one: round(seconds[LINEAR] / seconds[one], 3) for one in ("clearhead", "transformers")}
    beyond = {one: seconds[one] - seconds[LINEAR] for one in shares}
    figures = {
        "transformers": transformers.__version__,
        "processor_seconds": {one: round(took, 2) for one, took in seconds.items()},
        "share_of_linear_layers": shares,
        "at_most": round(seconds["transformers"] / seconds[LINEAR], 2),
        "beyond_linear_layers": round(beyond["transformers"] / beyond["clearhead"], 2),
        "largest_difference": gap,
    }
    print("  " + ", ".join(f"{one} {value}" for one, value in figures.items()), flush=True)
    return {**row, **figures}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=CASES)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096])
    parser.add_argument("--layers", type=int, default=12, help="of the base size; all are alike")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--warm", type=int, default=1, help="rounds before those that count")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    rows = [
        compare(options.name, length, options.layers, options.rounds, options.warm, first_global)
        for length in options.lengths
        for first_global in ((False, True) if options.name == "longformer" else (False,))
    ]
    if options.save:
        save(f"sparse_{options.name}", rows)


if __name__ == "__main__":
    main()
