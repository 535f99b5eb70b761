"""The options of `clearhead generate` and `clearhead chat`: the declared options of a request, in groups.

An option is None, and then the model's own, where generation_config.json may state it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, make_dataclass
from typing import Annotated, Any, get_args

from tyro.conf import OmitArgPrefixes

from clearhead.app.commands.common import option
from clearhead.errors import InputError, hints_of
from clearhead.run.generate.request import DEFAULTS, GROUPS, OPTIONS, Request

TYPES: dict[str, Any] = {  # as they are typed
    **{"stop_tokens": tuple[str, ...], "json_schema": str | None, "logit_bias": tuple[str, ...]}
}
METAVARS = {"logit_bias": "ID=BIAS"}
_UNPREFIXED: Any = get_args(OmitArgPrefixes[int])[1]  # flags of a group without its name in front


def _biases(texts: Sequence[str]) -> dict[int, float]:
    """Read ID=BIAS, such as 50256=-100, for each token."""
    biases = {}
    for text in texts:
        token, _, bias = text.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise InputError(f"--logit-bias {text}: give ID=BIAS, such as 50256=-100") from None
    return biases


def _entry(name: str) -> tuple[str, Any, Any]:
    """Return the flag of one option, as a field of a dataclass."""
    stated, default, hint = OPTIONS[name], DEFAULTS[name], TYPES.get(name, hints_of(Request)[name])
    words, named = stated.help, {"name": stated.flag or None, "metavar": METAVARS.get(name)}
    if stated.own and default not in (None, ()):
        words, default, hint = f"{words}; default: the model's own, else {default}", None, hint | None
    return name, Annotated[hint, option(words, **named)], field(default=default)


def _group(name: str) -> Any:
    """Return a dataclass of the options of one group."""
    entries = [_entry(key) for key, stated in OPTIONS.items() if stated.group == name]
    return make_dataclass(name, entries, frozen=True, kw_only=True, namespace={"__doc__": GROUPS[name]})


_CLASSES = {name: _group(name) for name in GROUPS}
_DEFAULTS = {name: value for group in _CLASSES.values() for name, value in vars(group()).items()}


class _Grouped:
    """What `GroupedRequest` can do."""

    def given(self) -> dict[str, Any]:
        """Return the options that differ from their defaults."""
        values = {name: value for group in vars(self).values() for name, value in vars(group).items()}
        given = {name: value for name, value in values.items() if value != _DEFAULTS[name]}
        return given | {name: _biases(given[name]) for name in given.keys() & {"logit_bias"}}


GroupedRequest: Any = make_dataclass(
    "GroupedRequest",
    [(name, Annotated[kind, _UNPREFIXED], field(default=kind())) for name, kind in _CLASSES.items()],
    bases=(_Grouped,),
    frozen=True,
    kw_only=True,
)


def options_with(**defaults: Any) -> Any:
    """Return the options of a request, with other defaults of some fields."""
    groups = {
        name: kind(**{key: defaults[key] for key in vars(kind()) if key in defaults})
        for name, kind in _CLASSES.items()
    }
    return GroupedRequest(**groups)
