"""The command to try after training, with an example from the data, so that it works as printed."""

import importlib
import re
from pathlib import Path
from shlex import quote
from typing import Any

from clearhead.learn.data.examples import Corpus, Images
from clearhead.learn.tasks.task import Task
from clearhead.run.api import Model

PICTURE = "example.png"  # written beside a model that reads pictures
LETTERS = {"generate": 16, "fill": 60}  # of the example, at most; a prompt is to be continued
USUAL = 200
_PLACE = re.compile("TEXT|IMAGE|QUESTION CONTEXT")


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
