"""The page's files, and a run recorded: every view that the page asks for, in one file that opens anywhere.

A long run is aggregated, so that the file stays small; the page says so. A notebook shows the same page in a
frame. The modules of the page are plain: static imports from files next to them, names at the top level that
no two files share. So one script is their concatenation in the order of their imports, without the import and
export words.
"""

import base64
import gzip
import hashlib
import html
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from clearhead.app.explorer.interventions import edge_tests
from clearhead.app.explorer.session import given_of
from clearhead.app.explorer.views import PageRun, begin, finite, model_view
from clearhead.app.views import page_view
from clearhead.core.transformer import Transformer
from clearhead.errors import CheckpointError, ClearheadError, InputError, refuse
from clearhead.hub.files import write_text
from clearhead.inside import names
from clearhead.inside.features.dictionary import Dictionary
from clearhead.inside.interventions import single_parts
from clearhead.run.api import Model
from clearhead.variants.costs import cost
from clearhead.variants.kinds import denoises

PATTERN_BYTES = 10_000_000  # of all patterns together, before base64
SMALLEST_SIDE = 16  # cells of a pattern, however many there are
LOGIT_BYTES = 3_000_000
STOP_NUMBERS = 300_000  # of all heads whose inside is recorded
EXAMPLE_PARAMETERS = 50_000_000  # of a model whose examples are recorded too
EXAMPLE_SHARE = 16  # of the bytes of the run itself, all examples together get one in so many
GRAPH_TESTED = 24  # edges of a graph, as many as the page shows at first
NAMED = 3  # heads of the path whose inside is recorded before any other
EXPLAINED = 12  # edges of the path whose reasons are recorded; of an example and of a long text, a quarter
BATCH_TOKENS = 100_000  # that interventions of a file may take: longer ones are left out
STEP_LAYERS = 2  # blocks whose numbers are recorded, step by step
Examples = Sequence[dict[str, Any]]
TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".json": "application/json",
}
ENTRY = "main.js"
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./([\w-]+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const|let)\b)", re.MULTILINE)
COST_LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)


# The page's files -------------------------------------------------------------------------------------------


@cache
def page_files(package: str = "clearhead.app.explorer") -> dict[str, tuple[str, str]]:
    """Return every file of a package's page by its name: text and type.

    A request can name one of these, and nothing else.
    """
    folder = resources.files(package) / "static"
    endings = {entry: "." + entry.name.rpartition(".")[2] for entry in folder.iterdir() if entry.is_file()}
    return {
        entry.name: (entry.read_text(encoding="utf-8"), TYPES[ending])
        for entry, ending in endings.items()
        if ending in TYPES
    }


@cache
def modules(name: str = ENTRY) -> tuple[str, ...]:
    """Return the names of a module and of all that it needs, each after those it imports."""
    needed = [each for imported in _IMPORT.findall(page_files()[name][0]) for each in modules(imported)]
    return tuple(dict.fromkeys([*needed, name]))


def script() -> str:
    """Return all modules as one."""
    bodies = {name: _EXPORT.sub("", _IMPORT.sub("", page_files()[name][0])) for name in modules()}
    return "\n".join(f"// {name}\n{body}" for name, body in bodies.items())


def single_file(record: dict[str, Any], notebook: bool = False) -> str:
    """Return the page with everything inside; the record is gzip in base64."""
    page, style, icon = (page_files()[name][0] for name in ("index.html", "style.css", "icon.svg"))
    code = f"\n{script()}"
    body = base64.b64encode(
        gzip.compress(json.dumps(record, separators=(",", ":")).encode(), mtime=0)
    ).decode()
    digest = base64.b64encode(hashlib.sha256(code.encode("utf-8")).digest()).decode()
    policy = (
        "default-src 'none'; img-src data: blob:; connect-src 'none'; base-uri 'none'; form-action 'none'; "
        f"script-src 'sha256-{digest}'; style-src 'unsafe-inline'"
    )
    head = [
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        f'<link rel="icon" href="data:image/svg+xml;base64,{base64.b64encode(icon.encode()).decode()}">',
        f"<style>{style}</style>",
    ]
    tail = [
        f'<script type="text/plain" id="record">{body}</script>',
        f'<script type="module">{code}</script>',
    ]
    page = re.sub(r"<link[^>]*>\n", "", page).replace('<script type="module" src="main.js"></script>\n', "")
    page = page.replace("</head>", "\n".join([*head, "</head>"]))
    page = page.replace("<body>", '<body data-notebook="">' if notebook else "<body>")
    return page.replace("</body>", "\n".join([*tail, "</body>"]))


def stored_record(page: str) -> dict[str, Any]:
    """Return the record in a page that `single_file` made."""
    match = re.search(r'<script type="text/plain" id="record">(.*?)</script>', page, re.DOTALL)
    refuse(match is None, "this page holds no record: it is none that clearhead explore --export wrote")
    assert match is not None
    record: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(match[1])))
    return record


# A recorded run ---------------------------------------------------------------------------------------------


def record(
    m: Model,
    name: str,
    given: Any,
    target: Any = None,
    pair: str | None = None,
    roles: dict[str, str] | None = None,
    examples: Examples = (),
    features: Sequence[Dictionary] = (),
) -> dict[str, Any]:
    """Run a model and return the run with all its views, as the page reads them from a file."""
    run = replace(begin(m, given, target, pair), roles=lambda: roles or {})
    run = replace(run, features=lambda: tuple(features))
    return record_run(run, name, examples=examples)


def record_run(
    run: PageRun, name: str, state: str = "", second: PageRun | None = None, examples: Examples = ()
) -> dict[str, Any]:
    """Return a run with all its views, as the page reads them from a file, and the selection it opens on.

    `second` is the run next to it, of a second text of the same model. `examples` are what `findings` gave;
    those of a small model are recorded too, and can be opened.
    """
    m = run.m
    heads = sum(attention.n_heads for attention in names.kinds_of(m.config))
    side = max(SMALLEST_SIDE, int((PATTERN_BYTES / 4 / max(heads, 1)) ** 0.5))
    small = replace(run, cells=min(run.cells, side * side), number=0)
    about = small.about("recorded")
    opened = Selected.of(about, state)
    views: dict[str, Any] = {
        "model": {**model_view(m, name), "recorded": True},
        "roles": {"ready": True, "roles": run.roles()},
    }
    views |= _views_of(small, about, opened)
    if second is not None and second.m is m:
        views |= _beside(small, replace(second, cells=small.cells, number=0), about, opened)
    early = _early_steps(views["run/recorded/trace"]["steps"])
    views |= {f"run/recorded/step/{name}": finite(body) for name, body in small.steps(early).items()}
    listed, more = _examples(small, examples)
    views |= {"examples": {"ready": True, "examples": listed}, **more}
    limit = m.config.max_positions if m.config.bounded else max(COST_LENGTHS)
    lengths = {len(run.prepared.tokens), *(length for length in COST_LENGTHS if length <= limit)}
    views |= {
        f"cost?length={length}": finite(
            cost(m.config, None if m.config.input == "patches" else length).to_dict()
        )
        for length in sorted(lengths)
    }
    cells = max(
        (body["aggregated"] for path, body in views.items() if "recorded/attention/" in path), default=1
    )
    says = "A recording: what was computed is here, nothing more is run."
    if cells > 1:
        says += f" Attention is shown in cells of {cells} tokens, so that the file stays small."
    return {"run": about, "views": views, "says": says, "state": state}


def _views_of(run: PageRun, about: dict[str, Any], opened: "Selected", share: int = 1) -> dict[str, Any]:
    """Return the views of one run by their paths, but for the numbers of steps.

    Of several runs each gets its share of the bytes, and only one by itself its neurons, which take longest.
    """
    known = names.kinds_of(run.m.config)
    kinds = list(dict.fromkeys(attention.kind for attention, own in known.items() if own.patterned))
    here = f"run/{about['run']}"
    views: dict[str, Any] = {}
    for path in _paths(run, kinds, about, opened, share):
        with suppress(ClearheadError):  # a view that this model does not have is not in the file
            views[f"{here}/{path}"] = page_view(run, path)
    for kind in kinds:
        views |= {
            f"{here}/attention/{kind}/{layer['layer']}": finite(layer) for layer in run.attentions(kind)
        }
    edges = [
        edge
        for path, body in views.items()
        if "/paths?" in path
        for edge in body["edges"][: EXPLAINED if share == 1 and run.prepared.keeps_graph else EXPLAINED // 4]
    ]
    for edge in edges:
        with suppress(ClearheadError):
            path = f"looks/{edge['part']}/{edge['reader']}/{edge['source']}"
            views[f"{here}/{path}"] = page_view(run, path)
    if share == 1 and sum(weight.numel() for weight in run.m.model.parameters()) <= EXAMPLE_PARAMETERS:
        views |= _graph(run, here, opened.query)
    stops = _stops(run, about, opened, edges, share)
    return views | {f"{here}/stops/{stop['head']}/{stop['reader']}": finite(stop) for stop in stops}


def _graph(run: PageRun, here: str, query: str) -> dict[str, Any]:
    """Return the graph of an answer, and the tests of the edges that the page shows first."""
    views: dict[str, Any] = {}
    options = {name: int(value) for name, value in parse_qsl(query)}
    with suppress(ClearheadError):  # a model whose attention or feed-forwards a graph does not take
        body = page_view(run, f"graph?{query}")
        views[f"{here}/graph?{query}"] = body
        for edge in edge_tests(run, body["edges"][:GRAPH_TESTED], **options):
            path = f"edge/{edge['source']}/{edge['target']}/{edge['kind']}"
            views[f"{here}/{path}?{query}"] = finite(edge)
    return views


def _examples(run: PageRun, examples: Examples) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return examples as the page lists them, each with its run where the model is small; and their views."""
    small = sum(parameter.numel() for parameter in run.m.model.parameters()) <= EXAMPLE_PARAMETERS
    share = EXAMPLE_SHARE * len(examples)
    listed: list[dict[str, Any]] = []
    views: dict[str, Any] = {}
    for number, example in enumerate(examples):
        shown = {name: value for name, value in example.items() if name != "image"}
        if small:
            given, pair = given_of(run.m, example), example.get("pair")
            cells = max(SMALLEST_SIDE**2, run.cells // share)
            own = replace(begin(run.m, given, None, pair), cells=cells, roles=run.roles, corpus=run.corpus)
            about = own.about(f"example{number}")
            views |= _views_of(own, about, Selected.of(about, ""), share)
            shown["run"] = about
        listed.append(finite(shown))
    return listed, views


@dataclass(frozen=True)
class Selected:
    """What a file opens on: the selection of the page that was saved, else what any page begins with."""

    position: int
    head: str | None
    column: int  # of the answer
    second: int | None  # the token of the second text
    query: str  # about the answer, as the page writes it: "position=3&token=7&against=9"

    @classmethod
    def of(cls, about: dict[str, Any], state: str) -> "Selected":
        """Read the selection that an address holds."""
        stated = dict(parse_qsl(state))
        tokens, columns = len(about["tokens"]["labels"]), len(about["columns"])
        numbers = {name: int(text) for name, text in stated.items() if text.isascii() and text.isdecimal()}
        position = numbers.get("position", about["position"])
        position = position if position < tokens else about["position"]
        column = position if columns == tokens else min(position, max(columns - 1, 0))
        more = [(name, numbers.get(key)) for name, key in (("token", "target"), ("against", "foil"))]
        chosen = "".join(f"&{name}={number}" for name, number in more if number is not None)
        return cls(position, stated.get("head"), column, numbers.get("at"), f"position={column}{chosen}")


def _stops(
    run: PageRun, about: dict[str, Any], opened: Selected, edges: list[dict[str, Any]], share: int
) -> list[dict[str, Any]]:
    """Return what the file has of the inside of heads, one pass for each attention and reader.

    Every head where the file opens and where the page begins; of more than fit, those that the path names,
    the first ones and those of the path.
    """
    patterned = [attention for attention, own in names.kinds_of(run.m.config).items() if own.patterned]
    heads = {str(head): head for head in names.heads_in(patterned)}
    source, own = (len((about[side] or about["tokens"])["labels"]) for side in ("source", "tokens"))
    at = [
        (name, min(position, (source if head.kind == "encoder" else own) - 1))
        for position in (opened.position, about["position"])
        for name, head in heads.items()
    ]
    first = [pair for pair in at if pair[0] == opened.head or heads[pair[0]].number == 0]
    carried = [(edge["part"], edge["reader"]) for edge in edges]
    named = [pair for pair, edge in zip(carried, edges) if edge["value"] > 0][:NAMED]
    wanted = dict.fromkeys([*named, *first, *carried, *at])
    groups: dict[tuple[str, int], list[str]] = {}
    room = STOP_NUMBERS // (5 * share * max(source, own))
    for name, reader in list(wanted)[: max(len(named) + len(first), room)]:
        groups.setdefault((heads[name].part, reader), []).append(name)
    stops: list[dict[str, Any]] = []
    for (_, reader), some in groups.items():
        with suppress(ClearheadError):
            stops += run.all_stops(some, reader)
    return stops


def _beside(run: PageRun, second: PageRun, about: dict[str, Any], opened: Selected) -> dict[str, Any]:
    """Return what the file has of a second text: what the bench asks of both, and patches between them."""
    other = second.about("second")
    views: dict[str, Any] = {"second": finite(other)}
    paired = {"recorded": run, "second": second}
    query = dict(parse_qsl(opened.query))
    choice = query.get("token") or str(int(run.scores(opened.column).argmax()))
    against = f"&against={query['against']}" if "against" in query else ""
    place = min(opened.second if opened.second is not None else other["position"], len(other["columns"]) - 1)
    wanted = [("recorded", f"followed/{choice}"), ("second", f"followed/{choice}")]
    wanted += [("second", path) for path in ("lens", f"next?position={place}")]
    wanted += [
        (name, f"contributions?position={column}&token={choice}{against}")
        for name, column in (("recorded", opened.column), ("second", place))
    ]
    tokens = len(about["tokens"]["labels"])
    maps = ("heads", "residual", "attention", "feedforward")
    if run.m.config.main.n_layers * tokens * tokens < BATCH_TOKENS:
        wanted += [("recorded", f"patch/second/{part}?{opened.query}") for part in maps]
    for name, path in wanted:
        with suppress(ClearheadError):
            views[f"run/{name}/{path}"] = page_view(replace(paired[name], others=paired.__getitem__), path)
    return views


def _paths(run: PageRun, kinds: list[str], about: dict[str, Any], opened: Selected, share: int) -> list[str]:
    """Return the paths of the views that go into the file, but for attention and steps."""
    paths = ["stages", "trace", "lens", *(f"thumbnails/{kind}" for kind in kinds)]
    paths += [f"rollout/{kind}" for kind in kinds if kind != "cross"]
    paths += ["similar"] if run.pair is not None else []
    paths += ["denoising"] if denoises(run.m.config) and share == 1 else []
    if about["columns"]:
        fit = max(1, LOGIT_BYTES // (4 * share * run.choices.count))
        chosen = [opened.column, about["position"], *reversed(range(len(about["columns"])))]
        paths += [f"next?position={position}" for position in list(dict.fromkeys(chosen))[:fit]]
        begins = f"position={about['position']}"
        paths += [f"paths?{query}" for query in dict.fromkeys([opened.query, begins])]
        queries = dict.fromkeys([f"position={opened.column}", begins, opened.query])
        kinds = ["contributions", "occlusion", *(["neurons"] if share == 1 else [])]
        paths += [f"{kind}?{query}" for kind in kinds for query in queries]
        paths += [f"map?position={place}" for place in dict.fromkeys([opened.position, about["position"]])]
        readers = [opened.position] if share == 1 else []
        paths += [
            f"reads/{layer}/{place}" for place in readers for layer in range(run.m.config.main.n_layers)
        ]
        read = len((about["source"] or about["tokens"])["labels"])
        rows = len(single_parts(run.m.config)) * max(read, len(about["tokens"]["labels"]))
        query = opened.query.partition("&against=")[0]
        paths += [f"story?{query}" for query in dict.fromkeys([query, begins])]
        if rows < BATCH_TOKENS:
            paths += [
                f"effects/zero?{query}" for query in dict.fromkeys([f"position={opened.column}", begins])
            ]
    return paths


def _early_steps(steps: list[dict[str, Any]]) -> list[str]:
    """Return the names of the steps whose numbers are recorded: all but those of later blocks."""
    early = {f"blocks.{layer}" for layer in range(STEP_LAYERS)}
    blocks = [
        next((part.removeprefix("encoder.") for part in step["path"] if "blocks." in part), None)
        for step in steps
    ]
    return [step["name"] for step, block in zip(steps, blocks) if block is None or block in early]


def export(recorded: dict[str, Any], path: str | Path) -> Path:
    """Write a record as one self-contained page: the whole file, or nothing."""
    path = Path(path)
    refuse(
        path.suffix.lower() not in (".html", ".htm"),
        f'the page is written as HTML: name a file that ends in .html, not "{path.name}"',
    )
    try:
        write_text(path, single_file(recorded))
    except CheckpointError as error:
        raise InputError(str(error)) from None
    return path


# In a notebook ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shown:
    """What `show` gives: a notebook draws it, `save` writes it as a page."""

    recorded: dict[str, Any]
    height: int = 720

    def _repr_html_(self) -> str:
        page = html.escape(single_file(self.recorded, notebook=True), quote=True)
        return (
            f'<iframe sandbox="allow-scripts allow-downloads" srcdoc="{page}" '
            f'style="width:100%;height:{self.height}px;border:1px solid #ccc" '
            'title="clearhead explorer"></iframe>'
        )

    def save(self, path: str | Path) -> Path:
        """Write it as one self-contained page."""
        return export(self.recorded, path)


def show(
    m: Model | Transformer, given: Any, target: Any = None, pair: str | None = None, height: int = 720
) -> Shown:
    """Show the explorer on one input, inline in a notebook.

    Args:
        m: what `load` gave, or a bare model, which takes ids or pixels.
        given: text, a pair, ids or an image, as for `inside.inputs.prepare`.
        target: what the decoder of an encoder-decoder has written.
        pair: the second text, for an encoder of pairs.
        height: of the frame, in pixels.
    """
    m = m if isinstance(m, Model) else Model(m)
    name = m.folder.name if m.folder is not None else m.config.family
    return Shown(record(m, name, given, target, pair), height)
