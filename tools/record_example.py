"""Write the example that the explorer paints while a model loads: a small GPT, trained on an embedded corpus.

python tools/record_example.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import clearhead as ch
from clearhead.app.explorer.record import record
from clearhead.app.explorer.session import named_roles

TARGET = Path(__file__).parent.parent / "src" / "clearhead" / "app" / "explorer" / "static" / "example.json"
TEXT = "Return the name of the"
SETTINGS = [
    "model.n_layers=3",
    "model.n_heads=4",
    "model.d_model=64",
    "model.max_positions=64",
    "train.steps=900",
    "train.validate_every=900",
    "data.batch_size=24",
]


def main() -> None:
    """Train, record, write."""
    with tempfile.TemporaryDirectory() as folder:
        m = ch.train(
            "stdlib-docs",
            recipe="char-gpt-cpu",
            out=Path(folder) / "example",
            settings=SETTINGS,
            overwrite=True,
        ).model
    body = record(m, "an example: a GPT of characters", TEXT, roles=named_roles(m))
    body["says"] = "A recorded example, while the model loads"
    TARGET.write_text(json.dumps(body, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{TARGET.name}: {TARGET.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
