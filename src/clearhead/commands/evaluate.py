"""The command `eval`: how good a model is on some data."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, UseAppendAction, arg

from clearhead.commands.common import Folder, Json, progress, show_result
from clearhead.commands.inputs import check_apart, writing
from clearhead.data.columns import SHAPES
from clearhead.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from clearhead.evaluation.evaluate import Evaluation


def evaluate(
    folder: Folder,
    data: Annotated[
        Positional[tuple[str, ...]], arg(metavar="DATA", help="files, folders, globs, or an embedded corpus")
    ],
    recipe: Annotated[
        str | None, arg(help="whose [data] says how to read them; default: the one the model was trained by")
    ] = None,
    set: Annotated[
        UseAppendAction[tuple[str, ...]],
        arg(metavar="KEY=VALUE", help="change that, such as data.header=true"),
    ] = (),
    beams: Annotated[
        int | None, arg(help="search with this many beams; default: the model's own, else 4")
    ] = None,
    length_penalty: Annotated[
        float | None, arg(help="above 0 favours long texts; default: the model's own, else 1")
    ] = None,
    max_new_tokens: Annotated[
        int | None, arg(help="where a text ends at the latest; default: the model's own")
    ] = None,
    batch_size: Annotated[int | None, arg(help="rows at a time; default: by their length")] = None,
    device: Annotated[str, arg(help="cpu, cuda, cuda:1, mps; auto: the best there is")] = "auto",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, arg(help="of the weights; default: as they are")
    ] = None,
    output: Annotated[
        Path | None, arg(help="write what the model said there, a line for each example")
    ] = None,
    lowercase: Annotated[bool, arg(help="give BLEU without regard to case too")] = False,
    tokenize: Annotated[
        str | None, arg(help="sacreBLEU's tokenizer: 13a, intl, char, none, ...; default: 13a")
    ] = None,
    seed: Annotated[int, arg(help="of the intervals, and of the masks of a masked model")] = 0,
    json: Json = False,
) -> None:
    """Judge a model on data it has not seen: loss, perplexity, accuracy, F1, BLEU and chrF, each with its interval.

    For example:
      clearhead eval my-model/ test.txt
      clearhead eval my-model/ test.en test.de --beams 5 --output test.out
      clearhead eval my-model/ reviews.tsv --set data.columns='{text = "review", label = "stars"}'
      clearhead eval my-gpt/ wiki.txt --set data.max_length=256 --json
    """
    from clearhead.api import load
    from clearhead.data.corpora import CORPORA
    from clearhead.data.files import expand
    from clearhead.evaluation.evaluate import data_plan, task_for
    from clearhead.evaluation.evaluate import evaluate as run
    from clearhead.training.precision import best_device

    if not data:
        raise InputError(
            "no data is named: name files after the model's directory, such as clearhead eval my-model/ test.txt"
        )
    if output is not None and (output.is_dir() or not output.absolute().parent.is_dir()):
        raise InputError(f"{output} cannot be written: name a file in a folder that is there")
    if output is not None:
        check_apart(
            output,
            [
                *expand(name for name in data if name not in CORPORA),
                *([Path(recipe)] if recipe is not None else []),
            ],
        )
    import torch

    loaded = load(folder, getattr(torch, dtype) if dtype else None, str(best_device(device)))
    plan = data_plan(folder, data, recipe, set)
    task = task_for(loaded, plan.task)
    if output is not None and SHAPES[task] == "text":
        raise InputError(
            f"--output {output}: a model judged by {task} gives no answers to write: leave it out"
        )
    asked = {"num_beams": beams, "length_penalty": length_penalty, "max_new_tokens": max_new_tokens}
    with progress() as on_progress:
        done = run(
            loaded,
            data,
            plan,
            seed=seed,
            batch_size=batch_size,
            tokenize=tokenize,
            lowercase=lowercase,
            on_progress=on_progress,
            **{name: value for name, value in asked.items() if value is not None},
        )
    if output is not None:
        with writing(output) as write:
            for text in done.outputs:
                write(" ".join(text.splitlines()))
    for line in done.said:
        print(line, file=sys.stderr)
    body: dict[str, Any] = {
        name: getattr(done, name)
        for name in ("task", "examples", "targets", "metrics", "intervals", "signatures")
    }
    show_result(body, json, lambda console: _show(console, done, str(folder)))


def _show(console: Console, done: Evaluation, name: str) -> None:
    from rich.table import Table
    from rich.text import Text

    title = f"{name}: {done.task}, {done.examples:,} examples, {done.targets:,} targets"
    table = Table(title=Text(title), title_justify="left")
    for heading in ("metric", "value", "95 % interval"):
        table.add_column(heading, justify="left" if heading == "metric" else "right")
    for metric, value in done.metrics.items():
        low, high = done.intervals.get(metric, (None, None))
        table.add_row(metric, f"{value:.4f}", "" if low is None else f"{low:.4f} to {high:.4f}")
    console.print(table)
    for metric, signature in done.signatures.items():
        console.print(Text(f"{metric}: {signature}"), soft_wrap=True)
