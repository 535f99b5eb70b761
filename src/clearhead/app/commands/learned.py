"""Commands that measure what a model has learned: heads, probe."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional

from clearhead.app.commands.common import (
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
    show_result,
)
from clearhead.app.report import table
from clearhead.errors import refuse
from clearhead.learn.data.files import missing, read_lines
from clearhead.learn.data.tables import counted

if TYPE_CHECKING:
    from rich.table import Table

    from clearhead.inside import alignments
    from clearhead.inside.heads import HeadRoles
    from clearhead.inside.probe import Probes

ROLE_TEXTS = 50  # of a treebank that roles are measured on, where no text is given
LEAST = 50  # arcs of a relation that is shown in the table
RANKED = 10  # heads of an alignment that are shown in the table
LIFT = 0.1  # above an indifferent head, for a second role to be shown
COLUMNS = (
    "of a treebank: upos, xpos, deprel, relation (deprel without subtypes), arc (where the governor stands), "
    "lemma, feats.Number, ...; default: upos. Other data has one column"
)
KINDS = {"words": "each word type", "texts": "each text", "images": "each image"}


def heads(
    folder: Folder,
    texts: Annotated[
        Positional[tuple[str, ...]],
        option(
            "texts, or images for a model of patches; default: sentences from Python's standard library",
            metavar="TEXT",
        ),
    ] = (),
    file: Annotated[Path | None, option("a file of texts, one on each line", aliases=("--data",))] = None,
    treebank: Annotated[
        Path | None, option("sentences with their trees: FILE.conllu or FILE.conllu.gz")
    ] = None,
    alignment: Annotated[
        Path | None,
        option('pairs of spans, a JSON object on each line: {"text", "pairs": [[[0, 3], [4, 7]]]}'),
    ] = None,
    limit: Annotated[int | None, option("most texts, sentences and alignments to read")] = None,
    seed: Annotated[int, option("random seed of the sequences that show induction")] = 0,
    device: Device = "auto",
    tokenizer: Tokenizer = None,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Show what each attention head does: its role, and what it follows in a treebank or an alignment.

    Roles: previous, next, itself, first (a sink), separator (a sink), same (token), rare (token), position (a
    fixed distance), local, uniform, induction. Each score stands beside that of an indifferent head.

    For example:
      clearhead heads my-model/ --plot heads.png
      clearhead heads my-model/ "The cat sat on the mat." "The dog saw the cat."
      clearhead heads my-model/ --treebank dev.conllu.gz --limit 500 --json
    """
    check_inputs(folder, plot)
    refuse(limit is not None and limit < 1, f"limit {limit} leaves nothing to read: ask for 1 or more")
    from clearhead.app.plot.parts import role_map
    from clearhead.inside import alignments
    from clearhead.inside.heads import head_roles
    from clearhead.inside.names import unpatterned
    from clearhead.learn.data.treebank import read_treebank

    given = [*texts, *([] if file is None else _lines(file))][:limit]
    sentences = None if treebank is None else read_treebank(treebank, limit)
    pairs = None if alignment is None else alignments.read_alignments(alignment)[:limit]
    model = load_model(folder, tokenizer=tokenizer, device=device)
    if not given and sentences is not None:
        given = [sentence.text for sentence in sentences[:ROLE_TEXTS]]
    roles = head_roles(model, given or None, seed)
    print_notes(unpatterned(model.config))
    followed = None if sentences is None else alignments.syntax(model, sentences)
    agreed = None if pairs is None else alignments.agreement(model, pairs)
    found = {"roles": roles, "syntax": followed, "agreement": agreed}
    show_result(
        {name: part.to_dict() for name, part in found.items() if part is not None},
        json,
        [
            _roles_table(roles, folder),
            *([_syntax_table(followed)] if followed is not None else []),
            *([_agreement_table(agreed)] if agreed is not None else []),
        ],
        plot,
        lambda: role_map(roles, folder.absolute().name, followed),
    )


def _lines(file: Path) -> list[str]:
    """Return the texts of a file, one from each line that is not empty."""
    if not file.exists():
        raise missing(file)
    lines = [line for _, line in read_lines(file) if line.strip()]
    refuse(not lines, f"{file} is empty: there is no text in it")
    return lines


def _roles_table(found: HeadRoles, folder: Path) -> Table:
    from clearhead.inside.heads import MIXED

    rows = []
    for at, (head, role) in enumerate(zip(found.heads, found.roles)):
        lifts = {one: float(found.lift(one)[at]) for one in found.scores if one not in (role, "uniform")}
        clear = [one for one, lift in lifts.items() if not math.isnan(lift) and lift >= LIFT]
        next_best = sorted(clear, key=lambda one: -lifts[one])[:2]
        own = [
            f"{values[role][at]:.2f}" if role != MIXED else "" for values in (found.scores, found.baselines)
        ]
        where = f" {found.distances[at]:+}" if role == "position" else ""
        others = ", ".join(f"{one} {found.scores[one][at]:.2f}" for one in next_best)
        rows.append((str(head), role + where, *own, f"{found.entropy[at]:.2f}", others))
    numbers = {"head": len(found.heads), "text": found.texts, "token": found.tokens}
    heads, texts, tokens = (counted(number, word) for word, number in numbers.items())
    headings = ("head", "role", ">score", ">uniform head", ">entropy, bits", "next best")
    return table(f"{folder}: {heads} over {texts}, {tokens}", headings, rows)


def _syntax_table(found: alignments.Syntax) -> Table:
    rows = (
        (
            row.name,
            f"{row.arcs:,}",
            row.head,
            row.direction.removeprefix("to "),
            f"{100 * row.accuracy:.1f}",
            f"{100 * row.held_out:.1f}",
            f"{100 * row.baseline:.1f} at {row.distance:+}",
            f"{100 * row.gain:+.1f}",
        )
        for row in found.table(LEAST) or found.table()
    )
    return table(
        f"{found.sentences:,} sentences: the head that follows each relation best, % of arcs; "
        "baseline: a fixed distance",
        ("relation", ">arcs", "head", "looks at", ">right", ">held out", ">baseline", ">gain"),
        rows,
    )


def _agreement_table(found: alignments.Agreement) -> Table:
    rows = (
        (
            row["head"],
            row["direction"],
            f"{100 * row['accuracy']:.1f}",
            f"{100 * row['chance']:.1f}",
            f"{row['attention']:.2f}",
        )
        for row in found.ranking()[:RANKED]
    )
    left = f"; {found.skipped} without tokens left out" if found.skipped else ""
    title = f"agreement with {counted(found.pairs, 'pair')}{left}"
    return table(title, ("head", "direction", ">right, %", ">chance, %", ">attention"), rows)


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
    model = load_model(folder, tokenizer=tokenizer, device=device, plot=plot)
    from clearhead.app.plot.states import probe_figure
    from clearhead.inside.probe import probe as run

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
    parts = _probe_parts(found, folder)
    show_result(found.to_dict(), json, parts, plot, lambda: probe_figure(found, folder.absolute().name))


def _probe_parts(found: Probes, folder: Path) -> Iterator[Any]:
    rows = (
        (
            layer.name,
            f"{layer.accuracy:.4f}",
            " to ".join(f"{end:.4f}" for end in layer.interval),
            f"{layer.control:.4f}",
            f"{layer.selectivity:+.4f}",
        )
        for layer in found.layers
    )
    counts = f"{found.train:,} {found.unit} to train on, {found.test:,} to test on"
    title = f"{folder}: {found.column}, {len(found.labels)} labels; {counts}"
    yield table(title, ("layer", ">accuracy", ">95 % interval", ">control", ">selectivity"), rows)
    by_type = f"most frequent label of {KINDS[found.unit]} {found.by_type:.4f}"
    yield f"most frequent label {found.majority:.4f}; {by_type}"
    if found.unit == "words":
        yield f"{found.seen:.1%} of the words tested have a type that is in the training words"
