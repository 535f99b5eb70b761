"""The command `quantize`: weights of 8 or 4 bits, with a report of what rounding cost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, UseAppendAction, arg

from clearhead.app.commands.common import (
    DATA,
    Device,
    Folder,
    Json,
    Plot,
    Tokenizer,
    load_model,
    option,
    progress,
    show_result,
)
from clearhead.app.report import size, table
from clearhead.errors import CheckpointError, refuse

if TYPE_CHECKING:
    from rich.table import Table

    from clearhead.inside.quantize import QuantReport

LISTED = 12  # layers in the table, those of the largest errors, unless all are asked for


def quantize(
    folder: Folder,
    out: Annotated[Positional[Path], option("the directory to write", metavar="OUT")],
    bits: Annotated[Literal["4", "8"], option("bits of a weight")] = "4",
    group: Annotated[Literal["32", "64", "128", "256"], option("weights that share a scale")] = "32",
    method: Annotated[
        Literal["rtn", "hqq", "imatrix", "gptq", "awq"] | None,
        option("how weights are rounded; gptq and awq need --data; default: gptq with it, else imatrix"),
    ] = None,
    symmetric: Annotated[
        bool, option("scales alone, no offset beside them: 4.5 bits a weight, not 5")
    ] = False,
    asymmetric: Annotated[bool, option("an offset beside each scale, which 4 bits have by default")] = False,
    data: Annotated[
        tuple[str, ...],
        option(f"a text, half to calibrate on, half to measure on: {DATA}", metavar="FILE"),
    ] = (),
    wide: Annotated[
        UseAppendAction[tuple[str, ...]],
        arg(metavar="LAYER", help="layers that keep 8 bits, such as 'decoder.blocks.0.*'; may be repeated"),
    ] = (),
    sensitive: Annotated[
        int, option("attentions and feed-forwards to keep wide, by what rounding each costs on --data")
    ] = 0,
    calibration: Annotated[int, option("tokens of the text to calibrate on, at most")] = 8192,
    evaluation: Annotated[int, option("tokens of the text to measure on, at most")] = 4096,
    report: Annotated[bool, option("list every layer, not only those of the largest errors")] = False,
    plot: Plot = None,
    tokenizer: Tokenizer = None,
    device: Device = "auto",
    overwrite: Annotated[bool, option("write into OUT although it holds a model already")] = False,
    json: Json = False,
) -> None:
    """Round the weights of a model to 8 or 4 bits, save it, and say what that cost.

    For example:
      clearhead quantize my-gpt/ small/
      clearhead quantize my-gpt/ small/ --bits 8
      clearhead quantize my-gpt/ small/ --data book.txt --report --plot small.png
      clearhead quantize my-gpt/ small/ --data book.txt --method awq --sensitive 4
    """
    refuse(
        (out / "config.json").exists() and not overwrite,
        f"{out} holds a model already: choose another directory, or add --overwrite",
        CheckpointError,
    )
    refuse(bool(wide) and sensitive != 0, "--wide and --sensitive were both given: choose one")
    refuse(symmetric and asymmetric, "--symmetric and --asymmetric were both given: choose one")
    refuse(sensitive < 0, f"--sensitive {sensitive} is negative: it is a number of parts")
    model = load_model(folder, tokenizer, device, plot=plot)
    from clearhead.inside.quantize import quantize as run

    with progress() as on_progress:
        found = run(
            model,
            int(bits),
            int(group),
            method=method,
            symmetric=symmetric if symmetric or asymmetric else None,
            text=data,
            wide=sensitive or wide,
            calibration=calibration,
            evaluation=evaluation,
            on_progress=on_progress,
        )
    found.model.save(out)
    body = {"saved": str(out), **found.to_dict()}
    name = folder.resolve().name
    show_result(body, json, _shown(found, out, report), plot, lambda: _draw(found, name))


def _draw(found: QuantReport, name: str) -> Any:
    from clearhead.app.plot.quantize import draw_quantization

    return draw_quantization(found, name)


def _shown(found: QuantReport, out: Path, every: bool) -> Iterator[Table | str]:
    """Give the tables and the last line."""
    layers = sorted(found.layers, key=lambda one: -(one.output_error or one.weight_error))
    listed = found.layers if every else layers[:LISTED]
    title = "error by layer" if every else f"the {len(listed)} layers of the largest errors, of {len(layers)}"
    yield table(
        title,
        ("layer", ">bits", ">weights", ">weight error", ">output error"),
        [
            (
                one.name.removeprefix("decoder."),
                str(one.bits),
                f"{one.weights:,}",
                f"{one.weight_error:.2%}",
                "-" if one.output_error is None else f"{one.output_error:.2%}",
            )
            for one in listed
        ],
    )
    if found.sensitivity:
        yield table(
            "divergence when one part alone is rounded",
            ("part", ">KL, nats a token"),
            [(one.part, f"{one.divergence:.5f}") for one in found.sensitivity[:LISTED]],
        )
    if found.before is not None and found.after is not None:
        before, after = found.before, found.after
        change = after.perplexity / before.perplexity - 1
        yield table(
            f"{before.tokens:,} tokens that were not calibrated on",
            ("", ">perplexity", ">KL, nats a token", ">same best token"),
            [
                ("before", f"{before.perplexity:.3f}", "0", "100%"),
                (
                    f"after ({change:+.2%})",
                    f"{after.perplexity:.3f}",
                    f"{after.divergence:.5f}",
                    f"{after.agreement:.1%}",
                ),
            ],
        )
    sizes = f"{size(found.bytes_before)} -> {size(found.bytes_after)}"
    yield f"saved {out}: int{found.bits} by {found.method}, groups of {found.group}, {sizes}"
