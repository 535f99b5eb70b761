"""Analyses of what a model has learned: heads, probe, geometry, memories."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import clearhead as ch
from clearhead.app.commands.common import check_inputs
from clearhead.app.report import Cell, Column, listing, table
from clearhead.app.views import ModelArgument, OnProgress, Repeated, View, drawing
from clearhead.errors import refuse
from clearhead.learn.data.files import missing, read_lines
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.data.tables import counted

if TYPE_CHECKING:
    from rich.table import Table

    from clearhead.inside import alignments
    from clearhead.inside.geometry import Nearest, PositionMap, Projection, SameWord
    from clearhead.inside.heads import HeadRoles
    from clearhead.inside.memories import Found, Given, Neuron
    from clearhead.inside.probe import Probes

ROLE_TEXTS = 50  # of a treebank that roles are measured on, where no text is given
LEAST = 50  # arcs of a relation that is shown in the table
RANKED = 10  # heads of an alignment that are shown in the table
LIFT = 0.1  # above an indifferent head, for a second role to be shown
KINDS = {"words": "each word type", "texts": "each text", "images": "each image"}
LISTED, ON_A_MAP, COLUMNS = 10, 60, 8
What = Literal["neighbours", "analogy", "map", "positions", "similarity", "word"]
TAKES = {  # how many words each takes: least, most, in words
    "neighbours": (1, 1, "one word"),
    "analogy": (3, 3, "three words: A is to B as C is to what"),
    "map": (0, None, "words, or none for the most frequent tokens"),
    "positions": (0, 0, "no words"),
    "similarity": (0, 0, "no words"),
    "word": (3, 3, "a word and two sentences that have it"),
}
SIDE = 18  # letters of a context on each side: it stays on one line of 80 columns
SHOWN = 5  # contexts and tokens of each neuron, where many neurons are listed
Sort = Literal["agreement", "activation"]


# Heads ------------------------------------------------------------------------------------------------------


def heads(
    model: ModelArgument,
    texts: tuple[str, ...] = (),
    *,
    file: Path | None = None,
    treebank: Path | None = None,
    alignment: Path | None = None,
    limit: int | None = None,
    seed: int = 0,
    plot: Path | None = None,
) -> View:
    """Show what each attention head does: its role, and what it follows in a treebank or an alignment.

    Roles: previous, next, itself, first (a sink), separator (a sink), same (token), rare (token), position (a
    fixed distance), local, uniform, induction. Each score stands next to that of an indifferent head.

    Args:
        texts (TEXT): texts, or images for a model of patches; default: sentences from Python's standard
            library
        file (--data): a file of texts, one on each line
        treebank: sentences with their trees: FILE.conllu or FILE.conllu.gz
        alignment: pairs of spans, a JSON object on each line: {"text", "pairs": [[[0, 3], [4, 7]]]}
        limit: most texts, sentences and alignments to read
        seed: random seed of the sequences that show induction

    For example:
      clearhead heads my-model/ --plot heads.png
      clearhead heads my-model/ "The cat sat on the mat." "The dog saw the cat."
      clearhead heads my-model/ --treebank dev.conllu.gz --limit 500 --json
    """
    check_inputs(model.folder, plot)
    refuse(limit is not None and limit < 1, f"limit {limit} leaves nothing to read: ask for 1 or more")
    from clearhead.inside import alignments
    from clearhead.inside.heads import head_roles
    from clearhead.inside.names import unpatterned
    from clearhead.learn.data.conll import read_treebank

    if file is not None and not file.exists():
        raise missing(file)
    lines = [] if file is None else [line for _, line in read_lines(file) if line.strip()]
    refuse(file is not None and not lines, f"{file} is empty: there is no text in it")
    read = [*texts, *lines][:limit]
    sentences = None if treebank is None else read_treebank(treebank, limit)
    pairs = None if alignment is None else alignments.read_alignments(alignment)[:limit]
    m = model()
    if not read and sentences is not None:
        read = [sentence.text for sentence in sentences[:ROLE_TEXTS]]
    roles = head_roles(m, read or None, seed)
    followed = None if sentences is None else alignments.syntax(m, sentences)
    agreed = None if pairs is None else alignments.agreement(m, pairs)
    results = {"roles": roles, "syntax": followed, "agreement": agreed}
    return View(
        {name: part.to_dict() for name, part in results.items() if part is not None},
        [
            _roles_table(roles, model.folder),
            *([_syntax_table(followed)] if followed is not None else []),
            *([_agreement_table(agreed)] if agreed is not None else []),
        ],
        drawing("models:role_map", roles, model.folder.absolute().name, followed),
        unpatterned(m.config),
    )


def _roles_table(roles: HeadRoles, folder: Path) -> Table:
    from clearhead.inside.heads import MIXED

    rows = []
    for at, (head, role) in enumerate(zip(roles.heads, roles.roles)):
        lifts = {
            other: float(roles.lift(other)[at]) for other in roles.scores if other not in (role, "uniform")
        }
        clear = [other for other, lift in lifts.items() if not math.isnan(lift) and lift >= LIFT]
        next_best = sorted(clear, key=lambda one: -lifts[one])[:2]
        own = [
            f"{values[role][at]:.2f}" if role != MIXED else "" for values in (roles.scores, roles.baselines)
        ]
        where = f" {roles.distances[at]:+}" if role == "position" else ""
        others = ", ".join(f"{other} {roles.scores[other][at]:.2f}" for other in next_best)
        rows.append((str(head), role + where, *own, f"{roles.entropy[at]:.2f}", others))
    numbers = {"head": len(roles.heads), "text": roles.texts, "token": roles.tokens}
    heads, texts, tokens = (counted(number, word) for word, number in numbers.items())
    headings = ("head", "role", ">score", ">uniform head", ">entropy, bits", "next best")
    return table(f"{folder}: {heads} over {texts}, {tokens}", headings, rows)


def _syntax_table(syntax: alignments.Syntax) -> Table:
    best = f"{syntax.sentences:,} sentences: the head that follows each relation best"
    columns: dict[str, Column] = {
        **{"relation": "{.name}", ">arcs": "{.arcs:,}", "head": "{.head}"},
        "looks at": lambda row: row.direction.removeprefix("to "),
        ">right": lambda row: f"{100 * row.accuracy:.1f}",
        ">held out": lambda row: f"{100 * row.held_out:.1f}",
        ">baseline": lambda row: f"{100 * row.baseline:.1f} at {row.distance:+}",
        ">gain": lambda row: f"{100 * row.gain:+.1f}",
    }
    title = f"{best}, % of arcs; baseline: a fixed distance"
    return listing(title, columns, syntax.table(LEAST) or syntax.table())


def _agreement_table(agreement: alignments.Agreement) -> Table:
    left = f"; {agreement.skipped} without tokens left out" if agreement.skipped else ""
    columns: dict[str, Column] = {
        **{"head": "{[head]}", "direction": "{[direction]}"},
        ">right, %": lambda row: f"{100 * row['accuracy']:.1f}",
        ">chance, %": lambda row: f"{100 * row['chance']:.1f}",
        ">attention": "{[attention]:.2f}",
    }
    title = f"agreement with {counted(agreement.pairs, 'pair')}{left}"
    return listing(title, columns, agreement.ranking()[:RANKED])


# Probes -----------------------------------------------------------------------------------------------------


def probe(
    model: ModelArgument,
    data: str,
    *,
    column: str | None = None,
    test: str | None = None,
    stack: Literal["encoder", "decoder"] | None = None,
    pool: Literal["mean", "first", "last"] | None = None,
    words: int = 20_000,
    classes: int = 200,
    penalty: float = 0.005,
    iterations: int = 100,
    seed: int = 0,
    on_progress: OnProgress = lambda stage, done, total: None,
) -> View:
    """Measure how well each layer shows a property, next to a control task that can only be learned by heart.

    Args:
        data (FILE): a treebank (CoNLL-U), tagged words, or texts or images with labels
        column: of a treebank: upos, xpos, deprel, relation (deprel without subtypes), arc (where the
            governor stands), lemma, feats.Number, ...; default: upos. Other data has one column
        test: a file to test on; default: a fifth of the sentences
        stack: which stack, of a model that has both; default: the encoder
        pool: vector of a word from its tokens; default: mean. Of a text: as the model does it, else mean
        words: most words to train on, and to test on; whole sentences are drawn
        classes: most labels that a column may have
        penalty: L2 penalty: times half the squared weights of a probe
        iterations: most iterations of fitting a probe
        seed: random seed of the split, the sentences, the control task and the intervals

    For example:
      clearhead probe my-model/ train.conllu --test dev.conllu --plot upos.png
      clearhead probe my-model/ train.conllu --column feats.Number --words 5000
      clearhead probe my-model/ reviews.tsv --json
    """
    m = model()
    from clearhead.inside.probe import probe as run

    probes = run(
        m, data, column, test, stack=stack, pool=pool, words=words, classes=classes, penalty=penalty,
        iterations=iterations, seed=seed, on_progress=on_progress,
    )  # fmt: skip
    parts = _probe_parts(probes, model.folder)
    return View(
        probes, parts, drawing("models:probe_figure", probes, model.folder.absolute().name), probes.said
    )


def _probe_parts(probes: Probes, folder: Path) -> Iterator[Any]:
    columns: dict[str, Column] = {
        **{"layer": "{.name}", ">accuracy": "{.accuracy:.4f}"},
        ">95 % interval": lambda layer: " to ".join(f"{end:.4f}" for end in layer.interval),
        **{">control": "{.control:.4f}", ">selectivity": "{.selectivity:+.4f}"},
    }
    counts = f"{probes.train:,} {probes.unit} to train on, {probes.test:,} to test on"
    title = f"{folder}: {probes.column}, {len(probes.labels)} labels; {counts}"
    yield listing(title, columns, probes.layers)
    by_type = f"most frequent label of {KINDS[probes.unit]} {probes.by_type:.4f}"
    yield f"most frequent label {probes.majority:.4f}; {by_type}"
    if probes.unit == "words":
        yield f"{probes.seen:.1%} of the words tested have a type that is in the training words"


# Geometry ---------------------------------------------------------------------------------------------------


def geometry(
    model: ModelArgument,
    what: What,
    words: tuple[str, ...] = (),
    *,
    k: int | None = None,
    table: Literal["input", "output"] = "input",
    length: int | None = None,
    stack: Literal["main", "encoder"] = "main",
) -> View:
    """Show where words and positions stand: neighbours, analogies, maps, one word in two sentences.

    Args:
        what (WHAT): neighbours WORD; analogy A B C; map [WORDS]; positions and similarity (of positions);
            word WORD SENTENCE SENTENCE
        words (WORDS): what WHAT takes
        k: how many neighbours, default: 10; or tokens on a map without words, default: 60
        table: vectors that tokens are read as, or that the output layer compares with
        length: how many positions; default: what the model takes, 64 at most
        stack: whose positions, in a model with an encoder and a decoder

    For example:
      clearhead geometry my-model/ neighbours king
      clearhead geometry my-model/ analogy man king woman --k 5
      clearhead geometry my-model/ map red green blue one two three --plot map.png
      clearhead geometry my-model/ positions --length 40 --plot positions.png
      clearhead geometry my-model/ word bank "the river bank" "the bank lends"
    """
    least, most, takes = TAKES[what]
    fits = least <= len(words) and (most is None or len(words) <= most)
    refuse(not fits, f"{what} takes {takes}, and {len(words)} were given")
    refuse(k is not None and k < 1, f"k {k} must be 1 or more")
    m = model()
    from clearhead.inside import geometry as inside

    if what in ("neighbours", "analogy"):
        find: Any = inside.neighbours if what == "neighbours" else inside.analogy
        nearest = find(m, *words, k or LISTED, table)
        return View(nearest, [_nearest_table(nearest)], drawing("models:draw_nearest", nearest))
    if what == "map":
        plane = inside.projection(m, words or None, k or ON_A_MAP, table)
        return View(plane, [_map_table(plane)], drawing("models:draw_projection", plane))
    if what == "word":
        states = inside.same_word(m, words[1], words[2], words[0])
        return View(states, [_word_table(states)], drawing("models:draw_same_word", states))
    positions = (inside.position_map if what == "positions" else inside.position_similarity)(m, length, stack)
    return View(positions, [_position_table(positions)], drawing("models:draw_positions", positions))


def _nearest_table(nearest: Nearest) -> Table:
    means = [
        f"{word} is the mean of {' '.join(tokens)}"
        for word, tokens in nearest.words.items()
        if len(tokens) > 1
    ]
    return table(
        f"nearest to {nearest.query} ({nearest.table} table)",
        ("token", ">id", ">score"),
        zip(nearest.labels, map(str, nearest.ids), (f"{score:.4f}" for score in nearest.scores)),
        "; ".join(means) or None,
    )


def _map_table(projection: Projection) -> Table:
    return table(
        f"words of the {projection.table} table, with the share of their variance along each axis",
        (
            "word",
            *(f">component {axis + 1} ({share:.1%})" for axis, share in enumerate(projection.explained)),
        ),
        _number_rows(projection.labels, projection.points, "+.4f"),
    )


def _position_table(positions: PositionMap) -> Table:
    height, width = positions.values.shape
    return table(
        f"{positions.scheme} positions, {height} x {width}: {positions.measure}; --plot draws all of it",
        (positions.row_name, *(f">{name}" for name in positions.columns[:COLUMNS])),
        _number_rows(positions.rows, positions.values[:, :COLUMNS], ".3f"),
        f"columns: {positions.column_name}",
    )


def _word_table(word: SameWord) -> Table:
    return table(
        f"{word.word} in two sentences, as {' and '.join(' '.join(names) for names in word.tokens)}",
        ("after layer", ">likeness", ">other tokens"),
        _number_rows(word.layers, zip(word.similarity, word.baseline), ".4f"),
    )


def _number_rows(names: Iterable[str], numbers: Iterable[Iterable[float]], form: str) -> Iterator[list[str]]:
    """Give a row of cells for each name: the name, and its numbers in the form given."""
    for name, row in zip(names, numbers):
        yield [name, *(format(float(value), form) for value in row)]


# Memories ---------------------------------------------------------------------------------------------------


def memories(
    model: ModelArgument,
    corpus: str | None = None,
    *,
    text: Repeated = (),
    layer: str | None = None,
    neuron: Repeated = (),
    token: str | None = None,
    top: int = 10,
    sort: Sort | None = None,
    limit: int = 30_000,
) -> View:
    """Show the feed-forward as a memory: what fires each neuron, what it promotes, and whether the two agree.

    Args:
        corpus (CORPUS): a file, a folder or an embedded corpus; default: stdlib-docs; for an encoder-decoder,
            dates
        text: a text, or an image file, in place of a corpus; source, tab, target for an encoder-decoder
        layer: a layer, such as 2 or encoder.0; default: all
        neuron: a neuron, such as 2.117 or encoder.0.5
        token: the neurons that promote this token or class, and those it fires
        top: contexts and tokens kept for each neuron, and neurons listed
        sort: order of the list; default: by agreement where it is known
        limit: most tokens of the corpus to read; 0: all

    For example:
      clearhead memories my-model/ corpus.txt
      clearhead memories my-model/ corpus.txt --neuron 2.117 --plot neuron.png
      clearhead memories my-model/ pairs.tsv --layer encoder.0 --sort activation
      clearhead memories my-model/ --token the
    """
    refuse(bool(text) and corpus is not None, "a corpus and --text were both given: choose one")
    refuse(limit < 0, f"limit {limit} is negative: it is a number of tokens, 0 for all")
    m = model()
    from clearhead.inside.memories import memories as run

    firing = run(m, corpus_inputs(m, corpus, text), layer, top, neuron or None, limit or None)
    body: dict[str, Any] = {"tokens": firing.tokens, "note": firing.note}
    if token is not None:
        hits = firing.search(token, top)
        body |= hits.to_dict()
        tables = [_search_table(hits)]
    else:
        listed = [firing.neuron(name) for name in neuron] or firing.ranked(sort, top)
        body |= {"top": firing.top, "depth": firing.depth, "neurons": [memory.to_dict() for memory in listed]}
        tables = [neuron_list(listed)]
        if neuron:
            tables = [shown for memory in listed for shown in neuron_tables(memory)]
    notes = [
        f"{firing.tokens:,} tokens read, {firing.top} contexts kept for each neuron.",
        *([f"Agreement: the answer is among the first {firing.depth} promoted."] if firing.agrees else ()),
        f"Promoted tokens: {firing.note}.",
    ]
    draw = drawing("models:draw_agreement", firing)
    if neuron or not firing.agrees:
        draw = drawing(
            "models:draw_neuron", firing.neuron(neuron[0]) if neuron else firing.ranked(sort, 1)[0]
        )
    return View(body, [*tables, *notes], draw)


def corpus_inputs(model: ch.Model, corpus: str | None, texts: tuple[str, ...]) -> Iterator[Given]:
    """Give what the model is to read, texts, pairs or images: `texts`, else the examples of a data set."""
    from clearhead.learn.data.examples import Images, Pair, Question
    from clearhead.learn.tasks.table import open_data

    both, images = model.config.family == "encoder-decoder", model.config.input != "tokens"
    for text in texts:
        source, tab, target = text.partition("\t")
        yield (source, target) if both and tab else text
    if texts:
        return
    refuse(
        corpus is None and images,
        "this model reads images: name a folder of them, or image files with --text",
    )
    corpus = corpus or ("dates" if both else "stdlib-docs")
    task = "seq2seq" if both else None
    rows = open_data(DataPlan(paths=(corpus,), task="image" if images else task), split=False).validation
    if isinstance(rows, Images):
        refuse(not images, f"{corpus} holds images, and this model reads text: name a file of text")
        yield from rows.pixels
        return
    for row in rows:
        if isinstance(row, Pair) and both:
            yield row.source, row.target
        else:
            yield row.context if isinstance(row, Question) else row.texts()[0]


def neuron_list(listed: list[Neuron]) -> Table:
    """Show neurons or features, with what they promote and what fires them."""
    rows: list[Sequence[Cell]] = []
    for memory in listed:
        shares = {"agreement": memory.agreement, "chance": memory.chance}
        figures = [f"{name} {value:.0%}" for name, value in shares.items() if value is not None]
        about = "\n".join([memory.name, *figures, f"highest {memory.activation:.2f}"])
        promoted = "\n".join(name for name, _ in memory.promoted[:SHOWN])
        contexts = [span for context in memory.contexts[:SHOWN] for span in ("\n", *_context(context))]
        rows += [(about, promoted, contexts[1:]), ()]
    return table(
        f"what fires {listed[0].kind}s, and what they promote", (listed[0].kind, "promotes", "fired by"), rows
    )


def neuron_tables(memory: Neuron) -> list[Table]:
    """Show what fires a neuron, and below what it promotes and suppresses."""
    fired = [
        (f"{context.activation:.3f}", _context(context), context.answer or "") for context in memory.contexts
    ]
    promoted, suppressed = (
        [(name, f"{value:+.3f}") for name, value in side] for side in (memory.promoted, memory.suppressed)
    )
    title = f"{memory.kind} {memory.name}"
    if memory.agreement is not None:
        title += f", agreement {memory.agreement:.0%}, by chance {memory.chance:.0%}"
    sides = _side_by_side((2, promoted), (2, suppressed))
    return [
        table(title, (">activation", "fired by", "goes on with"), fired),
        table("", ("promotes", ">by", "suppresses", ">by"), sides),
    ]


def _search_table(hits: Found) -> Table:
    promoting = [(name, f"{score:+.3f}") for name, score in hits.promoting]
    fired = [(name, f"{share:.0%}", f"{highest:.2f}") for name, share, highest in hits.fired]
    return table(
        f"neurons and the token {hits.token}",
        ("promoted by", ">score", "fires", ">share of contexts", ">highest"),
        _side_by_side((2, promoting), (3, fired)),
    )


def _side_by_side(*lists: tuple[int, list[Any]]) -> Iterator[list[Any]]:
    """Join lists of rows, each with its number of cells; a list that has ended gives empty cells."""
    for parts in zip_longest(*(rows for _, rows in lists)):
        yield [cell for part, (width, _) in zip(parts, lists) for cell in part or [""] * width]


def _context(context: Any) -> list[str | tuple[str, str]]:
    """Return a place of the corpus on one line, its token marked."""
    from clearhead.hub.tokens.text import VISIBLE

    breaks = str.maketrans({sign: shown for sign, shown in VISIBLE.items() if sign != " "})
    before, token, after = (part.translate(breaks) for part in (context.before, context.token, context.after))
    return [before[-SIDE:], (f"⟦{token}⟧", "bold"), after[:SIDE]]
