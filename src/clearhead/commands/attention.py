"""The command that shows where a model looks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from clearhead.commands.common import Folder, Json, show_result

if TYPE_CHECKING:
    from clearhead.inside.attention import AttentionMaps, Axis, HeadPattern

LINKS = 3  # tokens named per place in a table of rollout


def attention(
    folder: Folder,
    text: Annotated[
        Positional[str], arg(metavar="TEXT", help="the text; for a model of images, an image file")
    ],
    target: Annotated[
        str | None, arg(help="what the decoder of two stacks has written; default: what it writes by itself")
    ] = None,
    pair: Annotated[str | None, arg(help="the second text of a pair, for an encoder")] = None,
    kind: Annotated[
        Literal["self", "encoder", "cross"] | None,
        arg(help="one kind of attention; default: all that there are"),
    ] = None,
    layer: Annotated[int | None, arg(help="one layer, all of its heads")] = None,
    head: Annotated[str | None, arg(help="one head, layer.head: 3.2, encoder.0.5, cross.1.2")] = None,
    rollout: Annotated[
        bool, arg(help="follow attention through all layers: what each place is made of")
    ] = False,
    entropy: Annotated[
        bool, arg(help="draw how spread each head's attention is, in place of the patterns")
    ] = False,
    plot: Annotated[Path | None, arg(help="draw a picture: FILE.png, .svg or .pdf")] = None,
    output: Annotated[Path | None, arg(help="write the patterns themselves: FILE.json or .npz")] = None,
    tokenizer: Annotated[
        Path | None, arg(help="a tokenizer that lies elsewhere: a directory or file")
    ] = None,
    json: Json = False,
) -> None:
    """Where each head looks: its entropy and its strongest link; patterns and rollout as pictures and files.

    For example:
      clearhead attention my-model/ "The cat sat on the mat."
      clearhead attention my-model/ "The cat sat on the mat." --head 3.2 --plot head.png
      clearhead attention my-model/ "Ein Hund" --kind cross --plot cross.svg --output cross.npz
    """
    from clearhead.bundle import load
    from clearhead.errors import InputError
    from clearhead.inside.attention import attention as record
    from clearhead.inside.attention_maps import checked_ending
    from clearhead.inside.names import find_heads

    if sum((layer is not None, head is not None, rollout, entropy)) > 1:
        raise InputError("layer, head, rollout and entropy are four views: choose one of them")
    if entropy and plot is None:
        raise InputError(
            "entropy is a picture, and the table has its numbers anyway: name a file with --plot"
        )
    if not text:
        raise InputError("the text is empty: give some text, or the name of an image file")
    if output is not None:
        checked_ending(output)
    loaded = load(folder, tokenizer=tokenizer)
    layers = None if layer is None else [layer]
    if head is not None:
        found = find_heads(loaded.config, [head])[0]
        if kind is not None and kind != found.kind:
            raise InputError(f'head "{head}" is of the kind {found.kind}, not {kind}: leave --kind out')
        kind, layers, head = _kind(found.kind), [found.layer], str(found)
    if rollout and kind is None:
        kind = "self"
    maps = record(loaded, text, target, pair, kinds=None if kind is None else [kind], layers=layers)
    shown = [maps.head(head)] if head is not None else maps.heads()
    rows = [one.summary() if head is None else one.to_dict() for one in shown]
    body: dict[str, Any] = {"aggregated": maps.aggregated, "axes": _axes(maps), "heads": rows}
    if rollout:
        body["rollout"] = maps.rollout(maps.kinds[0]).to_dict()
    files = _files(maps, head, layer, rollout, entropy, plot, output)
    show_result({**body, **files}, json, lambda console: _show(console, maps, shown, rollout, files))


def _kind(name: str) -> Literal["self", "encoder", "cross"]:
    return "encoder" if name == "encoder" else "cross" if name == "cross" else "self"


def _axes(maps: AttentionMaps) -> dict[str, Any]:
    """The tokens of each kind, said once."""
    firsts = {kind: maps.of(kind)[0] for kind in maps.kinds}
    return {
        kind: {"queries": each.queries.to_dict(), "keys": each.keys.to_dict()}
        for kind, each in firsts.items()
    }


def _files(
    maps: AttentionMaps,
    head: str | None,
    layer: int | None,
    rollout: bool,
    entropy: bool,
    plot: Path | None,
    output: Path | None,
) -> dict[str, str]:
    """Write what was asked for; the names of the files."""
    written = {}
    if output is not None:
        written["output"] = str(maps.save(output))
    if plot is not None:
        from clearhead.plot import attention as pictures
        from clearhead.plot.canvas import save

        kind = maps.kinds[0] if len(maps.kinds) == 1 else "self"
        if head is not None:
            figure = pictures.draw_head(maps.head(head))
        elif layer is not None:
            figure = pictures.draw_layer(maps.layer(layer, kind))
        elif rollout:
            figure = pictures.draw_rollout(maps.rollout(kind))
        else:
            figure = pictures.draw_entropy(maps, kind) if entropy else pictures.draw_model(maps, kind)
        written["plot"] = str(save(figure, plot))
    return written


def _show(
    console: Any, maps: AttentionMaps, shown: list[HeadPattern], rollout: bool, files: dict[str, str]
) -> None:
    if "plot" not in files:
        console.print(_rollout_table(maps) if rollout else _table(shown))
    if maps.aggregated > 1:
        console.print(
            f"a long input: {maps.aggregated} tokens per cell; entropies are of single tokens",
            highlight=False,
        )
    for name in files.values():
        console.print(f"saved {name}", highlight=False, markup=False)


def _table(shown: list[HeadPattern]) -> Any:
    """A row per head."""
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for heading in ("head", "entropy, bits", "query", "looks at key", "weight"):
        table.add_column(heading, justify="right" if heading in ("entropy, bits", "weight") else "left")
    for one in shown:
        link = one.strongest
        query, key = _named(one.queries, link.query), _named(one.keys, link.key)
        table.add_row(str(one.head), f"{one.entropy:.2f}", Text(query), Text(key), f"{link.weight:.3f}")
    return table


def _rollout_table(maps: AttentionMaps) -> Any:
    """A row per place: the tokens it is made of most."""
    from rich.table import Table
    from rich.text import Text

    rollout = maps.rollout(maps.kinds[0])
    table = Table(title=f"rollout over {len(rollout.flow)} layers", title_justify="left")
    table.add_column("place")
    table.add_column("made of")
    for place, shares in enumerate(rollout.last):
        most = shares.argsort()[::-1][:LINKS]
        parts = ", ".join(
            f"{_named(rollout.tokens, token)} {shares[token]:.3f}" for token in most if shares[token] > 0
        )
        table.add_row(Text(_named(rollout.tokens, place)), Text(parts))
    return table


def _named(axis: Axis, place: int) -> str:
    """A label with its place, which cells of several tokens have already."""
    return axis.labels[place] if axis.size > 1 else f"{place} {axis.labels[place]}"
