"""Commands that read the weights of a model as vectors and memories: geometry, memories."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, UseAppendAction, arg

import clearhead as ch
from clearhead.app.commands.common import Folder, Json, Plot, load_model, option, show_result
from clearhead.app.report import Cell, table
from clearhead.errors import refuse
from clearhead.learn.data.plan import DataPlan

if TYPE_CHECKING:
    from rich.table import Table

    from clearhead.inside.geometry import Nearest, PositionMap, Projection, SameWord
    from clearhead.inside.memories import Found, Memories, Neuron
    from clearhead.inside.neurons import Given

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
FORMS = (
    "neighbours WORD; analogy A B C; map [WORDS]; positions and similarity (of positions); "
    "word WORD SENTENCE SENTENCE"
)
SIDE = 18  # letters of a context on each side: it stays on one line of 80 columns
SHOWN = 5  # contexts and tokens of each neuron, where many neurons are listed


def geometry(
    folder: Folder,
    what: Annotated[Positional[What], option(FORMS, metavar="WHAT")],
    words: Annotated[Positional[tuple[str, ...]], option("what WHAT takes", metavar="WORDS")] = (),
    k: Annotated[
        int | None,
        option("how many neighbours, default: 10; or tokens on a map without words, default: 60"),
    ] = None,
    vectors: Annotated[
        Literal["input", "output"],
        option("vectors that tokens are read as, or that the head compares with", name="table"),
    ] = "input",
    length: Annotated[
        int | None, option("how many positions; default: what the model takes, 64 at most")
    ] = None,
    stack: Annotated[
        Literal["main", "encoder"], option("whose positions, in a model with an encoder and a decoder")
    ] = "main",
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Show where words and positions stand: neighbours, analogies, maps, one word in two sentences.

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
    model = load_model(folder, plot=plot)
    from clearhead.app.plot import states as pictures
    from clearhead.inside import geometry as inside

    views: dict[What, tuple[Callable[[], Any], Callable[[Any], Table], Callable[[Any], Any]]] = {
        "neighbours": (
            lambda: inside.neighbours(model, words[0], k or LISTED, vectors),
            _nearest_table,
            pictures.draw_nearest,
        ),
        "analogy": (
            lambda: inside.analogy(model, words[0], words[1], words[2], k or LISTED, vectors),
            _nearest_table,
            pictures.draw_nearest,
        ),
        "map": (
            lambda: inside.projection(model, words or None, k or ON_A_MAP, vectors),
            _map_table,
            pictures.draw_projection,
        ),
        "positions": (
            lambda: inside.position_map(model, length, stack),
            _position_table,
            pictures.draw_positions,
        ),
        "similarity": (
            lambda: inside.position_similarity(model, length, stack),
            _position_table,
            pictures.draw_positions,
        ),
        "word": (
            lambda: inside.same_word(model, words[1], words[2], words[0]),
            _word_table,
            pictures.draw_same_word,
        ),
    }
    find, make_table, draw = views[what]
    found = find()
    show_result(found.to_dict(), json, [make_table(found)], plot, lambda: draw(found))


def _nearest_table(found: Nearest) -> Table:
    means = [
        f"{word} is the mean of {' '.join(tokens)}" for word, tokens in found.words.items() if len(tokens) > 1
    ]
    return table(
        f"nearest to {found.query} ({found.table} table)",
        ("token", ">id", ">score"),
        zip(found.labels, map(str, found.ids), (f"{score:.4f}" for score in found.scores)),
        "; ".join(means) or None,
    )


def _map_table(found: Projection) -> Table:
    return table(
        f"words of the {found.table} table, with the share of their variance along each axis",
        ("word", *(f">component {axis + 1} ({share:.1%})" for axis, share in enumerate(found.explained))),
        _number_rows(found.labels, found.points, "+.4f"),
    )


def _position_table(found: PositionMap) -> Table:
    height, width = found.values.shape
    return table(
        f"{found.scheme} positions, {height} x {width}: {found.measure}; --plot draws all of it",
        (found.row_name, *(f">{name}" for name in found.columns[:COLUMNS])),
        _number_rows(found.rows, found.values[:, :COLUMNS], ".3f"),
        f"columns: {found.column_name}",
    )


def _word_table(found: SameWord) -> Table:
    return table(
        f"{found.word} in two sentences, as {' and '.join(' '.join(names) for names in found.tokens)}",
        ("after layer", ">likeness", ">other tokens"),
        _number_rows(found.layers, zip(found.similarity, found.baseline), ".4f"),
    )


def _number_rows(names: Iterable[str], numbers: Iterable[Iterable[float]], form: str) -> Iterator[list[str]]:
    """Give a row of cells for each name: the name, and its numbers in the form given."""
    for name, row in zip(names, numbers):
        yield [name, *(format(float(value), form) for value in row)]


def memories(
    folder: Folder,
    corpus: Annotated[
        Positional[str | None],
        option(
            "a file, a folder or an embedded corpus; default: stdlib-docs; for an encoder-decoder, dates",
            metavar="CORPUS",
        ),
    ] = None,
    text: Annotated[
        UseAppendAction[tuple[str, ...]],
        arg(
            help="a text, or an image file, in place of a corpus; source, tab, target for an encoder-decoder"
        ),
    ] = (),
    layer: Annotated[str | None, option("a layer, such as 2 or encoder.0; default: all")] = None,
    neuron: Annotated[
        UseAppendAction[tuple[str, ...]], arg(help="a neuron, such as 2.117 or encoder.0.5")
    ] = (),
    token: Annotated[
        str | None, option("the neurons that promote this token or class, and those it fires")
    ] = None,
    top: Annotated[int, option("contexts and tokens kept for each neuron, and neurons listed")] = 10,
    sort: Annotated[
        Literal["agreement", "activation"] | None,
        option("order of the list; default: by agreement where it is known"),
    ] = None,
    limit: Annotated[int, option("most tokens of the corpus to read; 0: all")] = 30_000,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Show the feed-forward as a memory: what fires each neuron, what it promotes, and whether the two agree.

    For example:
      clearhead memories my-model/ corpus.txt
      clearhead memories my-model/ corpus.txt --neuron 2.117 --plot neuron.png
      clearhead memories my-model/ pairs.tsv --layer encoder.0 --sort activation
      clearhead memories my-model/ --token the
    """
    refuse(bool(text) and corpus is not None, "a corpus and --text were both given: choose one")
    refuse(limit < 0, f"limit {limit} is negative: it is a number of tokens, 0 for all")
    model = load_model(folder, plot=plot)
    from clearhead.inside.memories import memories as run

    found = run(model, _inputs(model, corpus, text), layer, top, neuron or None, limit or None)
    body: dict[str, Any] = {"tokens": found.tokens, "note": found.note}
    if token is not None:
        hits = found.search(token, top)
        body |= hits.to_dict()
        tables = [_search_table(hits)]
    else:
        listed = [found.neuron(name) for name in neuron] or found.ranked(sort, top)
        body |= {"top": found.top, "depth": found.depth, "neurons": [one.to_dict() for one in listed]}
        tables = [_list_table(listed)]
        if neuron:
            tables = [shown for one in listed for shown in _neuron_tables(one)]
    notes = [
        f"{found.tokens:,} tokens read, {found.top} contexts kept for each neuron.",
        *([f"Agreement: the answer is among the first {found.depth} promoted."] if found.agrees else ()),
        f"Promoted tokens: {found.note}.",
    ]
    show_result(body, json, [*tables, *notes], plot, lambda: _draw(found, neuron, sort))


def _draw(found: Memories, neuron: tuple[str, ...], sort: Literal["agreement", "activation"] | None) -> Any:
    """Draw a neuron, where one is named or there is no agreement to draw, else the agreement of all."""
    from clearhead.app.plot.parts import draw_agreement, draw_neuron

    if found.agrees and not neuron:
        return draw_agreement(found)
    return draw_neuron(found.neuron(neuron[0]) if neuron else found.ranked(sort, 1)[0])


def _inputs(model: ch.Model, corpus: str | None, texts: tuple[str, ...]) -> Iterator[Given]:
    """Give what the model is to read, texts, pairs or images: `texts`, else the examples of a data set."""
    from clearhead.learn.data.examples import Images, Pair, Question
    from clearhead.learn.tasks.corpus import open_data

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


def _list_table(listed: list[Neuron]) -> Table:
    rows: list[Sequence[Cell]] = []
    for memory in listed:
        shares = {"agreement": memory.agreement, "chance": memory.chance}
        figures = [f"{name} {value:.0%}" for name, value in shares.items() if value is not None]
        about = "\n".join([memory.name, *figures, f"highest {memory.activation:.2f}"])
        promoted = "\n".join(name for name, _ in memory.promoted[:SHOWN])
        contexts = [piece for context in memory.contexts[:SHOWN] for piece in ("\n", *_context(context))]
        rows += [(about, promoted, contexts[1:]), ()]
    return table("what fires neurons, and what they promote", ("neuron", "promotes", "fired by"), rows)


def _neuron_tables(memory: Neuron) -> list[Table]:
    """Show what fires a neuron, and below what it promotes and suppresses."""
    fired = [
        (f"{context.activation:.3f}", _context(context), context.answer or "") for context in memory.contexts
    ]
    promoted, suppressed = (
        [(name, f"{value:+.3f}") for name, value in side] for side in (memory.promoted, memory.suppressed)
    )
    agreed = f", agreement {memory.agreement:.0%}, by chance {memory.chance:.0%}"
    title = f"neuron {memory.name}{'' if memory.agreement is None else agreed}"
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
