"""`clearhead geometry`: where words and positions stand."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from clearhead.commands.common import Folder, Json, show_result

if TYPE_CHECKING:
    from rich.table import Table

    from clearhead.api import Model
    from clearhead.inside.geometry import Nearest, Projection, SameWord
    from clearhead.inside.position_maps import PositionMap

LISTED, ON_A_MAP = 10, 60
What = Literal["neighbours", "analogy", "map", "positions", "similarity", "word"]
TAKES = {
    "neighbours": (1, 1, "one word"),
    "analogy": (3, 3, "three words: A is to B as C is to what"),
    "map": (0, None, "words, or none for the most frequent tokens"),
    "positions": (0, 0, "no words"),
    "similarity": (0, 0, "no words"),
    "word": (3, 3, "a word and two sentences that have it"),
}


def geometry(
    folder: Folder,
    what: Annotated[
        Positional[What],
        arg(
            metavar="WHAT",
            help="neighbours WORD; analogy A B C; map [WORDS]; positions and similarity (of positions); word WORD SENTENCE SENTENCE",
        ),
    ],
    words: Annotated[Positional[tuple[str, ...]], arg(metavar="WORDS", help="what WHAT takes")] = (),
    k: Annotated[
        int | None,
        arg(help="neighbours listed, 10 unless said; tokens on a map without words, 60 unless said"),
    ] = None,
    table: Annotated[
        Literal["input", "output"],
        arg(help="vectors that tokens are read as, or that the head compares with"),
    ] = "input",
    length: Annotated[int | None, arg(help="positions; default: what the model takes, 64 at most")] = None,
    stack: Annotated[
        Literal["main", "encoder"], arg(help="whose positions, where an encoder feeds a decoder")
    ] = "main",
    plot: Annotated[Path | None, arg(help="save a picture")] = None,
    json: Json = False,
) -> None:
    """Where words and positions stand: neighbours, analogies, a map; how positions are told apart; one word in two sentences.

    For example:
      clearhead geometry my-model/ neighbours king
      clearhead geometry my-model/ analogy man king woman --k 5
      clearhead geometry my-model/ map red green blue one two three --plot map.png
      clearhead geometry my-model/ positions --length 40 --plot positions.png
      clearhead geometry my-model/ word bank "the bank of the river" "the bank lends money" --json
    """
    from clearhead.api import load
    from clearhead.errors import InputError

    least, most, takes = TAKES[what]
    if len(words) < least or (most is not None and len(words) > most):
        raise InputError(f"{what} takes {takes}, and {len(words)} were given")
    if k is not None and k < 1:
        raise InputError(f"k {k} must be 1 or more")
    found, show, draw = _find(load(folder), what, words, k, table, length, stack)
    show_result(found.to_dict(), json, lambda console: console.print(show(found)))
    if plot is not None:
        from clearhead.plot.canvas import save

        print(f"saved {save(draw(found), plot)}", file=sys.stderr)


def _find(
    m: Model,
    what: What,
    words: tuple[str, ...],
    k: int | None,
    table: Literal["input", "output"],
    length: int | None,
    stack: Literal["main", "encoder"],
) -> tuple[Any, Callable[[Any], Table], Callable[[Any], Any]]:
    """What was asked for, how it becomes a table, and how a picture."""
    from clearhead.inside import geometry as inside
    from clearhead.plot import geometry as pictures

    if what == "neighbours":
        return inside.neighbours(m, words[0], k or LISTED, table), _nearest_table, pictures.draw_nearest
    if what == "analogy":
        a, b, c = words
        return inside.analogy(m, a, b, c, k or LISTED, table), _nearest_table, pictures.draw_nearest
    if what == "map":
        return inside.projection(m, words or None, k or ON_A_MAP, table), _map_table, pictures.draw_projection
    if what == "word":
        word, text_a, text_b = words
        return inside.same_word(m, text_a, text_b, word), _word_table, pictures.draw_same_word
    make = inside.position_map if what == "positions" else inside.position_similarity
    return make(m, length, stack), _position_table, pictures.draw_positions


def _nearest_table(found: Nearest) -> Table:
    from rich.table import Table
    from rich.text import Text

    several = [
        f"{word} is the mean of {' '.join(tokens)}" for word, tokens in found.words.items() if len(tokens) > 1
    ]
    caption = Text("; ".join(several)) if several else None
    table = Table(
        "token", "id", "score", title=Text(f"nearest to {found.query} ({found.table} table)"), caption=caption
    )
    for name, number, score in zip(found.labels, found.ids, found.scores):
        table.add_row(Text(name), str(number), f"{score:.4f}")
    return table


def _map_table(found: Projection) -> Table:
    from rich.table import Table
    from rich.text import Text

    titles = [f"component {axis + 1} ({share:.1%})" for axis, share in enumerate(found.explained)]
    table = Table(
        "word",
        *titles,
        title=f"words of the {found.table} table, with the share of their variance along each axis",
    )
    for name, point in zip(found.labels, found.points.tolist()):
        table.add_row(Text(name), *(f"{value:+.4f}" for value in point))
    return table


def _position_table(found: PositionMap) -> Table:
    from rich.table import Table

    shown = min(8, found.values.shape[1])
    title = f"{found.scheme} positions, {found.values.shape[0]} x {found.values.shape[1]}: {found.measure}; --plot draws all of it"
    table = Table(
        found.row_name, *found.columns[:shown], title=title, caption=f"columns: {found.column_name}"
    )
    for name, row in zip(found.rows, found.values.tolist()):
        table.add_row(name, *(f"{value:.3f}" for value in row[:shown]))
    return table


def _word_table(found: SameWord) -> Table:
    from rich.table import Table
    from rich.text import Text

    tokens = " and ".join(" ".join(names) for names in found.tokens)
    table = Table(
        "after layer", "likeness", "other tokens", title=Text(f"{found.word} in two sentences, as {tokens}")
    )
    for layer, own, other in zip(found.layers, found.similarity.tolist(), found.baseline.tolist()):
        table.add_row(layer, f"{own:.4f}", f"{other:.4f}")
    return table
