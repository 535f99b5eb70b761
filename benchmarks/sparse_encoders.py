"""Encoders with sparse attention, at their base size: a forward pass here against transformers' own class.

    python benchmarks/sparse_encoders.py bigbird [--lengths 4096] [--layers 12] [--rounds 3] [--save]

Random weights, saved by transformers and read here; one row without padding. The two models take turns. Times
are processor time, all threads together, so that other work on the machine falls out. The largest difference
of a last state stands beside them.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import torch
import transformers
from torch import Tensor

import clearhead as ch
from common import alternate, report, save

# Their config, their model, and the options of the base size.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bigbird": ("BigBirdConfig", "BigBirdModel", {"block_size": 64, "num_random_blocks": 3}),
}


@torch.no_grad()
def compare(name: str, length: int, layers: int, rounds: int) -> dict[str, object]:
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

    def run_ours() -> None:
        answers["clearhead"] = ours(ids, logits="none").hidden

    def run_theirs() -> None:
        answers["transformers"] = theirs(ids).last_hidden_state

    seconds = alternate({"clearhead": run_ours, "transformers": run_theirs}, rounds, clock=time.process_time)
    gap = float((answers["clearhead"] - answers["transformers"]).abs().max())
    print(f"  largest difference of a state {gap:.1e}", flush=True)
    return {**report(f"{name}, {layers} layers, {length} tokens", seconds, length), "largest_difference": gap}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=CASES)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--layers", type=int, default=12, help="of the base size; all are alike")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    rows = [compare(options.name, length, options.layers, options.rounds) for length in options.lengths]
    if options.save:
        save(f"sparse_{options.name}", rows)


if __name__ == "__main__":
    main()
