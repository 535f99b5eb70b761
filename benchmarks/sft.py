"""Instruction tuning with low-rank updates, before and after, on held-out answers.

    python benchmarks/sft.py --data ../shared/data --weights smollm2/ --device cuda --out sft.json

`--data` holds `instructions/dolly_sample.jsonl.gz`; rows whose id is a multiple of ten are held out.
`--weights` is the directory of a chat model, such as SmolLM2-135M-Instruct. Measured: the loss on held-out
answers, and how often a request for a form is followed (one word, a number, a list of three lines, yes or no,
JSON), greedy.
`--tiny` takes few rows and steps, for a CPU.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import tempfile
from pathlib import Path

import clearhead as ch
from clearhead.learn.training.events import read_log

FORMS = {  # what is asked for, and how it is told whether the answer has that form
    "Answer with one word only: what is the capital of {x}?": lambda text: len(text.split()) == 1,
    "How many letters has the word {x}? Answer with a number only.": lambda text: text.rstrip(".").isdigit(),
    "List three facts about {x}, one a line, each beginning with a dash.": lambda text: (
        len(text.splitlines()) == 3 and all(line.startswith("-") for line in text.splitlines())
    ),
    "Is {x} a country? Answer only yes or no.": lambda text: text.lower().rstrip(".!") in ("yes", "no"),
    'Return only JSON of the form {{"name": ...}} for {x}.': lambda text: is_object(text),
}
PLACES = ("France", "Japan", "Brazil", "Egypt", "Canada", "Kenya", "Norway", "Peru", "India", "Chile")


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(re.sub(r"^```(json)?|```$", "", text).strip()), dict)
    except ValueError:
        return False


def forms(model: ch.Model, places: tuple[str, ...]) -> dict[str, float]:
    """The share of requests for a form that are followed, of each kind and of all."""
    found = {}
    for asked, fits in FORMS.items():
        texts = [
            model.chat([{"role": "user", "content": asked.format(x=place)}], 80).text for place in places
        ]
        found[asked] = sum(bool(fits((text or "").strip())) for text in texts) / len(places)
    return {**found, "all": sum(found.values()) / len(found)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", default="sft-lora")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    given = parser.parse_args()
    with gzip.open(given.data / "instructions" / "dolly_sample.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    rows = rows[:60] if given.tiny else rows
    sides = {
        side: [row for row in rows if (row["id"] % 10 == 0) == (side == "held")] for side in ("train", "held")
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for side, some in sides.items():
            (folder / f"{side}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
        places = PLACES[:1] if given.tiny else PLACES
        settings = {
            "model.base": given.weights, "train.device": given.device, "train.seed": given.seed,
            "train.samples": 2, "data.validation": str(folder / "held.jsonl"),
            **dict(one.split("=", 1) for one in given.set),
        }  # fmt: skip
        tiny = (
            ["train.steps=2", "data.max_length=128", "data.batch_size=1", "train.samples=0"]
            if given.tiny
            else []
        )
        before = measured(
            ch.load(given.weights, dtype="float32", device=given.device), folder, places, given.tiny
        )
        print("before", before, flush=True)
        ch.train(
            folder / "train.jsonl", recipe=given.recipe, out=folder / "run",
            settings=[*(f"{key}={value}" for key, value in settings.items()), *(tiny if given.tiny else ())],
            on_event=print,
        )  # fmt: skip
        after = measured(ch.load(folder / "run", device=given.device), folder, places, given.tiny)
        print("after", after, flush=True)
        body = {
            "rows": {side: len(some) for side, some in sides.items()}, "seed": given.seed,
            "recipe": given.recipe, "before": before, "after": after, "curve": read_log(folder / "run"),
        }  # fmt: skip
        given.out.write_text(json.dumps(body, indent=2) + "\n")


def measured(model: ch.Model, folder: Path, places: tuple[str, ...], tiny: bool) -> dict[str, object]:
    plan = ch.read_recipe(None, ["data.task=chat", f"data.max_length={128 if tiny else 1024}"]).data
    judged = ch.evaluate(model, folder / "held.jsonl", plan, batch_size=2 if tiny else 8)
    loss = {
        "loss": judged.metrics["loss"],
        "interval": judged.intervals.get("loss"),
        "targets": judged.targets,
    }
    return {**loss, "forms": forms(model, places)}


if __name__ == "__main__":
    main()
