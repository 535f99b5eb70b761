"""`clearhead memories`: what fires each neuron of the feed-forward, and what it promotes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, UseAppendAction, arg

from clearhead.commands.common import Folder, Json, show_result

if TYPE_CHECKING:
    from rich.table import Table

    from clearhead.bundle import Model
    from clearhead.inside.memories import Found, Memories, Neuron
    from clearhead.inside.memories.passages import Given

SIDE = 24  # letters of a context on each side
SHOWN = 5  # contexts and tokens of each neuron, where many neurons are listed


def memories(
    folder: Folder,
    corpus: Annotated[
        Positional[str | None],
        arg(
            metavar="CORPUS",
            help="a file, a folder or an embedded corpus; default: stdlib-docs, or dates for an encoder-decoder",
        ),
    ] = None,
    text: Annotated[
        UseAppendAction[tuple[str, ...]],
        arg(
            help="a text, or an image file, in place of a corpus; source, tab, target for two stacks. May be repeated"
        ),
    ] = (),
    layer: Annotated[str | None, arg(help="a layer, such as 2 or encoder.0; default: all")] = None,
    neuron: Annotated[
        UseAppendAction[tuple[str, ...]], arg(help="a neuron, such as 2.117 or encoder.0.5. May be repeated")
    ] = (),
    token: Annotated[
        str | None, arg(help="the neurons that promote this token or class, and those it fires")
    ] = None,
    top: Annotated[int, arg(help="contexts and tokens kept for each neuron, and neurons listed")] = 10,
    sort: Annotated[
        Literal["agreement", "activation"] | None,
        arg(help="of the list; default: agreement where it is known"),
    ] = None,
    limit: Annotated[int, arg(help="tokens of the corpus that are read; 0: all")] = 30_000,
    plot: Annotated[
        Path | None, arg(help="save a picture: of the neuron named, else of the agreement of all")
    ] = None,
    json: Json = False,
) -> None:
    """The feed-forward as a memory: the places that fire each neuron, the tokens it promotes, and whether the two agree.

    For example:
      clearhead memories my-model/ corpus.txt
      clearhead memories my-model/ corpus.txt --neuron 2.117 --plot neuron.png
      clearhead memories my-model/ pairs.tsv --layer encoder.0 --sort activation --json
      clearhead memories my-model/ --token the
    """
    from clearhead.bundle import load
    from clearhead.errors import InputError
    from clearhead.inside.memories import memories as read

    if text and corpus is not None:
        raise InputError("a corpus and --text were both given: choose one")
    if limit < 0:
        raise InputError(f"limit {limit} is negative: it is a number of tokens, 0 for all")
    m = load(folder)
    found = read(m, _texts(m, corpus, text), layer, top, neuron or None, limit or None)
    if token is not None:
        said = found.search(token, top)
        body: dict[str, Any] = {**said.to_dict(), "tokens": found.tokens, "note": found.note}
        show_result(body, json, lambda console: _show_search(console, said, found))
    else:
        listed = [found.neuron(name) for name in neuron] or found.ranked(sort, top)
        about = {"tokens": found.tokens, "top": found.top, "depth": found.depth, "note": found.note}
        body = {**about, "neurons": [one.to_dict() for one in listed]}
        show_result(body, json, lambda console: _show(console, listed, found, bool(neuron)))
    if plot is not None:
        _save(plot, found, neuron, sort)


def _save(
    plot: Path, found: Memories, neuron: tuple[str, ...], sort: Literal["agreement", "activation"] | None
) -> None:
    """A neuron where one is named or there is no agreement to draw, else all of them."""
    from clearhead.plot.canvas import save
    from clearhead.plot.memories import draw_agreement, draw_neuron

    if neuron or not found.agrees:
        figure = draw_neuron(found.neuron(neuron[0]) if neuron else found.ranked(sort, 1)[0])
    else:
        figure = draw_agreement(found)
    print(f"saved {save(figure, plot)}", file=sys.stderr)


def _texts(m: Model, corpus: str | None, given: tuple[str, ...]) -> Iterator[Given]:
    """What the model is to read: texts, pairs or images."""
    from clearhead.errors import InputError

    both = m.config.family == "encoder-decoder"
    if given:
        return iter([_pair(text) if both else text for text in given])
    if corpus is None and m.config.input != "tokens":
        raise InputError("this model reads images: name a folder of them, or image files with --text")
    return _examples(corpus or ("dates" if both else "stdlib-docs"), m.config.input != "tokens", both)


def _pair(text: str) -> Given:
    source, tab, target = text.partition("\t")
    return (source, target) if tab else source


def _examples(corpus: str, images: bool, both: bool) -> Iterator[Given]:
    """The examples of a data set, whatever its format."""
    from clearhead.data.corpus import open_data
    from clearhead.data.examples import Chunk, Images, Labelled, Pair, Question, Tagged
    from clearhead.data.plan import DataPlan
    from clearhead.errors import InputError

    rows = open_data(
        DataPlan(paths=(corpus,), task="image" if images else "seq2seq" if both else None), split=False
    ).validation
    if isinstance(rows, Images):
        if not images:
            raise InputError(f"{corpus} holds images, and this model reads text: name a file of text")
        yield from rows.pixels
        return
    for row in rows:
        if isinstance(row, Pair):
            yield (row.source, row.target) if both else row.source
        elif isinstance(row, Tagged):
            yield " ".join(row.words)
        elif isinstance(row, Question):
            yield row.context
        elif isinstance(row, Chunk | Labelled):
            yield row.text


def _show(console: Any, listed: list[Neuron], found: Memories, whole: bool) -> None:
    """A list of neurons; those that were asked for by name, whole."""
    for memory in listed if whole else ():
        console.print(_neuron_table(memory))
    if not whole:
        console.print(_list_table(listed))
    _show_note(console, found)


def _list_table(listed: list[Neuron]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(
        "neuron",
        "agreement",
        "chance",
        "highest",
        "promotes",
        "fired by",
        title="what fires neurons, and what they promote",
    )
    for memory in listed:
        promoted = Text(" ".join(name for name, _ in memory.promoted[:SHOWN]))
        shares = ("-" if value is None else f"{value:.0%}" for value in (memory.agreement, memory.chance))
        contexts = Text("\n").join([_context(context) for context in memory.contexts[:SHOWN]])
        table.add_row(memory.name, *shares, f"{memory.activation:.2f}", promoted, contexts, end_section=True)
    return table


def _neuron_table(memory: Neuron) -> Table:
    from rich.table import Table
    from rich.text import Text

    agreed = (
        ""
        if memory.agreement is None
        else f", agreement {memory.agreement:.0%}, by chance {memory.chance:.0%}"
    )
    table = Table(
        "activation",
        "fired by",
        "goes on with",
        "promotes",
        "",
        "suppresses",
        "",
        title=f"neuron {memory.name}{agreed}",
    )
    for row in range(max(len(memory.contexts), len(memory.promoted))):
        fired: list[Any] = ["", "", ""]
        if row < len(memory.contexts):
            context = memory.contexts[row]
            fired = [f"{context.activation:.3f}", _context(context), Text(context.answer or "")]
        said: list[Any] = []
        for side in (memory.promoted, memory.suppressed):
            said += [Text(side[row][0]), f"{side[row][1]:+.3f}"] if row < len(side) else ["", ""]
        table.add_row(*fired, *said)
    return table


def _context(context: Any) -> Any:
    """A place of the corpus on one line, its token marked."""
    from rich.text import Text

    from clearhead.tokens.labels import VISIBLE

    breaks = str.maketrans({sign: shown for sign, shown in VISIBLE.items() if sign != " "})
    before, token, after = (part.translate(breaks) for part in (context.before, context.token, context.after))
    return Text.assemble(before[-SIDE:], (f"⟦{token}⟧", "bold"), after[:SIDE])


def _show_search(console: Any, said: Found, found: Memories) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(
        "promoted by",
        "score",
        "fires",
        "share of contexts",
        "highest",
        title=Text(f"neurons and the token {said.token}"),
    )
    for row in range(max(len(said.promoting), len(said.fired))):
        first = said.promoting[row] if row < len(said.promoting) else None
        second = said.fired[row] if row < len(said.fired) else None
        left = (first[0], f"{first[1]:+.3f}") if first else ("", "")
        right = (second[0], f"{second[1]:.0%}", f"{second[2]:.2f}") if second else ("", "", "")
        table.add_row(*left, *right)
    console.print(table)
    _show_note(console, found)


def _show_note(console: Any, found: Memories) -> None:
    depth = f" Agreement: the answer is among the first {found.depth} promoted." if found.agrees else ""
    console.print(
        f"{found.tokens:,} tokens read, {found.top} contexts kept for each neuron.{depth}", highlight=False
    )
    console.print(f"Promoted tokens: {found.note}.", highlight=False)
