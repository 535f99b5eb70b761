"""The exceptions clearhead raises for mistakes a user can mend.

Each carries one line: what was wrong, the value, what is allowed, and the way out. The command line prints
that line and exits with code 2; library users catch `ClearheadError`.
"""

import difflib
from collections.abc import Iterable


class ClearheadError(Exception):
    """Base of every error that is about the user's input rather than a fault of the program."""


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


def refuse(mistake: object, message: str, error: type[ClearheadError] = InputError) -> None:
    """Raise an error with this one line if a mistake was made."""
    if mistake:
        raise error(message)


def nearest(name: str, known: Iterable[str]) -> str:
    """' (did you mean "x"?)' for the known name closest to `name`, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f' (did you mean "{close[0]}"?)' if close else ""
