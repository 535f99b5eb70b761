"""Sparse features: train a dictionary on a model's activations, and show what its features are."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from clearhead.app.commands.common import check_picture
from clearhead.app.report import Column, listing, table
from clearhead.app.views import ModelArgument, OnProgress, Repeated, View, drawing
from clearhead.errors import refuse

FEATURES = Path("features")


def train(
    model: ModelArgument,
    data: tuple[str, ...],
    *,
    at: str,
    kind: Literal["autoencoder", "transcoder", "skip-transcoder", "crosscoder"] = "autoencoder",
    activation: Literal["topk", "batchtopk", "jumprelu"] = "batchtopk",
    to: str | None = None,
    features: int = 0,
    k: int = 32,
    tokens: int = 1_000_000,
    length: int | None = None,
    batch: int = 2048,
    lr: float = 1e-3,
    precision: Literal["float32", "bfloat16"] = "float32",
    validation: str | None = None,
    seed: int = 0,
    output: Path = FEATURES,
    overwrite: bool = False,
    plot: Path | None = None,
    on_progress: OnProgress = lambda stage, done, total: None,
) -> View:
    """Train a sparse dictionary on a model's activations, and measure it on held-out text.

    A run that was stopped goes on when it is repeated. The dictionary is saved in SAELens's layout.

    Args:
        data (DATA): files or folders of text; of pairs for an encoder-decoder
        at (TAP): an activation or a part: blocks.3.feedforward; of a crosscoder, a pattern:
            "blocks.*.resid_post"
        kind: an autoencoder writes what it reads, a transcoder the output of the part whose input it reads
        activation: how features become sparse; batchtopk is saved as JumpReLU
        to (TAP): what a transcoder writes; default: the output of the part
        features: how many; 0: eight for each dimension that is read
        k: features active per token, on average
        tokens: to learn from; the text is repeated where it has fewer
        length: tokens of a row; default: 128, or as many as the model reads
        batch: tokens of a step
        lr: learning rate, of Adam
        precision: of the matmuls of training; weights are float32
        validation (FILE): text to measure on; default: a twentieth of the data is held out
        seed: random seed of the rows, their order and the weights
        output (FOLDER): where the dictionary is saved

    For example:
      clearhead features train my-model/ book.txt --at blocks.3.feedforward
      clearhead features train my-model/ books/ --at blocks.3.feedforward --k 64
      clearhead features train m/ a.txt --kind crosscoder --at "blocks.*.resid_post"
    """
    check_picture(plot)
    refuse(not data, "no data was given: name a file or a folder of text")
    m = model()
    from clearhead.inside.features.training import train_features

    trained = train_features(
        m, data, at, to=to, folder=output, overwrite=overwrite, validation=validation, length=length,
        on_progress=on_progress, kind=kind, activation=activation, n_features=features, k=k, tokens=tokens,
        batch=batch, lr=lr, precision=precision, seed=seed,
    )  # fmt: skip
    report = trained.report
    rows = [
        ("variance explained", f"{report.variance_explained:.4f}"),
        ("L0: features active per token", f"{report.l0:.1f}"),
        ("dead: never active on held-out text", f"{report.dead:.1%}"),
    ]
    if report.loss_recovered is not None:
        losses = {
            "": report.loss,
            ", features in place": report.loss_replaced,
            ", zeros": report.loss_ablated,
        }
        rows = [(f"loss{name}", f"{loss:.4f}") for name, loss in losses.items()] + rows
        rows.insert(0, ("loss recovered", f"{report.loss_recovered:.4f}"))
    title = f"{trained.kind} of {', '.join(dict.fromkeys((*trained.reads, *trained.writes)))}"
    speed = f"{trained.tokens:,} tokens, {trained.tokens_per_second:,.0f} a second; saved in {output}"
    parts = [
        table(f"{title}, {trained.n_features:,} features, on {report.tokens:,} held-out tokens",
              ("measure", ">value"), rows),
        speed,
    ]  # fmt: skip
    return View(trained, parts, drawing("circuits:draw_training", trained), trained.notes)


def show(
    model: ModelArgument,
    features: Path,
    corpus: str | None = None,
    *,
    feature: Repeated = (),
    text: Repeated = (),
    top: int = 5,
    limit: int = 30_000,
) -> View:
    """Show features: their strongest examples in a text, what they promote, how often they are active.

    Args:
        features (FEATURES): a folder that features train or SAELens wrote
        corpus (CORPUS): a file, a folder or an embedded corpus; default: stdlib-docs; for an encoder-decoder,
            dates
        feature (NUMBER): a feature, shown in full; may be repeated; default: those with the highest
            activations
        text: a text in place of a corpus; source, tab, target for an encoder-decoder
        top: examples, tokens and neighbours of each
        limit: most tokens of the corpus to read; 0: all

    For example:
      clearhead features show my-model/ features/
      clearhead features show my-model/ features/ book.txt --feature 17 --plot f.png
    """
    refuse(bool(text) and corpus is not None, "a corpus and --text were both given: choose one")
    refuse(top < 1 or limit < 0, "--top must be 1 or more, and --limit a number of tokens, 0 for all")
    wrong = next((number for number in feature if not number.isdecimal()), None)
    refuse(wrong is not None, f'--feature "{wrong}" is no number of a feature')
    from clearhead.app.commands.learned import corpus_inputs, neuron_list, neuron_tables
    from clearhead.inside.features.dictionary import load
    from clearhead.inside.features.report import show_features

    dictionary = load(features)
    m = model()
    dictionary.to(next(m.model.parameters()).device)
    numbers = [int(number) for number in dict.fromkeys(feature)]
    shown = show_features(m, dictionary, corpus_inputs(m, corpus, text), numbers, top, limit=limit or None)
    columns: dict[str, Column] = {
        "feature": "{.name}",
        ">highest": "{.activation:.2f}",
        ">active": "{.density:.3%}",
        "nearest, cosine": lambda one: ", ".join(f"{near} {cosine:.2f}" for near, cosine in one.nearest[:3]),
    }
    title = f"{features}: {dictionary.kind} of {dictionary.at}, {dictionary.n_features:,} features"
    tables = [part for feature in shown.features for part in neuron_tables(feature)]
    parts = [
        listing(title, columns, shown.features),
        *(tables if feature else [neuron_list(list(shown.features))]),
        f"{shown.tokens:,} tokens read. Promoted tokens: {shown.note}.",
    ]
    return View(shown, parts, drawing("models:draw_neuron", shown.features[0]))
