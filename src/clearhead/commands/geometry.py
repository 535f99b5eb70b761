"""The command `geometry`: where words and positions stand."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional

import clearhead as ch
from clearhead.commands.common import (
    Folder,
    Json,
    Plot,
    check_inputs,
    load_model,
    option,
    save_plot,
    show_result,
)
from clearhead.errors import refuse
from clearhead.report import table

if TYPE_CHECKING:
    from rich.table import Table

    from clearhead.inside.geometry import Nearest, PositionMap, Projection, SameWord

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
      clearhead geometry my-model/ word bank "the bank of the river" "the bank lends money" --json
    """
    least, most, takes = TAKES[what]
    fits = least <= len(words) and (most is None or len(words) <= most)
    refuse(not fits, f"{what} takes {takes}, and {len(words)} were given")
    refuse(k is not None and k < 1, f"k {k} must be 1 or more")
    check_inputs(folder, plot=plot)
    found, make_table, draw = _find(load_model(folder), what, words, k, vectors, length, stack)
    show_result(found.to_dict() | save_plot(plot, lambda: draw(found)), json, [make_table(found)])


def _find(
    model: ch.Model,
    what: What,
    words: tuple[str, ...],
    k: int | None,
    vectors: Literal["input", "output"],
    length: int | None,
    stack: Literal["main", "encoder"],
) -> tuple[Any, Callable[[Any], Table], Callable[[Any], Any]]:
    """Return what was asked for, the function that makes it a table, and the one that makes it a picture."""
    from clearhead.inside import geometry as inside
    from clearhead.plot import geometry as pictures

    match what:
        case "neighbours":
            nearest = inside.neighbours(model, words[0], k or LISTED, vectors)
            return nearest, _nearest_table, pictures.draw_nearest
        case "analogy":
            a, b, c = words
            nearest = inside.analogy(model, a, b, c, k or LISTED, vectors)
            return nearest, _nearest_table, pictures.draw_nearest
        case "map":
            projection = inside.projection(model, words or None, k or ON_A_MAP, vectors)
            return projection, _map_table, pictures.draw_projection
        case "word":
            word, first, second = words
            same = inside.same_word(model, first, second, word)
            return same, _word_table, pictures.draw_same_word
    make = inside.position_map if what == "positions" else inside.position_similarity
    return make(model, length, stack), _position_table, pictures.draw_positions


def _nearest_table(found: Nearest) -> Table:
    means = [
        f"{word} is the mean of {' '.join(tokens)}" for word, tokens in found.words.items() if len(tokens) > 1
    ]
    scores = (f"{score:.4f}" for score in found.scores)
    title = f"nearest to {found.query} ({found.table} table)"
    rows = zip(found.labels, map(str, found.ids), scores)
    return table(title, ("token", ">id", ">score"), rows, "; ".join(means) or None)


def _map_table(found: Projection) -> Table:
    axes = [f">component {axis + 1} ({share:.1%})" for axis, share in enumerate(found.explained)]
    rows = (
        (name, *(f"{value:+.4f}" for value in point))
        for name, point in zip(found.labels, found.points.tolist())
    )
    title = f"words of the {found.table} table, with the share of their variance along each axis"
    return table(title, ("word", *axes), rows)


def _position_table(found: PositionMap) -> Table:
    height, width = found.values.shape
    title = f"{found.scheme} positions, {height} x {width}: {found.measure}; --plot draws all of it"
    rows = (
        (name, *(f"{value:.3f}" for value in row[:COLUMNS]))
        for name, row in zip(found.rows, found.values.tolist())
    )
    headings = (found.row_name, *(f">{name}" for name in found.columns[:COLUMNS]))
    return table(title, headings, rows, f"columns: {found.column_name}")


def _word_table(found: SameWord) -> Table:
    tokens = " and ".join(" ".join(names) for names in found.tokens)
    pairs = zip(found.layers, found.similarity.tolist(), found.baseline.tolist())
    rows = ((layer, f"{own:.4f}", f"{other:.4f}") for layer, own, other in pairs)
    title = f"{found.word} in two sentences, as {tokens}"
    return table(title, ("after layer", ">likeness", ">other tokens"), rows)
