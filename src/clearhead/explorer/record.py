"""A run recorded: every view that the page can ask for, by its path, in one file that opens anywhere.

A long run is aggregated, so that the file stays small; the page says so. A notebook shows the same page in a
frame.
"""

import html
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clearhead.api import Model
from clearhead.costs import cost
from clearhead.errors import CheckpointError, ClearheadError, InputError, refuse
from clearhead.explorer.described import model_view
from clearhead.explorer.pack import finite
from clearhead.explorer.pages import single_file
from clearhead.explorer.table import view
from clearhead.explorer.views import PageRun, begin
from clearhead.hub.files import write_text
from clearhead.inside import names
from clearhead.model.transformer import Transformer

PATTERN_BYTES = 10_000_000  # of all patterns together, before base64
SMALLEST_SIDE = 16  # cells of a pattern, however many there are
LOGIT_BYTES = 3_000_000
EXPLAINED = 12  # edges of the path whose reasons are recorded
STEP_LAYERS = 2  # blocks whose numbers are recorded, step by step
COST_LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)


def record(
    m: Model,
    name: str,
    given: Any,
    target: Any = None,
    pair: str | None = None,
    roles: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Run a model and return the run with all its views, as the page reads them from a file."""
    return record_run(replace(begin(m, given, target, pair), roles=lambda: roles or {}), name)


def record_run(run: PageRun, name: str, state: str = "") -> dict[str, Any]:
    """Return a run with all its views, as the page reads them from a file, and the selection it opens on."""
    m = run.m
    known = names.kinds_of(m.config)
    heads = sum(one.n_heads for one in known)
    side = max(SMALLEST_SIDE, int((PATTERN_BYTES / 4 / max(heads, 1)) ** 0.5))
    small = replace(run, cells=min(run.cells, side * side), number=0)
    about = small.about("recorded")
    kinds = list(dict.fromkeys(one.kind for one, own in known.items() if own.patterned))
    views: dict[str, Any] = {
        "model": {**model_view(m, name), "recorded": True},
        "roles": {"ready": True, "roles": run.roles()},
    }
    for path in _paths(small, kinds, about):
        with suppress(ClearheadError):  # a view that this model does not have is not in the file
            views[f"run/recorded/{path}"] = view(small, path)
    views |= {
        f"run/recorded/attention/{kind}/{body['layer']}": finite(body)
        for kind in kinds
        for body in small.attentions(kind)
    }
    for edge in views.get(f"run/recorded/paths?position={about['position']}", {"edges": []})["edges"][
        :EXPLAINED
    ]:
        looks = f"looks/{edge['part']}/{edge['reader']}/{edge['source']}"
        for path in (looks, f"stops/{edge['part']}/{edge['reader']}"):
            with suppress(ClearheadError):
                views[f"run/recorded/{path}"] = view(small, path)
    early = _early_steps(views["run/recorded/trace"]["steps"])
    views |= {f"run/recorded/step/{name}": finite(body) for name, body in small.steps(early).items()}
    limit = m.config.max_positions if m.config.bounded else max(COST_LENGTHS)
    lengths = {len(run.prepared.tokens), *(length for length in COST_LENGTHS if length <= limit)}
    views |= {
        f"cost?length={length}": finite(
            cost(m.config, None if m.config.input == "patches" else length).to_dict()
        )
        for length in sorted(lengths)
    }
    cells = max((body["aggregated"] for path, body in views.items() if "/attention/" in path), default=1)
    says = "A recording: what was computed is here, nothing more is run."
    if cells > 1:
        says += f" Attention is shown in cells of {cells} tokens, so that the file stays small."
    return {"run": about, "views": views, "says": says, "state": state}


def _paths(run: PageRun, kinds: list[str], about: dict[str, Any]) -> list[str]:
    """Return the paths of the views that go into the file, but for attention and steps."""
    paths = ["stages", "trace", "lens", *(f"thumbnails/{kind}" for kind in kinds)]
    paths += [f"rollout/{kind}" for kind in kinds if kind != "cross"]
    paths += ["similar"] if run.pair is not None else []
    if about["columns"]:
        fit = max(1, LOGIT_BYTES // (4 * run.choices.count))
        chosen = sorted({about["position"], *range(len(about["columns"]))[-fit:]})
        paths += [f"next?position={position}" for position in chosen[-fit:]]
        paths += [
            f"{kind}?position={about['position']}"
            for kind in ("contributions", "paths", "occlusion", "neurons")
        ]
        paths += [f"map?position={about['position']}"]
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
