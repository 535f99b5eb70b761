"""Analyses: one row each, from which its command, JSON, tables and picture, and its views on the page follow.

A row names a function. Its typed signature gives the arguments of the command, those before `*` without a
flag; its docstring gives the help of each, under `Args:`, and the examples. It returns a `View`. `--json`,
`--plot`, `--ids` and the options of loading a model are added by `commands.common.command_of`. An analysis of
one prompt is shown by the page too, as the command prints and draws it.

`clearhead --help` reads this file: it imports no library.
"""

from __future__ import annotations

import importlib
import inspect
import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from clearhead.errors import InputError, MissingExtraError, nearest

if TYPE_CHECKING:
    import clearhead as ch

Prompt = (
    Any  # in a signature: what the model reads, a text, an image file or token ids; on the page, the run's
)
Repeated = tuple[str, ...]  # in a signature: an option that may be given several times
OnProgress = Callable[[str, int, int], None]  # in a signature: not an option; told (stage, done, total)


class Analysis(NamedTuple):
    """One row: what `clearhead --help` says, the function, the options it has, its own views on the page."""

    summary: str
    target: str  # "module:function" in clearhead.app
    plot: bool = True  # it can be drawn: --plot
    loads: tuple[str, ...] = ()  # options of loading the model, beside its directory
    page: Mapping[str, str] = {}  # by the first word of a path: "module:function" in clearhead.app.explorer

    @property
    def function(self) -> Callable[..., View]:
        """The function of the analysis."""
        function: Callable[..., View] = imported(f"clearhead.app.{self.target}")
        return function

    @property
    def parameters(self) -> list[inspect.Parameter]:
        """The parameters of the function; annotations are text."""
        return list(inspect.signature(self.function).parameters.values())


TOKENIZER = ("tokenizer",)
PLACED = ("tokenizer", "device")
ANALYSES: dict[str, dict[str, Analysis]] = {  # by the group of the command
    "train": {
        "eval": Analysis(
            "measure a model on data it has not seen", "commands.train:evaluate", loads=("device", "dtype")
        ),
        "long": Analysis(
            "measure a language model on long contexts",
            "commands.measure:long",
            loads=("tokenizer", "device", "dtype"),
        ),
    },
    "look inside": {
        "tokens": Analysis(
            "see how a text becomes tokens",
            "commands.prompts:tokens",
            plot=False,
            page={"stages": "views:PageRun.stages"},
        ),
        "trace": Analysis(
            "follow the forward pass, step by step",
            "commands.prompts:trace",
            plot=False,
            loads=TOKENIZER,
            page={"trace": "views:PageRun.trace", "step": "views:PageRun.step"},
        ),
        "attention": Analysis(
            "see where each head looks",
            "commands.prompts:attention",
            loads=TOKENIZER,
            page={
                "attention": "views:PageRun.attention",
                "thumbnails": "views:PageRun.thumbnails",
                "rollout": "views:PageRun.rollout",
                "stops": "views:PageRun.stops",
                "looks": "views:PageRun.looks",
            },
        ),
        "heads": Analysis("find out what each head does", "commands.learned:heads", loads=PLACED),
        "lens": Analysis(
            "see what the model would say after each layer",
            "commands.prompts:lens",
            loads=TOKENIZER,
            page={
                "lens": "views:PageRun.lens",
                "said": "views:PageRun.said",
                "followed": "views:PageRun.followed",
                "next": "views:PageRun.next",
                "contributions": "views:PageRun.contributions",
                "paths": "views:PageRun.paths",
            },
        ),
        "memories": Analysis(
            "see what fires each neuron, and what it promotes",
            "commands.learned:memories",
            page={"neurons": "interventions:neurons"},
        ),
        "geometry": Analysis(
            "see where words and positions stand",
            "commands.learned:geometry",
            page={"map": "interventions:word_map", "similar": "interventions:similar"},
        ),
        "probe": Analysis("measure what can be read off each layer", "commands.learned:probe", loads=PLACED),
        "patch": Analysis(
            "find the layer and token that carry the answer",
            "commands.prompts:patch",
            loads=TOKENIZER,
            page={"patch": "interventions:patches"},
        ),
        "ablate": Analysis(
            "see what a model does without some of its parts",
            "commands.parts:ablate",
            page={"effects": "interventions:effects", "occlusion": "interventions:occluded"},
        ),
        "prune": Analysis("remove heads, and save the smaller model", "commands.parts:prune"),
    },
    "prove": {
        "check": Analysis(
            "run the equality suite on a model, here", "commands.measure:check", plot=False, loads=("device",)
        ),
    },
    "models": {
        "cost": Analysis(
            "count parameters, FLOPs and memory from a config", "commands.measure:cost", plot=False
        ),
        "bench": Analysis(
            "time a model here, next to what else is installed",
            "commands.measure:bench",
            loads=("tokenizer", "device", "dtype", "quantize"),
        ),
        "plan": Analysis("find the mesh of devices to train a model on", "commands.measure:plan"),
        "quantize": Analysis(
            "round weights to 8 or 4 bits, and say what that cost", "commands.parts:quantize", loads=PLACED
        ),
    },
}
ROWS = {name: row for rows in ANALYSES.values() for name, row in rows.items()}


@dataclass(frozen=True)
class View:
    """What an analysis gives: the JSON object, what is printed, a picture, and notes for stderr."""

    result: Any  # with `to_dict`, or the JSON object itself
    parts: Iterable[Any] = ()  # tables and lines, in order; a generator is not run for --json
    draw: Callable[[], Any] | None = None  # makes the figure
    notes: Iterable[str] = ()
    width: int = 0  # columns to use, even where the terminal has fewer
    exit_code: int = 0

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object."""
        return dict(self.result if isinstance(self.result, Mapping) else self.result.to_dict())


class ModelArgument:
    """The model that a command names; calling it loads it, once other arguments are checked."""

    def __init__(self, folder: Path, load: Callable[[], ch.Model]) -> None:
        self.folder, self._load = folder, load

    def __call__(self) -> ch.Model:
        """Return the model."""
        return self._load()

    @property
    def name(self) -> str:
        """The name of its directory."""
        return self.folder.resolve().name

    def __str__(self) -> str:
        return str(self.folder)


def imported(target: str) -> Any:
    """Return the function that "module:function" or "module:Class.method" names."""
    module, _, names = target.partition(":")
    found = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found


def drawing(target: str, *shown: Any) -> Callable[[], Any]:
    """Return a function that draws: "module:function" of `clearhead.app.plot`, imported when called."""
    return lambda: imported(f"clearhead.app.plot.{target}")(*shown)


# The page ---------------------------------------------------------------------------------------------------


def of_prompts() -> dict[str, str]:
    """Return the analyses of one prompt by name, each with its summary: the page shows them as they are."""
    needed = {
        name: [one.annotation for one in row.parameters if one.default is one.empty]
        for name, row in ROWS.items()
    }
    prompt = ["ModelArgument", "Prompt"]
    return {name: ROWS[name].summary for name, annotations in needed.items() if annotations == prompt}


def prompt_view(run: Any, name: str) -> dict[str, Any]:
    """Return an analysis of the prompt of a page's run: its tables and lines, and its picture as SVG."""
    if name not in of_prompts():
        raise InputError(
            f'no analysis of a prompt is called "{name[:40]}": there are {", ".join(of_prompts())}'
        )
    function = ROWS[name].function
    view = function(ModelArgument(run.m.folder or Path("model"), lambda: run.m), run.prepared)
    return {
        "name": name,
        "summary": ROWS[name].summary,
        "parts": [_plain_part(part) for part in view.parts],
        "picture": None if view.draw is None else _svg(view.draw),
    }


def _plain_part(part: Any) -> Any:
    """Return a line, or a table as its title, headings, rows and caption."""
    from rich.table import Table

    if not isinstance(part, Table):
        return str(part)
    return {
        "title": str(part.title or ""),
        "headings": [str(column.header) for column in part.columns],
        "rows": [[str(cell) for cell in row] for row in zip(*(column.cells for column in part.columns))],
        "caption": str(part.caption or ""),
    }


def _svg(draw: Callable[[], Any]) -> str | None:
    """Return a figure as SVG; None where matplotlib is not installed."""
    try:
        figure = draw()
    except MissingExtraError:
        return None
    file = io.StringIO()
    figure.savefig(file, format="svg")
    return file.getvalue()


def page_view(run: Any, path: str) -> Any:
    """Return a view of a page's run by its path: "trace", "attention/self/3", "next?position=4".

    The words after the first are the parameters that need a value, the query those that have one. Numbers
    that are not finite become null.
    """
    from clearhead.app.explorer.views import finite

    name, _, query = path.partition("?")
    stated = dict(part.split("=", 1) for part in query.split("&") if "=" in part)
    kind, *words = name.split("/")
    if kind == "analysis" and words:
        return finite(prompt_view(run, words[0]))
    targets = {word: target for row in ROWS.values() for word, target in row.page.items()}
    function = imported(f"clearhead.app.explorer.{targets[kind]}") if kind in targets else None
    taken = list(inspect.signature(function).parameters.values())[1:] if function else []
    needed = [one for one in taken if one.default is one.empty]
    if function is None or len(words) < len(needed):
        raise InputError(
            f'there is no view "{path[:80]}"{nearest(kind, targets)}: views are {", ".join(targets)}'
        )
    texts = {one.name: word for one, word in zip(needed, words)}
    texts |= {one.name: stated[one.name] for one in taken if one.name in stated and one not in needed}
    kinds = {one.name: str(one.annotation) for one in taken}
    return finite(function(run, **{name: _read(kinds[name], text) for name, text in texts.items()}))


def _read(kind: str, text: str) -> Any:
    """Return what a word of a path states: a whole number, a list of them, or text."""
    try:
        if kind == "list[int]":
            return [int(part) for part in text.split(",")]
        return int(text) if kind.startswith("int") else text
    except ValueError:
        raise InputError(f'"{text[:40]}" is no whole number') from None
