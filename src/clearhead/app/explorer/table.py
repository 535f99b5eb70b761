"""The views of a run by their paths: "trace", "attention/self/3", "next?position=4"."""

from collections.abc import Callable
from typing import Any

from clearhead.app.explorer import atlas
from clearhead.app.explorer.pack import finite
from clearhead.app.explorer.views import PageRun
from clearhead.app.explorer.worth import map_view, neurons_view, occlusion_view, similar_view
from clearhead.errors import InputError, nearest


def whole(text: str) -> int:
    """Return the whole number that a text states."""
    try:
        return int(text)
    except ValueError:
        raise InputError(f'"{text[:40]}" is no whole number') from None


def whole_numbers(text: str) -> list[int]:
    """Return the whole numbers that a text states, with commas between them."""
    return [whole(part) for part in text.split(",")]


ASKED: dict[str, str | None] = {"position": "-1", "token": None, "against": None}
# By the first word of a path: the view, what the further words are, and the options with their defaults.
VIEWS: dict[str, tuple[Callable[..., Any], tuple[Callable[[str], Any], ...], dict[str, str | None]]] = {
    "stages": (PageRun.stages, (), {}),
    "trace": (PageRun.trace, (), {}),
    "step": (PageRun.step, (str,), {}),
    "attention": (PageRun.attention, (str, whole), {"head": None}),
    "thumbnails": (PageRun.thumbnails, (str,), {}),
    "rollout": (PageRun.rollout, (str,), {}),
    "lens": (PageRun.lens, (), {"first": None, "count": None}),
    "said": (PageRun.said, (whole_numbers,), {}),
    "next": (PageRun.next, (), {"position": "-1"}),
    "contributions": (PageRun.contributions, (), ASKED),
    "paths": (PageRun.paths, (), ASKED),
    "effects": (atlas.effects, (str,), {"position": "-1"}),
    "patch": (atlas.patches, (str, str), ASKED),
    "followed": (atlas.followed_view, (whole,), {"first": None, "count": None}),
    "occlusion": (occlusion_view, (), {"position": "-1", "token": None}),
    "similar": (similar_view, (), {}),
    "neurons": (neurons_view, (), ASKED),
    "map": (map_view, (), {"position": "-1"}),
    "stops": (PageRun.stops, (str, whole), {}),
    "looks": (PageRun.looks, (str, whole, whole), {}),
}


def view(run: PageRun, path: str) -> Any:
    """Return a view of a run by its path: "trace", "attention/self/3", "next?position=4".

    Numbers that are not finite become null.
    """
    name, _, query = path.partition("?")
    stated = dict(part.split("=", 1) for part in query.split("&") if "=" in part)
    kind, *words = name.split("/")
    if kind not in VIEWS or len(words) < len(VIEWS[kind][1]):
        raise InputError(
            f'there is no view "{path[:80]}"{nearest(kind, VIEWS)}: views are {", ".join(VIEWS)}'
        )
    make, places, defaults = VIEWS[kind]
    texts = {option: stated.get(option, default) for option, default in defaults.items()}
    options = {option: None if text is None else whole(text) for option, text in texts.items()}
    return finite(make(run, *(read(word) for read, word in zip(places, words)), **options))
