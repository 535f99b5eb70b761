"""Train a ladder of language models on books, predict a model four times as large, then train it.

    python benchmarks/scaling.py DATA [--seeds 1] [--device cuda] [--workers 4] [--save]
    python benchmarks/scaling.py --small [--workers 2] [--save]

DATA is a folder with train.txt.gz and test.txt.gz. The text is read as bytes, each of them once. With --small
the text is the corpus that comes with clearhead and the ladder one for two cores. The prediction is printed
before the larger model is trained. With --save the numbers go to results/scaling_NAME.json and the pictures
to docs/images/.
"""

from __future__ import annotations

import argparse
import gzip
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from clearhead.app.plot import save as save_picture
from clearhead.labs.lab.extrapolation import LARGER, RUNGS, draw_budgets, draw_law, embedded
from clearhead.labs.lab.scaling import ladder, predict, train_ladder
from common import device_name, processor_name, save

IMAGES = Path(__file__).parents[1] / "docs" / "images"
LARGE = ladder(
    sizes=((2, 48), (2, 64), (3, 80), (3, 112), (4, 144)),
    tokens=(1_850_000, 3_700_000, 7_400_000, 14_800_000),
    beyond=(6, 240),
    rows=32,
)


def read(path: Path) -> torch.Tensor:
    """Return the bytes of a file."""
    return torch.from_numpy(np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8).copy())


def main() -> None:
    """Climb the ladder, predict, train, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="?", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=4, help="models trained at a time")
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    if not given.small and given.data is None:
        parser.error("name the folder of the text, or --small")
    device = "cpu" if given.small else given.device
    rungs, beyond = (RUNGS, LARGER) if given.small else LARGE
    if given.small:
        text, unseen = embedded()
    else:
        text, unseen = read(given.data / "train.txt.gz"), read(given.data / "test.txt.gz")
    start, points = time.perf_counter(), []
    for rung, point in train_ladder(rungs, text, unseen, 256, given.seeds, device, given.workers):
        points.append(point)
        took = time.perf_counter() - start
        shape = f"{rung.n_layers} x {rung.d_model}"
        print(
            f"{took:6.0f} s  {shape:>8}  N {point.weights:>9,}  D {point.tokens:>10,}  loss {point.loss:.4f}",
            flush=True,
        )
    weights, tokens = beyond.weights(256), points[-1].tokens
    before = predict(points, weights, tokens)
    print(before.law, before.by_size, f"the law of both: {before.law.loss(weights, tokens):.4f}", sep="\n")
    print(
        f"predicted at N {weights:,}, D {tokens:,}: {before.loss:.4f} ({before.low:.4f} to {before.high:.4f})"
    )
    ((_, trained),) = train_ladder([beyond], text, unseen, 256, given.seeds, device)
    error = trained.loss / before.loss - 1
    took = time.perf_counter() - start
    print(f"trained: {trained.loss:.4f}, {error:+.2%} of the prediction; {took:.0f} s in all")
    if given.save:
        name = "small" if given.small else "books"
        found = {
            "device": processor_name() if device == "cpu" else device_name(),
            "torch": torch.__version__,
            "seeds": given.seeds,
            "seconds": round(took),
            "points": [asdict(one) for one in points],
            "law": asdict(before.law),
            "by_size": None if before.by_size is None else asdict(before.by_size),
            "by_law": before.law.loss(weights, tokens),
            "predicted": {"loss": before.loss, "low": before.low, "high": before.high},
            "trained": asdict(trained),
            "error": error,
            "times_beyond": weights / max(one.weights for one in points),
        }
        save(f"scaling_{name}", [found])
        save_picture(draw_law(points, before, trained), IMAGES / f"scaling_{name}.png")
        save_picture(draw_budgets(points, before.law), IMAGES / f"scaling_{name}_budgets.png")


if __name__ == "__main__":
    main()
