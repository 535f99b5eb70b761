"""Commands about a model as a whole: the tour, its cost, the equality suite, conversion."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from clearhead.commands.common import Folder, Json, show_result

SLOW = 2.0  # seconds after which a row of the suite is worth a line


def demo(
    seed: Annotated[int, arg(help="of both models")] = 0,
    steps: Annotated[int, arg(help="of the first training; the second takes 1.5 times as many")] = 400,
    out: Annotated[Path | None, arg(help="folder for the models; default: a temporary one")] = None,
) -> None:
    """The tour: train a small GPT and a date reader live, sample, see where it looks, read a cost table, run the equality checks.

    For example:
      clearhead demo
      clearhead demo --steps 2000 --out demo-models
    """
    from clearhead.tour import tour

    tour(seed, steps, out)


def cost(
    model: Annotated[
        Positional[str],
        arg(metavar="CONFIG|DIR|PRESET", help="a config's JSON file, a model directory, or a preset"),
    ],
    length: Annotated[int | None, arg(help="tokens per row; default: the longest the model takes")] = None,
    batch: Annotated[int, arg(help="rows")] = 1,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], arg(help="of weights, activations and cache")
    ] = "float32",
    json: Json = False,
) -> None:
    """What a model will take: parameters, FLOPs, memory and cache, from its config alone.

    For example:
      clearhead cost gpt2
      clearhead cost llama-3-8b --length 8192 --dtype bfloat16
      clearhead cost my-model/ --json
    """
    from clearhead.costs import cost as cost_of
    from clearhead.report import cost_table

    figures = cost_of(_config(model), length=length, batch=batch, dtype=dtype)
    show_result(figures.to_dict(), json, lambda console: console.print(cost_table(figures, model)))


def check(
    folder: Folder,
    reference: Annotated[
        bool, arg(help="compare with transformers too: logits and 50 greedy tokens")
    ] = False,
    device: Annotated[
        str, arg(help="where the model runs: cpu, cuda, mps; elsewhere than on the CPU, the two are compared")
    ] = "cpu",
    compile: Annotated[bool, arg(help="compare with the compiled model too: 15 seconds and more")] = False,
    large: Annotated[
        bool, arg(help="above 500 million parameters, run the rows that copy the model too")
    ] = False,
    json: Json = False,
) -> None:
    """Prove a model right, here: the equality suite on this model and this machine. Exit code 1 if a row fails.

    For example:
      clearhead check my-model/
      clearhead check my-model/ --reference
      clearhead check my-model/ --device cuda --compile
      clearhead check my-model/ --json
    """
    from clearhead.api import load
    from clearhead.inside.checks import check as run
    from clearhead.report import check_table
    from clearhead.training.precision import best_device

    loaded = load(folder)
    loaded.model.to(best_device(device))
    with _progress() as on_row:
        rows = run(loaded, reference, compile=compile, large=large, on_row=on_row)
    failed = [row for row in rows if not row.passed]
    skipped = sum(row.verdict == "skipped" for row in rows)
    body = {"checks": [row.to_dict() for row in rows], "passed": not failed}
    asked = {
        "--reference: transformers on the same directory": reference,
        "--compile: the compiled model": compile,
    }
    left_out = [what for what, given in asked.items() if not given]

    def show(console: Any) -> None:
        console.print(check_table(rows))
        took = sum(row.seconds for row in rows)
        summary = f"{len(rows) - len(failed) - skipped} of {len(rows)} equal, {len(failed)} failed, {skipped} skipped, in {took:.0f} s."
        console.print(
            f"{summary} Not asked for: {'; '.join(left_out)}." if left_out else summary, highlight=False
        )

    show_result(body, json, show)
    if failed:
        sys.exit(1)


@contextmanager
def _progress() -> Iterator[Callable[[Any], None]]:
    """Say on stderr what is being checked: one live line on a terminal, elsewhere a line for each row that took its time."""
    from rich.console import Console
    from rich.text import Text

    from clearhead.inside.checks.row import Check

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:

        def tell(row: Any) -> None:
            if isinstance(row, Check) and row.seconds > SLOW:
                console.print(Text(f"{row.name}: {row.seconds:.1f} s"))

        yield tell
        return
    with console.status("checking") as status:
        yield lambda row: status.update(Text(f"checking: {row.name}"))


def convert(
    source: Annotated[
        Positional[Path], arg(metavar="IN", help="a model directory, clearhead's or Hugging Face's")
    ],
    target: Annotated[Positional[Path], arg(metavar="OUT", help="the directory to write")],
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, arg(help="of the weights; default: as they are")
    ] = None,
    shard_size: Annotated[str, arg(help="largest file, such as 500MB or 5GB")] = "5GB",
    overwrite: Annotated[bool, arg(help="write into OUT although it holds a model already")] = False,
    json: Json = False,
) -> None:
    """Write a model as the Hugging Face architecture that is exactly it; where there is none, say why.

    For example:
      clearhead convert my-model/ out/
      clearhead convert my-model/ out/ --dtype bfloat16 --shard-size 500MB
    """
    import torch

    from clearhead.api import load
    from clearhead.errors import CheckpointError
    from clearhead.hub.checkpoint import explain_export

    if (target / "config.json").exists() and not overwrite:
        raise CheckpointError(f"{target} holds a model already: choose another directory, or add --overwrite")
    limit = _bytes(shard_size)
    loaded = load(source)
    loaded.save(target, dtype=getattr(torch, dtype) if dtype else None, shard_size=limit)
    saved_as, note = explain_export(loaded.config, loaded.description)
    body = {"saved": str(target), "architecture": saved_as, "note": note}
    show_result(
        body,
        json,
        lambda console: console.print(
            f"saved {target} as {saved_as}{': ' + note if note else ''}", highlight=False
        ),
    )


def _config(name: str) -> Any:
    """A config from a JSON file, a model directory or a preset's name."""
    from clearhead.config import ModelConfig
    from clearhead.errors import ConfigError, nearest
    from clearhead.hub.checkpoint import describe
    from clearhead.presets import PRESETS

    path = Path(name)
    if path.is_dir():
        return describe(path).config
    if path.is_file():
        try:
            return ModelConfig.from_json(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read as a config: {error}") from None
    if name not in PRESETS:
        raise ConfigError(
            f'"{name}" is no file, directory or preset{nearest(name, PRESETS)}: presets are {", ".join(PRESETS)}'
        )
    return PRESETS[name]


def _bytes(text: str) -> int:
    """A number of bytes from text such as 500MB."""
    from clearhead.errors import InputError

    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "B": 1}
    upper = text.strip().upper()
    unit = next((unit for unit in sorted(units, key=len, reverse=True) if upper.endswith(unit)), "")
    number = upper.removesuffix(unit).strip()
    try:
        size = int(float(number) * units.get(unit, 1))
    except ValueError:
        size = 0
    if size < 1:
        raise InputError(f'size "{text}" is not understood: write a number and a unit, such as 500MB or 5GB')
    return size
