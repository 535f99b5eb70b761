"""The command `memories`: what fires each neuron of the feed-forward, and what it promotes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, UseAppendAction, arg

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
    from rich.text import Text

    from clearhead.inside.memories import Found, Memories, Neuron
    from clearhead.inside.memories.neurons import Given

SIDE = 24  # letters of a context on each side
SHOWN = 5  # contexts and tokens of each neuron, where many neurons are listed


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
      clearhead memories my-model/ pairs.tsv --layer encoder.0 --sort activation --json
      clearhead memories my-model/ --token the
    """
    refuse(bool(text) and corpus is not None, "a corpus and --text were both given: choose one")
    refuse(limit < 0, f"limit {limit} is negative: it is a number of tokens, 0 for all")
    check_inputs(folder, plot=plot)
    from clearhead.inside.memories import memories as run

    model = load_model(folder)
    found = run(model, _inputs(model, corpus, text), layer, top, neuron or None, limit or None)
    body: dict[str, Any] = {"tokens": found.tokens, "note": found.note}
    if token is not None:
        hits = found.search(token, top)
        body |= hits.to_dict()
        tables = [_search_table(hits)]
    else:
        listed = [found.neuron(name) for name in neuron] or found.ranked(sort, top)
        body |= {"top": found.top, "depth": found.depth, "neurons": [one.to_dict() for one in listed]}
        tables = [_neuron_table(one) for one in listed] if neuron else [_list_table(listed)]
    body |= save_plot(plot, lambda: _draw(found, neuron, sort))
    show_result(body, json, _parts(tables, found))


def _parts(tables: list[Table], found: Memories) -> Iterator[Any]:
    yield from tables
    depth = f" Agreement: the answer is among the first {found.depth} promoted." if found.agrees else ""
    yield f"{found.tokens:,} tokens read, {found.top} contexts kept for each neuron.{depth}"
    yield f"Promoted tokens: {found.note}."


def _draw(found: Memories, neuron: tuple[str, ...], sort: Literal["agreement", "activation"] | None) -> Any:
    """Draw a neuron, where one is named or there is no agreement to draw, else the agreement of all."""
    from clearhead.plot.memories import draw_agreement, draw_neuron

    if found.agrees and not neuron:
        return draw_agreement(found)
    return draw_neuron(found.neuron(neuron[0]) if neuron else found.ranked(sort, 1)[0])


def _inputs(model: ch.Model, corpus: str | None, texts: tuple[str, ...]) -> Iterator[Given]:
    """Return what the model is to read: texts, pairs or images."""
    both, images = model.config.family == "encoder-decoder", model.config.input != "tokens"
    if texts:
        return iter([_pair(text) if both else text for text in texts])
    refuse(
        corpus is None and images,
        "this model reads images: name a folder of them, or image files with --text",
    )
    return _examples(corpus or ("dates" if both else "stdlib-docs"), images, both)


def _pair(text: str) -> Given:
    source, tab, target = text.partition("\t")
    return (source, target) if tab else source


def _examples(corpus: str, images: bool, both: bool) -> Iterator[Given]:
    """Read the examples of a data set, whatever its format."""
    from clearhead.data.examples import Images, Pair, Question
    from clearhead.data.plan import DataPlan
    from clearhead.tasks.corpus import open_data

    task = "seq2seq" if both else None
    plan = DataPlan(paths=(corpus,), task="image" if images else task)
    rows = open_data(plan, split=False).validation
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
    from rich.text import Text

    rows: list[Any] = []
    for memory in listed:
        shares = ("-" if value is None else f"{value:.0%}" for value in (memory.agreement, memory.chance))
        promoted = " ".join(name for name, _ in memory.promoted[:SHOWN])
        contexts = Text("\n").join([_context(context) for context in memory.contexts[:SHOWN]])
        rows += [(memory.name, *shares, f"{memory.activation:.2f}", promoted, contexts), ()]
    headings = ("neuron", ">agreement", ">chance", ">highest", "promotes", "fired by")
    return table("what fires neurons, and what they promote", headings, rows)


def _neuron_table(memory: Neuron) -> Table:
    fired = [
        (f"{context.activation:.3f}", _context(context), context.answer or "") for context in memory.contexts
    ]
    promoted, suppressed = (
        [(name, f"{value:+.3f}") for name, value in side] for side in (memory.promoted, memory.suppressed)
    )
    agreed = f", agreement {memory.agreement:.0%}, by chance {memory.chance:.0%}"
    title = f"neuron {memory.name}{'' if memory.agreement is None else agreed}"
    headings = (">activation", "fired by", "goes on with", "promotes", ">", "suppresses", ">")
    return table(title, headings, _side_by_side((3, fired), (2, promoted), (2, suppressed)))


def _search_table(hits: Found) -> Table:
    promoting = [(name, f"{score:+.3f}") for name, score in hits.promoting]
    fired = [(name, f"{share:.0%}", f"{highest:.2f}") for name, share, highest in hits.fired]
    headings = ("promoted by", ">score", "fires", ">share of contexts", ">highest")
    return table(f"neurons and the token {hits.token}", headings, _side_by_side((2, promoting), (3, fired)))


def _side_by_side(*lists: tuple[int, list[Any]]) -> Iterator[list[Any]]:
    """Join lists of rows, each with its number of cells; a list that has ended gives empty cells."""
    for parts in zip_longest(*(rows for _, rows in lists)):
        yield [cell for part, (width, _) in zip(parts, lists) for cell in part or [""] * width]


def _context(context: Any) -> Text:
    """Return a place of the corpus on one line, its token marked."""
    from rich.text import Text

    from clearhead.tokens.labels import VISIBLE

    breaks = str.maketrans({sign: shown for sign, shown in VISIBLE.items() if sign != " "})
    before, token, after = (part.translate(breaks) for part in (context.before, context.token, context.after))
    return Text.assemble(before[-SIDE:], (f"⟦{token}⟧", "bold"), after[:SIDE])
