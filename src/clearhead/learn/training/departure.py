"""What a finished run leaves beside its model: a card, and the adapter, where it trained low-rank updates."""

import importlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from shlex import quote
from typing import Any

from clearhead.hub.files import write_text
from clearhead.hub.peft import RankUpdate, write_adapter
from clearhead.hub.weights import open_tensors
from clearhead.learn.data.examples import Corpus, Images
from clearhead.learn.data.files import RECIPE
from clearhead.learn.recipe import BASE, Recipe, read_recipe
from clearhead.learn.tasks.task import Task
from clearhead.learn.training.events import CURVE
from clearhead.learn.training.loop import TrainingRun
from clearhead.learn.training.state import TENSORS
from clearhead.run.api import Model

ADAPTER, CARD = "adapter", "README.md"
SECTIONS = ("data", "tokens", "train", "generate", "parallel")
PICTURE = "example.png"  # written beside a model that reads pictures
LETTERS = {"generate": 16, "fill": 60}  # of the example, at most; a prompt is to be continued
USUAL = 200
SHORT = 100  # positions of a model that writes few tokens
_PLACE = re.compile("TEXT|IMAGE|QUESTION CONTEXT")


def leave_adapter(run: TrainingRun, chosen: Model, checkpoint: Path) -> None:
    """Write the low-rank updates of a checkpoint as PEFT's adapter of the run's base model.

    A head that was trained along is no part of an adapter: a run that has one leaves the merged model alone.
    """
    if not run.plan.lora or chosen.config.head != "lm" or not any(checkpoint.glob(f"{TENSORS}*")):
        return
    stored = open_tensors(checkpoint, TENSORS)
    prefix = "ema/" if run.ema is not None else "weights/"
    parts = {name.removeprefix(prefix): one for name, one in stored.items() if name.startswith(prefix)}
    layers = [name.removesuffix(".a") for name in parts if name.endswith(".a")]
    updates = {
        layer: RankUpdate(
            parts[f"{layer}.a"].read().clone(), parts[f"{layer}.b"].read().clone(), run.plan.lora_alpha
        )
        for layer in layers
    }
    base = read_recipe(run.folder / RECIPE).model.get(BASE)
    architecture = chosen.described().architecture
    write_adapter(run.folder / ADAPTER, updates, chosen.config, architecture, base)


# The card ---------------------------------------------------------------------------------------------------


def leave_card(run: TrainingRun, chosen: Model, metrics: Mapping[str, float], use: str) -> None:
    """Write what was trained, on what, how and how well, as the card that model hubs show: README.md."""
    recipe = read_recipe(run.folder / RECIPE)
    base = recipe.model.get(BASE)
    judged = {name: f"{value:.4g}" for name, value in metrics.items() if name != "step"}
    step = int(metrics.get("step", run.state.step))
    parts = [
        *("---", "library_name: clearhead", "tags:", f"- {run.task.name}", "---", ""),
        *(f"# {run.folder.name}", ""),
        f"A model for the task `{run.task.name}`, trained with clearhead for {run.state.step:,} steps"
        + ("." if base is None else f" from `{Path(str(base)).name}`."),
        *("", "## Model", "", *_rows(("", ""), chosen.facts.items(), without=("folder",)), ""),
        *("## Data", "", *(f"- `{Path(name).name}`" for name in recipe.data.paths or ("given in Python",))),
        *("", "Settings that are not the defaults:", "", *_rows(("setting", "value"), _changed(recipe)), ""),
        *("## Results", "", f"On the validation data, with the weights of step {step:,}:", ""),
        *_rows(("metric", "value"), judged.items()),
        *(("", f"![Loss by step]({CURVE})") if (run.folder / CURVE).is_file() else ()),
        *("", "## Use", "", "```bash", use and f"clearhead {use}", "```", ""),
    ]
    write_text(run.folder / CARD, "\n".join(parts))


def _changed(recipe: Recipe) -> Iterable[tuple[str, Any]]:
    """Yield the settings of a recipe that are not as usual; files by their names alone."""
    usual = Recipe()
    for section in SECTIONS:
        plan, other = getattr(recipe, section), getattr(usual, section)
        for one in fields(plan):
            value = getattr(plan, one.name)
            if value != getattr(other, one.name) and one.name not in ("paths", "validation", "model"):
                yield f"{section}.{one.name}", value
    yield from ((f"model.{name}", value) for name, value in recipe.model.items() if name != BASE)


def _rows(head: tuple[str, str], rows: Iterable[tuple[str, Any]], without: tuple[str, ...] = ()) -> list[str]:
    """Return a table of Markdown."""
    body = [
        f"| {name} | {str(value).replace('|', chr(92) + '|')} |"
        for name, value in rows
        if name not in without
    ]
    return [f"| {head[0]} | {head[1]} |", "| --- | --- |", *body]


# The command to try -----------------------------------------------------------------------------------------


def first_example(corpus: Corpus) -> Any:
    """Return the first example to validate on; of pictures, its pixels [H, W, C]."""
    given: Any = corpus.validation
    return given.pixels[0] if isinstance(given, Images) else next(iter(given), None)


def command_to_try(task: Task, example: Any, model: Model, folder: Path) -> str:
    """Return the command that uses a trained model, with this example in place of TEXT."""
    command = task.command.format(folder=quote(str(folder)))
    if task.tokens is None:
        return _PLACE.sub(lambda found: _picture(example, folder) or found[0], command)
    asked: tuple[str, ...] = getattr(example, "asked", tuple)()
    verb = command.split()[0]
    texts = [_shown(text, LETTERS.get(verb, USUAL)) for text in asked or example.texts()]
    if verb == "fill" and model.tokenizer is not None:
        mask = model.tokenizer.id_to_token(model.special["mask"])
        texts = [" ".join([*texts[0].split(" ")[:-1], str(mask)])]
    if not all(texts):
        return command
    arguments = (" " if asked else " --pair ").join(map(quote, texts))
    if verb == "generate" and model.max_length < SHORT:  # the usual number of new tokens does not fit
        arguments += f" --max-new-tokens {model.max_length // 3}"
    return _PLACE.sub(lambda found: arguments, command)


def _shown(text: str, most: int) -> str:
    """Return the beginning of a text on one line, cut between words, that is no option of a command."""
    line = " ".join(text.split()).lstrip("-").strip()
    return line if len(line) <= most else line[:most].rpartition(" ")[0] or line[:most]


def _picture(pixels: Any, folder: Path) -> str:
    """Write a picture beside the model; return its path, or "" without Pillow."""
    try:
        image = importlib.import_module("PIL.Image")
    except ImportError:
        return ""
    flat = pixels[..., 0] if pixels.shape[-1] == 1 else pixels
    image.fromarray(flat).save(folder / PICTURE)
    return quote(str(folder / PICTURE))
