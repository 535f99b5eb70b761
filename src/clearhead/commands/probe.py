"""The command `probe`: what can be read off each layer, and how much of it is learned by heart."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from clearhead.commands.common import Folder, Json, show_result

if TYPE_CHECKING:
    from rich.console import Console

    from clearhead.inside.probe import Probes

COLUMN = "of a treebank: upos, xpos, deprel, relation (deprel without subtypes), arc (where the governor stands), lemma, feats.Number, ..."


def probe(
    folder: Folder,
    data: Annotated[
        Positional[str],
        arg(metavar="FILE", help="a treebank (CoNLL-U), tagged words, or texts or images with labels"),
    ],
    column: Annotated[str | None, arg(help=f"{COLUMN}; default: upos. Other data has one column")] = None,
    test: Annotated[str | None, arg(help="a file to test on; default: a fifth of the sentences")] = None,
    stack: Annotated[
        Literal["encoder", "decoder"] | None, arg(help="of a model that has both; default: the encoder")
    ] = None,
    pool: Annotated[
        Literal["mean", "first", "last"] | None,
        arg(
            help="vector of a word from its tokens; default: mean. Of a text: as the model does it, else mean"
        ),
    ] = None,
    words: Annotated[
        int, arg(help="to train on, and to test on, at most; whole sentences are drawn")
    ] = 20_000,
    classes: Annotated[int, arg(help="labels that a column may have")] = 200,
    penalty: Annotated[float, arg(help="on half the square of a probe's weights")] = 0.005,
    iterations: Annotated[int, arg(help="of fitting a probe, at most")] = 100,
    seed: Annotated[
        int, arg(help="of the split, the choice of sentences, the control task and the intervals")
    ] = 0,
    device: Annotated[str, arg(help="cpu, cuda, cuda:1, mps; auto: the best there is")] = "auto",
    tokenizer: Annotated[
        Path | None, arg(help="a tokenizer that lies elsewhere: a directory or file")
    ] = None,
    plot: Annotated[Path | None, arg(help="draw accuracy by depth: FILE.png, .svg or .pdf")] = None,
    json: Json = False,
) -> None:
    """Linear probes: how well each layer shows a property, beside a control task that can only be learned by heart.

    For example:
      clearhead probe my-model/ train.conllu --test dev.conllu --plot upos.png
      clearhead probe my-model/ train.conllu --column feats.Number --words 5000
      clearhead probe my-model/ reviews.tsv --json
    """
    from clearhead.bundle import load
    from clearhead.commands.common import progress
    from clearhead.errors import InputError
    from clearhead.inside.probe import probe as run
    from clearhead.plot import FORMATS
    from clearhead.training.precision import best_device

    if plot is not None and plot.suffix.lower() not in FORMATS:
        raise InputError(
            f'a picture "{plot}" cannot be written: its ending must be one of {", ".join(FORMATS)}'
        )
    m = load(folder, device=str(best_device(device)), tokenizer=tokenizer)
    with progress() as on_progress:
        found = run(
            m,
            data,
            column,
            test,
            stack=stack,
            pool=pool,
            words=words,
            classes=classes,
            penalty=penalty,
            iterations=iterations,
            seed=seed,
            on_progress=on_progress,
        )
    for line in found.said:
        print(line, file=sys.stderr)
    if plot is not None:
        from clearhead.plot.canvas import save
        from clearhead.plot.probe import probe_figure

        save(probe_figure(found, folder.name or folder.resolve().name), plot)
        print(f"drawn: {plot}", file=sys.stderr)
    show_result(found.to_dict(), json, lambda console: _show(console, found, str(folder)))


def _show(console: Console, found: Probes, name: str) -> None:
    from rich.table import Table
    from rich.text import Text

    title = f"{name}: {found.column}, {len(found.labels)} labels; {found.train:,} {found.unit} to train on, {found.test:,} to test on"
    table = Table(title=Text(title), title_justify="left")
    for heading in ("layer", "accuracy", "95 % interval", "control", "selectivity"):
        table.add_column(heading, justify="left" if heading == "layer" else "right")
    for layer in found.layers:
        low, high = layer.interval
        figures = (
            f"{layer.accuracy:.4f}",
            f"{low:.4f} to {high:.4f}",
            f"{layer.control:.4f}",
            f"{layer.selectivity:+.4f}",
        )
        table.add_row(layer.name, *figures)
    console.print(table)
    kind = {"words": "each word type", "texts": "each text", "images": "each image"}[found.unit]
    console.print(
        f"most frequent label {found.majority:.4f}; most frequent label of {kind} {found.by_type:.4f}",
        highlight=False,
    )
    if found.unit == "words":
        console.print(
            f"{found.seen:.1%} of the words tested have a type that is in the training words", highlight=False
        )
