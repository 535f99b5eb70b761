"""The command `eval`: how good a model is on some data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional

import clearhead as ch
from clearhead.commands.common import (
    DATA,
    Device,
    Dtype,
    Folder,
    Json,
    Settings,
    check_inputs,
    load_model,
    option,
    print_notes,
    progress,
    show_result,
)
from clearhead.commands.output import check_apart, writing
from clearhead.errors import refuse
from clearhead.report import table

SHOWN = ("task", "examples", "targets", "metrics", "intervals", "signatures")


def evaluate(
    folder: Folder,
    data: Annotated[Positional[tuple[str, ...]], option(DATA, metavar="DATA")],
    recipe: Annotated[
        str | None,
        option("a recipe whose [data] says how to read them; default: the one of the model's training"),
    ] = None,
    set: Settings = (),
    beams: Annotated[
        int | None, option("search with this many beams; default: the model's own, else 4")
    ] = None,
    length_penalty: Annotated[
        float | None, option("above 0 favours long texts; default: the model's own, else 1")
    ] = None,
    max_new_tokens: Annotated[
        int | None, option("where a text ends at the latest; default: the model's own")
    ] = None,
    batch_size: Annotated[int | None, option("rows at a time; default: by their length")] = None,
    device: Device = "auto",
    dtype: Dtype = None,
    output: Annotated[Path | None, option("write what the model said there, a line for each example")] = None,
    lowercase: Annotated[bool, option("give BLEU without regard to case too")] = False,
    tokenize: Annotated[
        str | None, option("sacreBLEU's tokenizer: 13a, intl, char, none, ...; default: 13a")
    ] = None,
    seed: Annotated[int, option("random seed of the intervals, and of the masks of a masked model")] = 0,
    json: Json = False,
) -> None:
    """Measure a model on data it has not seen: loss, perplexity, accuracy, F1, BLEU, chrF, with intervals.

    For example:
      clearhead eval my-model/ test.txt
      clearhead eval my-model/ test.en test.de --beams 5 --output test.out
      clearhead eval my-model/ reviews.tsv --set data.columns='{text = "review", label = "stars"}'
      clearhead eval my-gpt/ wiki.txt --set data.max_length=256 --json
    """
    check_inputs(folder)
    nowhere = output is not None and (output.is_dir() or not output.absolute().parent.is_dir())
    refuse(
        not data, "no data is named: name files after the model, such as clearhead eval my-model/ test.txt"
    )
    refuse(nowhere, f"{output} cannot be written: name a file in a folder that is there")
    from clearhead.data.corpora import CORPORA
    from clearhead.data.examples import TEXT
    from clearhead.data.files import expand
    from clearhead.evaluation.evaluate import data_plan, task_for
    from clearhead.tasks.table import task_named

    if output is not None:
        recipes = [Path(recipe)] if recipe is not None else []
        check_apart(output, [*expand(name for name in data if name not in CORPORA), *recipes])
    model = load_model(folder, device=device, dtype=dtype)
    plan = data_plan(folder, data, recipe, set)
    task = task_for(model, plan.task)
    silent = output is not None and task_named(task).shape is TEXT
    refuse(silent, f"--output {output}: a model judged by {task} gives no answers to write: leave it out")
    asked = {"num_beams": beams, "length_penalty": length_penalty, "max_new_tokens": max_new_tokens}
    with progress() as on_progress:
        done = ch.evaluate(
            model,
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
    print_notes(done.notes)
    body = {name: getattr(done, name) for name in SHOWN}
    show_result(body, json, _parts(done, str(folder)))


def _parts(done: ch.Evaluation, name: str) -> Iterator[Any]:
    rows = []
    for metric, value in done.metrics.items():
        interval = " to ".join(f"{end:.4f}" for end in done.intervals.get(metric, ()))
        rows.append((metric, f"{value:.4f}", interval))
    title = f"{name}: {done.task}, {done.examples:,} examples, {done.targets:,} targets"
    yield table(title, ("metric", ">value", ">95 % interval"), rows)
    for metric, signature in done.signatures.items():
        yield f"{metric}: {signature}"
