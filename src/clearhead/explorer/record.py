"""A run recorded: every view that the page can ask for, by its path, in one file that opens anywhere.

A long run is aggregated, so that the file stays small; the page says so.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from clearhead.api import Model
from clearhead.costs import cost
from clearhead.errors import ClearheadError, InputError
from clearhead.explorer.pack import finite
from clearhead.explorer.pages import single_file
from clearhead.explorer.views import Run, begin, model_view, view
from clearhead.inside.names import attentions

PATTERN_BYTES = 5_000_000  # of all patterns together, before base64
SMALLEST_SIDE = 16  # cells of a pattern, however many there are
LOGIT_BYTES = 3_000_000
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
    """A run with all its views, as the page reads them from a file."""
    return record_run(begin(m, given, target, pair, roles=lambda: roles or {}), name, roles)


def record_run(run: Run, name: str, roles: dict[str, str] | None = None) -> dict[str, Any]:
    """The same for a run that is there already."""
    m = run.m
    heads = sum(count for _, _, count in attentions(m.config))
    side = max(SMALLEST_SIDE, int((PATTERN_BYTES / max(heads, 1)) ** 0.5))
    small = Run(m, run.prepared, run.given, run.target, run.pair, min(run.cells, side * side), run.roles)
    about = {"run": "recorded", "model": 0, **small.about()}
    views: dict[str, Any] = {
        "model": {
            **model_view(m, name),
            "ready": True,
            "failed": False,
            "says": "",
            "example": None,
            "recorded": True,
        },
        "roles": {"ready": True, "roles": roles or run.roles()},
    }
    for path in _paths(small, about):
        try:
            views[f"run/recorded/{path}"] = view(small, path)
        except ClearheadError:
            continue  # a view that this model does not have is not in the file
    for kind in dict.fromkeys(kind for kind, _, _ in attentions(m.config)):
        views |= {
            f"run/recorded/attention/{kind}/{layer}": finite(body)
            for layer, body in small.attentions(kind).items()
        }
    names = _early_steps(views["run/recorded/trace"]["steps"])
    views |= {f"run/recorded/step/{name}": finite(body) for name, body in small.steps(names).items()}
    for length in _lengths(small):
        views[f"cost?length={length}"] = finite(
            cost(m.config, length if m.config.input != "patches" else None).to_dict()
        )
    cells = max((body["aggregated"] for path, body in views.items() if "/attention/" in path), default=1)
    says = "A recording: what was computed is here, nothing more is run."
    if cells > 1:
        says += f" Attention is shown in cells of {cells} tokens, so that the file stays small."
    return {"run": about, "views": views, "says": says}


def _paths(run: Run, about: dict[str, Any]) -> list[str]:
    """Every view of a run that goes into the file."""
    config = run.m.config
    paths = ["stages", "trace", "lens"]
    for kind in dict.fromkeys(kind for kind, _, _ in attentions(config)):
        paths += [f"thumbnails/{kind}"] + [f"rollout/{kind}"] * (kind != "cross")
    if about["columns"]:
        positions = list(range(len(about["columns"])))
        fit = max(1, LOGIT_BYTES // (4 * run.choices.count))
        chosen = sorted({about["position"], *positions[-fit:]})
        paths += [f"next?position={position}" for position in chosen[-fit:]]
        paths.append(f"contributions?position={about['position']}")
    return paths


def _early_steps(steps: list[dict[str, Any]]) -> list[str]:
    """Names of the steps whose numbers are recorded: all but those of later blocks."""
    early = {f"blocks.{layer}" for layer in range(STEP_LAYERS)}
    blocks = [
        next((part.removeprefix("encoder.") for part in step["path"] if "blocks." in part), None)
        for step in steps
    ]
    return [step["name"] for step, block in zip(steps, blocks) if block is None or block in early]


def _lengths(run: Run) -> list[int]:
    limit = run.m.config.max_positions if run.m.config.positions == "learned" else max(COST_LENGTHS)
    return sorted({len(run.prepared.tokens), *(length for length in COST_LENGTHS if length <= limit)})


def export(recorded: dict[str, Any], path: str | Path) -> Path:
    """Write a record as one self-contained page: whole, or not at all."""
    path = Path(path)
    if path.suffix.lower() not in (".html", ".htm"):
        raise InputError(f'the page is written as HTML: name a file that ends in .html, not "{path.name}"')
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(single_file(recorded), encoding="utf-8")
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from None
    return path
