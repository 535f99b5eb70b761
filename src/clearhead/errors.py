"""The exceptions clearhead raises for mistakes a user can mend.

Each carries one line: what was wrong, the value, what is allowed, and the way out. The command line prints
that line and exits with code 2; library users catch `ClearheadError`.
"""

import difflib
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

LONGEST = 1500  # characters of a message
CONTROL = {code: ascii(chr(code))[1:-1] for code in (*range(32), 127)}  # shown as escapes


class ClearheadError(Exception):
    """Base of every error that is about the user's input rather than a fault of the program."""

    def __str__(self) -> str:
        """Return one line that any terminal prints, whatever the names that a file brought into it."""
        text = super().__str__()
        shown = text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"
        return shown.translate(CONTROL).encode("utf-8", "backslashreplace").decode("utf-8")


class ConfigError(ClearheadError, ValueError):
    """A model description that cannot be built."""


class InputError(ClearheadError, ValueError):
    """A tensor, text or option that the model at hand cannot take."""


class CheckpointError(ClearheadError, ValueError):
    """A model directory that cannot be read or written."""


class TrainingError(ClearheadError, RuntimeError):
    """A run that cannot continue: its loss is not finite, or its data has changed."""


class MissingExtraError(ClearheadError, ImportError):
    """An optional dependency that this action needs."""


class BusyError(ClearheadError, RuntimeError):
    """A server that takes no more requests now."""


def refuse(mistake: object, message: str, error: type[ClearheadError] = InputError) -> None:
    """Raise an error with this one line if a mistake was made."""
    if mistake:
        raise error(message)


def nearest(name: str, known: Iterable[str]) -> str:
    """' (did you mean "x"?)' for the known name closest to `name`, or an empty string."""
    names = list(known)
    close = [name] if name in names else difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f' (did you mean "{close[0]}"?)' if close else ""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, at most 200 characters; without one, its class."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def no_model(path: Path) -> str:
    """Return why a path names no model, and the way out; a .pt file is perhaps a Whisper of OpenAI's."""
    if path.suffix == ".pt" and path.is_file():
        folder, vocabulary = path.with_suffix(""), "gpt2" if ".en" in path.stem else "multilingual"
        command = shlex.join(["clearhead", "convert", str(path), f"{folder}/", "--tokenizer"])
        return (
            f"{path} is not a model directory: make one of OpenAI's Whisper file by "
            f"`{command} {vocabulary}.tiktoken`, with the vocabulary from whisper/assets in OpenAI's package"
        )
    return (
        f"{path} is not a directory: name a model directory or a GGUF file; one from the Hub is fetched by "
        f"`hf download {path} --local-dir DIR`"
    )


@contextmanager
def refusing(wrong: str, error: type[ClearheadError] = InputError) -> Iterator[None]:
    """Raise what a library raises as one line after `wrong`: a panic of the tokenizers library, too.

    A panic is no `Exception`, and its class cannot be imported.
    """
    try:
        yield
    except ClearheadError:
        raise
    except BaseException as raised:
        if not isinstance(raised, Exception) and type(raised).__name__ != "PanicException":
            raise
        raise error(f"{wrong}: {first_line(raised)}") from None
