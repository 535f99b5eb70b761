"""Commands: one row each, from which its options, JSON, tables and picture, and its views on the page follow.

A row names a function. Its typed signature gives the arguments of the command, those before `*` without a
flag; its docstring gives the help of each, under `Args:`, and the examples. Where it returns a `View`,
`--json`, `--plot`, `--ids` and the options of loading a model are added by `commands.common.command_of`. An
analysis of one prompt is shown by the page too, as the command prints and draws it.

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


class Command(NamedTuple):
    """One row: what `clearhead --help` says, the function, the options it has, its own views on the page."""

    summary: str
    target: str  # "module:function" in clearhead.app
    plot: bool = True  # its View can be drawn: --plot
    loads: tuple[str, ...] = ()  # options of loading the model, next to its directory
    page: Mapping[str, str] = {}  # by the first word of a path: "module:function" in clearhead.app.explorer

    @property
    def function(self) -> Callable[..., View | None]:
        """The function of the command."""
        function: Callable[..., View | None] = imported(f"clearhead.app.{self.target}")
        return function


def _of_run(*names: str) -> dict[str, str]:
    """Return the views of the page that are methods of `PageRun`, under their own names."""
    return {name: f"views:PageRun.{name}" for name in names}


TOKENIZER = ("tokenizer",)
PLACED = ("tokenizer", "device")
GROUPS: dict[str, dict[str, Command]] = {
    "train": {
        "demo": Command("take the tour: train, generate, look inside, check", "commands.models:demo"),
        "train": Command("train a model from your own files", "commands.train:train", plot=False),
        "watch": Command("show a training run on a page, live", "commands.train:watch_page"),
        "sweep": Command(
            "sweep hyperparameters: try many settings, keep the best run", "commands.train:sweep", plot=False
        ),
        "align": Command(
            "train CLIP or SigLIP from captioned pictures",
            "commands.train:align",
            plot=False,
            loads=("device",),
        ),
        "eval": Command(
            "measure a model on data it has not seen", "commands.train:evaluate", loads=("device", "dtype")
        ),
        "long": Command(
            "measure a language model on long contexts",
            "commands.measure:long",
            loads=("tokenizer", "device", "dtype"),
        ),
        "lab": Command(
            "run an experiment: train, measure, draw, conclude", "commands.models:lab", plot=False
        ),
    },
    "use": {
        "generate": Command(
            "continue a text", "commands.use:generate", page={"denoising": "interventions:denoising"}
        ),
        "chat": Command("talk with a model in the terminal", "commands.chat:chat"),
        "translate": Command("translate a text, with an encoder-decoder", "commands.use:translate"),
        "transcribe": Command("transcribe a sound file (speech recognition)", "commands.use:transcribe"),
        "classify": Command("classify a text, a pair of texts or an image", "commands.use:classify"),
        "predict": Command("predict a number for a text or a pair of texts", "commands.use:predict"),
        "tag": Command("tag each word of a text, and find the spans", "commands.use:tag"),
        "fill": Command("fill in the masked words of a text", "commands.use:fill"),
        "answer": Command("find the answer to a question in a text", "commands.retrieve:answer"),
        "embed": Command("embed a text or an image as a vector", "commands.use:embed"),
        "rerank": Command(
            "rerank texts by how well they answer a query",
            "commands.retrieve:rerank",
            plot=False,
            loads=("device",),
        ),
        "score": Command("score a text: log-probability and perplexity", "commands.use:score"),
        "index": Command("index the passages of files, for search", "commands.retrieve:index", plot=False),
        "search": Command("find the passages nearest to a query", "commands.retrieve:search"),
    },
    "serve": {
        "serve": Command("serve models over HTTP, as OpenAI's API", "commands.serve:serve"),
        "batch": Command("batch inference: answer a file of requests", "commands.serve:batch"),
    },
    "look inside": {
        "explore": Command("open the explorer: inspect a model in the browser", "commands.models:explore"),
        "tokens": Command(
            "tokenize a text, stage by stage", "commands.prompts:tokens", plot=False, page=_of_run("stages")
        ),
        "trace": Command(
            "follow the forward pass, step by step",
            "commands.prompts:trace",
            plot=False,
            loads=TOKENIZER,
            page=_of_run("trace", "step"),
        ),
        "attention": Command(
            "show the attention of each head",
            "commands.prompts:attention",
            loads=TOKENIZER,
            page=_of_run("attention", "thumbnails", "rollout", "stops", "looks"),
        ),
        "heads": Command("name the role of each attention head", "commands.learned:heads", loads=PLACED),
        "lens": Command(
            "logit lens: the prediction after each layer",
            "commands.prompts:lens",
            loads=TOKENIZER,
            page=_of_run("lens", "said", "followed", "next", "contributions", "paths", "reads"),
        ),
        "memories": Command(
            "show what activates each neuron, and what it promotes",
            "commands.learned:memories",
            page={"neurons": "interventions:neurons"},
        ),
        "features train": Command(
            "train sparse features (SAE, transcoder, crosscoder)",
            "commands.circuits:train",
            loads=("tokenizer", "device", "dtype"),
        ),
        "features show": Command(
            "show what activates features, and what they promote", "commands.circuits:show", loads=PLACED
        ),
        "geometry": Command(
            "map token and position embeddings",
            "commands.learned:geometry",
            page={"map": "interventions:word_map", "similar": "interventions:similar"},
        ),
        "probe": Command("train linear probes on each layer", "commands.learned:probe", loads=PLACED),
        "graph": Command(
            "attribution graph: the paths of parts that led to a token",
            "commands.circuits:graph",
            loads=TOKENIZER,
            page={"graph": "interventions:graph_of", "edge": "interventions:edge_test"},
        ),
        "patch": Command(
            "activation patching: which layer and token carry the answer",
            "commands.prompts:patch",
            loads=TOKENIZER,
            page={"patch": "interventions:patches"},
        ),
        "circuit": Command(
            "find the circuit behind an answer: edges between parts, tested",
            "commands.circuits:circuit",
            loads=PLACED,
        ),
        "ablate": Command(
            "ablate heads, layers and feed-forwards",
            "commands.parts:ablate",
            page={
                "effects": "interventions:effects",
                "story": "interventions:story",
                "occlusion": "interventions:occluded",
            },
        ),
        "prune": Command("prune heads, and save the smaller model", "commands.parts:prune"),
    },
    "prove": {
        "check": Command(
            "run the equality suite on a model, here", "commands.measure:check", plot=False, loads=("device",)
        )
    },
    "models": {
        "cost": Command(
            "count parameters, FLOPs and memory from a config", "commands.measure:cost", plot=False
        ),
        "bench": Command(
            "benchmark a model versus other installed programs",
            "commands.measure:bench",
            loads=("tokenizer", "device", "dtype", "quantize"),
        ),
        "plan": Command("plan distributed training: the fastest mesh, memory, time", "commands.measure:plan"),
        "quantize": Command(
            "quantize weights to int8 or int4, and measure the loss", "commands.parts:quantize", loads=PLACED
        ),
        "convert": Command(
            "save a model for Hugging Face, GGUF or ONNX", "commands.models:convert", plot=False
        ),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}


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
    value = importlib.import_module(module)
    for name in names.split("."):
        value = getattr(value, name)
    return value


def drawing(target: str, *shown: Any) -> Callable[[], Any]:
    """Return a function that draws: "module:function" of `clearhead.app.plot`, imported when called."""
    return lambda: imported(f"clearhead.app.plot.{target}")(*shown)


# The page ---------------------------------------------------------------------------------------------------


def of_prompts() -> dict[str, str]:
    """Return the analyses of one prompt by name, each with its summary: the page shows them as they are."""
    needed = {
        name: [param.annotation for param in _parameters(row.function) if param.default is param.empty]
        for name, row in GROUPS["look inside"].items()
    }
    prompt = ["ModelArgument", "Prompt"]
    return {name: COMMANDS[name].summary for name, annotations in needed.items() if annotations == prompt}


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def prompt_view(run: Any, name: str) -> dict[str, Any]:
    """Return an analysis of the prompt of a page's run: its tables and lines, and its picture as SVG."""
    if name not in of_prompts():
        raise InputError(
            f'no analysis of a prompt is called "{name[:40]}": there are {", ".join(of_prompts())}'
        )
    view = COMMANDS[name].function(ModelArgument(run.m.folder or Path("model"), lambda: run.m), run.prepared)
    assert view is not None
    return {
        "name": name,
        "summary": COMMANDS[name].summary,
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
    targets = {word: target for row in COMMANDS.values() for word, target in row.page.items()}
    function = imported(f"clearhead.app.explorer.{targets[kind]}") if kind in targets else None
    taken = _parameters(function)[1:] if function else []
    needed = [param for param in taken if param.default is param.empty]
    if function is None or len(words) < len(needed):
        raise InputError(
            f'there is no view "{path[:80]}"{nearest(kind, targets)}: views are {", ".join(targets)}'
        )
    texts = {param.name: word for param, word in zip(needed, words)}
    texts |= {
        param.name: stated[param.name] for param in taken if param.name in stated and param not in needed
    }
    kinds = {param.name: str(param.annotation) for param in taken}
    return finite(function(run, **{name: _read(kinds[name], text) for name, text in texts.items()}))


def _read(kind: str, text: str) -> Any:
    """Return what a word of a path states: a whole number, a list of them, or text."""
    try:
        if kind == "list[int]":
            return [int(part) for part in text.split(",")]
        return int(text) if kind.startswith("int") else text
    except ValueError:
        raise InputError(f'"{text[:40]}" is no whole number') from None
