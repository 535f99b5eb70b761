"""The command `probe`: what can be read off each layer, and how much of it is learned by heart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional

from clearhead.commands.common import (
    Device,
    Folder,
    Json,
    Plot,
    Tokenizer,
    check_inputs,
    load_model,
    option,
    print_notes,
    progress,
    save_plot,
    show_result,
)
from clearhead.report import table

if TYPE_CHECKING:
    from clearhead.inside.probe import Probes

COLUMNS = (
    "of a treebank: upos, xpos, deprel, relation (deprel without subtypes), arc (where the governor stands), "
    "lemma, feats.Number, ...; default: upos. Other data has one column"
)
KINDS = {"words": "each word type", "texts": "each text", "images": "each image"}


def probe(
    folder: Folder,
    data: Annotated[
        Positional[str],
        option("a treebank (CoNLL-U), tagged words, or texts or images with labels", metavar="FILE"),
    ],
    column: Annotated[str | None, option(COLUMNS)] = None,
    test: Annotated[str | None, option("a file to test on; default: a fifth of the sentences")] = None,
    stack: Annotated[
        Literal["encoder", "decoder"] | None,
        option("which stack, of a model that has both; default: the encoder"),
    ] = None,
    pool: Annotated[
        Literal["mean", "first", "last"] | None,
        option("vector of a word from its tokens; default: mean. Of a text: as the model does it, else mean"),
    ] = None,
    words: Annotated[
        int, option("most words to train on, and to test on; whole sentences are drawn")
    ] = 20_000,
    classes: Annotated[int, option("most labels that a column may have")] = 200,
    penalty: Annotated[float, option("L2 penalty: times half the squared weights of a probe")] = 0.005,
    iterations: Annotated[int, option("most iterations of fitting a probe")] = 100,
    seed: Annotated[
        int, option("random seed of the split, the sentences, the control task and the intervals")
    ] = 0,
    device: Device = "auto",
    tokenizer: Tokenizer = None,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Measure how well each layer shows a property, beside a control task that can only be learned by heart.

    For example:
      clearhead probe my-model/ train.conllu --test dev.conllu --plot upos.png
      clearhead probe my-model/ train.conllu --column feats.Number --words 5000
      clearhead probe my-model/ reviews.tsv --json
    """
    check_inputs(folder, plot=plot)
    from clearhead.inside.probe import probe as run
    from clearhead.plot.states import probe_figure

    model = load_model(folder, tokenizer, device)
    with progress() as on_progress:
        found = run(
            model,
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
    print_notes(found.said)
    drawn = save_plot(plot, lambda: probe_figure(found, folder.absolute().name))
    show_result(found.to_dict() | drawn, json, _parts(found, str(folder)))


def _parts(found: Probes, name: str) -> Iterator[Any]:
    rows = []
    for layer in found.layers:
        interval = " to ".join(f"{end:.4f}" for end in layer.interval)
        control = (f"{layer.control:.4f}", f"{layer.selectivity:+.4f}")
        rows.append((layer.name, f"{layer.accuracy:.4f}", interval, *control))
    counts = f"{found.train:,} {found.unit} to train on, {found.test:,} to test on"
    title = f"{name}: {found.column}, {len(found.labels)} labels; {counts}"
    yield table(title, ("layer", ">accuracy", ">95 % interval", ">control", ">selectivity"), rows)
    by_type = f"most frequent label of {KINDS[found.unit]} {found.by_type:.4f}"
    yield f"most frequent label {found.majority:.4f}; {by_type}"
    if found.unit == "words":
        yield f"{found.seen:.1%} of the words tested have a type that is in the training words"
