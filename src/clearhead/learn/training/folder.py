"""The folder of a run: made for one run, locked while it is written, given back as it was on failure.

A finished run leaves a card with its model, and the adapter where it trained low-rank updates.
"""

import importlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields
from fnmatch import fnmatch
from pathlib import Path
from shlex import quote
from typing import Any

from clearhead.errors import CheckpointError, refuse
from clearhead.hub.files import LOCK, locked_folder, write_text
from clearhead.hub.peft import RankUpdate, write_adapter
from clearhead.hub.weights import open_tensors
from clearhead.learn.data.examples import Corpus, Images
from clearhead.learn.data.files import RECIPE
from clearhead.learn.data.given import ROWS
from clearhead.learn.parallel import launch, restarts
from clearhead.learn.recipe import BASE, Recipe, read_recipe
from clearhead.learn.tasks.task import Task
from clearhead.learn.training.events import CURVE, LOG, Note, OnEvent
from clearhead.learn.training.loop import TrainingRun
from clearhead.learn.training.state import BEST, CACHE, CHECKPOINTS, LAST, PRETRAIN, TENSORS, newest
from clearhead.run.api import Model

ADAPTER, CARD = "adapter", "README.md"
SECTIONS = ("data", "tokens", "train", "generate", "parallel")
PICTURE = "example.png"  # written next to a model that reads pictures
LETTERS = {"generate": 16, "fill": 60}  # of the example, at most; a prompt is to be continued
USUAL = 200
SHORT = 100  # positions of a model that writes few tokens
_PLACE = re.compile("TEXT|IMAGE|QUESTION CONTEXT")
LAUNCH = ".launch"  # the name of the launch of several processes that writes the folder
BEFORE = ".before"  # an earlier run, which waits for the first checkpoint of the one that replaces it
MOVING = ".moving"  # the same on its way in or out: what it holds belongs into the folder
OWN = (  # what a run writes
    *(RECIPE, CACHE, PRETRAIN, CHECKPOINTS, BEST, LAST, LOG, CURVE, PICTURE, *ROWS.values()),
    *(ADAPTER, CARD, "tensorboard", "*.safetensors", "*.index.json", "*config.json", "tokenizer.json"),
    *("chat_template.jinja", "modules.json", "1_Pooling", "samples.jsonl", ".*"),
)
CACHED = ("fingerprint", "*-train-*", "*-validation-*", ".*")  # what it writes into its cache


@contextmanager
def new_folder(
    folder: Path, overwrite: bool, needed: Iterable[Path], on_event: OnEvent
) -> Iterator[Callable[[], None]]:
    """Create and lock the folder of a new run.

    The folder must not exist, be empty or, with `overwrite`, hold nothing but an earlier run and none of the
    files `needed`. The function that is yielded keeps the new run; an error before it is called restores what
    was there.
    """
    folder = folder.resolve()
    with locked(folder, on_event), ExitStack() as undo:
        _check(folder, overwrite, needed)
        undo.callback(_put_back, folder)
        _move_away(folder)

        def keep() -> None:
            undo.pop_all()
            shutil.rmtree(folder / BEFORE, ignore_errors=True)

        yield keep


@contextmanager
def resumed_folder(folder: Path, on_event: OnEvent) -> Iterator[Path]:
    """Lock the folder of a run that is resumed."""
    none = f"{folder} holds no run that can be resumed: it needs {RECIPE} and a checkpoint"
    refuse(not folder.is_dir(), none, CheckpointError)
    with locked(folder, on_event):
        refuse(not (folder / RECIPE).is_file() or not resumable(folder), none, CheckpointError)
        yield folder


def mark(folder: Path) -> None:
    """Note which launch of several processes writes the folder: it goes on when they are restarted."""
    if (name := launch()) is not None:
        write_text(folder / LAUNCH, name)


def ours(folder: Path) -> bool:
    """Return True if these processes were restarted after a failure and have begun a run in the folder."""
    path = folder / LAUNCH
    return restarts() > 0 and path.is_file() and path.read_text() == launch() and resumable(folder)


def resumable(folder: Path) -> bool:
    """Return True if the folder holds a run with a checkpoint."""
    return newest(folder) is not None or newest(folder / PRETRAIN) is not None


# The lock ---------------------------------------------------------------------------------------------------


@contextmanager
def locked(folder: Path, on_event: OnEvent) -> Iterator[None]:
    """Hold the lock of a run's folder; refuse where another run holds it.

    A run that was killed while it took the place of an earlier one is undone, unless it has a checkpoint.
    """
    first_stage = folder.name == PRETRAIN and (folder.parent / RECIPE).is_file()
    whole = folder.parent if first_stage else folder
    with locked_folder(whole, "run", lambda line: on_event(Note(line))):
        if (whole / BEFORE).is_dir() and resumable(whole):
            shutil.rmtree(whole / BEFORE, ignore_errors=True)
        elif any((whole / name).is_dir() for name in (BEFORE, MOVING)):
            _put_back(whole)
        yield


# An earlier run ---------------------------------------------------------------------------------------------


def _move_away(folder: Path) -> None:
    """Move what is in the folder into `BEFORE`."""
    try:
        (folder / MOVING).mkdir()
        for path in _entries(folder):
            os.replace(path, folder / MOVING / path.name)
        os.replace(folder / MOVING, folder / BEFORE)
    except OSError as error:
        raise CheckpointError(f"cannot move the run in {folder}: {error.strerror}") from None


def _put_back(folder: Path) -> None:
    """Undo `_move_away`, whole or halfway, and remove what was written since; if killed, call it again."""
    with suppress(OSError):
        if (folder / BEFORE).is_dir():
            for path in _entries(folder):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            os.replace(folder / BEFORE, folder / MOVING)
        for path in (folder / MOVING).iterdir():
            os.replace(path, folder / path.name)
        (folder / MOVING).rmdir()


def _entries(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name not in (LOCK, BEFORE, MOVING)]


def _check(folder: Path, overwrite: bool, needed: Iterable[Path]) -> None:
    if not _entries(folder):
        return
    refuse(
        not (folder / RECIPE).exists(),
        f"{folder} is not empty and holds no run: name another folder with --out",
        CheckpointError,
    )
    refuse(
        not overwrite and resumable(folder),
        f"{folder} holds another run: go on with clearhead train --resume {quote(str(folder))}, "
        "or add --overwrite or another --out",
        CheckpointError,
    )
    refuse(
        not overwrite,
        f"{folder} holds a run that never began: add --overwrite, or name another --out",
        CheckpointError,
    )
    inside = next((path for path in needed if path.resolve().is_relative_to(folder)), None)
    refuse(inside is not None, f"{inside} lies in {folder}, which would be overwritten: name another --out")
    for place, own in ((folder, OWN), (folder / CACHE, CACHED)):
        for path in sorted(place.iterdir()) if place.is_dir() else ():
            refuse(
                not any(fnmatch(path.name, pattern) for pattern in own),
                f"{path} is no part of a run, and would be lost: move it away, or name another --out",
                CheckpointError,
            )


# What a finished run leaves ---------------------------------------------------------------------------------


def leave_adapter(run: TrainingRun, chosen: Model, checkpoint: Path) -> None:
    """Write the low-rank updates of a checkpoint as PEFT's adapter of the run's base model.

    A head that was trained along is no part of an adapter: a run that has one leaves the merged model alone,
    and so does one of a model that reads images.
    """
    joined = chosen.image_encoder is not None
    if not run.plan.lora or joined or chosen.config.head != "lm" or not any(checkpoint.glob(f"{TENSORS}*")):
        return
    stored = open_tensors(checkpoint, TENSORS)
    prefix = "ema/" if run.ema is not None else "weights/"
    parts = {name.removeprefix(prefix): tensor for name, tensor in stored.items() if name.startswith(prefix)}
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
        for setting in fields(plan):
            value = getattr(plan, setting.name)
            if value != getattr(other, setting.name) and setting.name not in ("paths", "validation", "model"):
                yield f"{section}.{setting.name}", value
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
    rows: Any = corpus.validation
    return rows.pixels[0] if isinstance(rows, Images) else next(iter(rows), None)


def command_to_try(task: Task, example: Any, model: Model, folder: Path) -> str:
    """Return the command that uses a trained model, with this example in place of TEXT."""
    command = task.command.format(folder=quote(str(folder)))
    if task.tokens is None:
        return _PLACE.sub(lambda match: _picture(example, folder) or match[0], command)
    inputs: tuple[str, ...] = example.asked()
    verb = command.split()[0]
    texts = [_shown(text, LETTERS.get(verb, USUAL)) for text in inputs or example.texts()]
    if verb == "fill" and model.tokenizer is not None:
        mask = model.tokenizer.id_to_token(model.special["mask"])
        texts = [" ".join([*texts[0].split(" ")[:-1], str(mask)])]
    if not all(texts):
        return command
    arguments = (" " if inputs else " --pair ").join(map(quote, texts))
    if verb == "generate" and model.max_length < SHORT:  # the usual number of new tokens does not fit
        arguments += f" --max-new-tokens {model.max_length // 3}"
    return _PLACE.sub(lambda match: arguments, command)


def _shown(text: str, most: int) -> str:
    """Return the beginning of a text on one line, cut between words, that is no option of a command."""
    line = " ".join(text.split()).lstrip("-").strip()
    return line if len(line) <= most else line[:most].rpartition(" ")[0] or line[:most]


def _picture(pixels: Any, folder: Path) -> str:
    """Write a picture next to the model; return its path, or "" without Pillow."""
    try:
        image = importlib.import_module("PIL.Image")
    except ImportError:
        return ""
    flat = pixels[..., 0] if pixels.shape[-1] == 1 else pixels
    image.fromarray(flat).save(folder / PICTURE)
    return quote(str(folder / PICTURE))
