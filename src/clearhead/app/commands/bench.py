"""The command `bench`: how fast a model is here, beside what is installed and what the machine allows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from clearhead.app.commands.common import (
    Device,
    Dtype,
    Folder,
    Json,
    Plot,
    Tokenizer,
    load_model,
    option,
    print_notes,
    progress,
    show_result,
)
from clearhead.app.report import count, size, table

if TYPE_CHECKING:
    from rich.table import Table

    from clearhead.labs.speed.compare import SpeedReport, Timing


def bench(
    folder: Folder,
    parts: Annotated[
        tuple[Literal["first", "decode", "read", "train"], ...],
        option("the first token of a prompt; decoding; reading texts or pictures; a training step"),
    ] = ("first", "decode", "read", "train"),
    batches: Annotated[tuple[int, ...], option("rows that are decoded at once")] = (1, 8),
    prompt: Annotated[int, option("tokens before the first token")] = 512,
    new: Annotated[int, option("tokens that each row writes")] = 32,
    against: Annotated[
        tuple[str, ...] | None,
        option(
            "programs to compare with: transformers, sentence-transformers, ctranslate2, llama.cpp; "
            "none: clearhead alone; default: all that are installed",
            metavar="NAME",
        ),
    ] = None,
    rounds: Annotated[int, option("runs of each program, in turn; the median counts")] = 3,
    plot: Plot = None,
    tokenizer: Tokenizer = None,
    device: Device = "auto",
    dtype: Dtype = None,
    quantize: Annotated[
        Literal["int8", "int4"] | None,
        option("round weights first; llama.cpp then has Q8_0 or Q4_0, and other programs do not round"),
    ] = None,
    json: Json = False,
) -> None:
    """Time a model here, beside what else is installed and what the machine allows.

    For example:
      clearhead bench my-gpt/
      clearhead bench my-gpt/ --device cuda --dtype bfloat16 --batches 1 32
      clearhead bench my-gpt/ --parts decode --against transformers llama.cpp
      clearhead bench my-gpt/ --parts decode --quantize int4
      clearhead bench my-encoder/ --plot speed.png --json
    """
    model = load_model(folder, tokenizer, device, dtype, plot, quantize=quantize)
    from clearhead.labs.speed.compare import compare
    from clearhead.labs.speed.jobs import SpeedSizes

    peers = () if against == ("none",) else against
    with progress() as on_progress:
        found = compare(model, parts, SpeedSizes(prompt, new, batches), peers, rounds, on_progress)
    print_notes(found.notes)
    name = folder.resolve().name
    show_result(found.to_dict(), json, _shown(found, name), plot, lambda: _draw(found, name))


def _draw(found: SpeedReport, name: str) -> Any:
    from clearhead.app.plot.speed import draw_speed

    return draw_speed(found, name)


def _shown(found: SpeedReport, name: str) -> Iterator[Table | str]:
    """Give the table, where the limits come from, and which tokens differ."""
    machine = found.machine
    rows: list[tuple[str, ...]] = []
    for job in found.jobs:
        rows += [()] if rows else []
        rows += [_row(job.name if not place else "", one) for place, one in enumerate(job.timings)]
        share = "" if job.share_of_limit is None else f"{job.share_of_limit:.0%} of it"
        rows.append(("", f"limit, by {job.bound_by}", _rate(job.limit), share))
    threads = f", {machine.threads} threads" if machine.threads else ""
    yield table(
        f"{name}: tokens or pictures a second, {machine.dtype} on {machine.name}{threads}",
        ("", "program", ">a second", ">clearhead is"),
        rows,
    )
    read, computed = size(machine.bandwidth), count(machine.arithmetic)
    yield (
        f"The limit follows from what was measured here: {read} read and {computed} operations computed in a "
        "second."
    )
    yield from (
        f"{one.program} has no speed of {job.name}: {one.fault}"
        for job in found.jobs
        for one in job.timings
        if one.fault
    )
    differ = [
        f"{one.program}: {one.same_tokens:.0%} of its tokens are clearhead's ({job.name})"
        for job in found.jobs
        for one in job.timings
        if one.same_tokens is not None and one.same_tokens < 1
    ]
    yield from differ


def _row(job: str, one: Timing) -> tuple[str, ...]:
    if one.per_second is None:
        return job, one.program, "none", "above the limit" if one.above_limit else "failed"
    ours = one.program == "clearhead" or one.ours_over_this is None
    return job, one.program, _rate(one.per_second), "" if ours else f"{one.ours_over_this:.2f} x"


def _rate(per_second: float) -> str:
    digits = 2 if per_second < 10 else 1 if per_second < 1000 else 0
    return f"{per_second:,.{digits}f}"
