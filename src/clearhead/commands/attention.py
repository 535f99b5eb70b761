"""The command `attention`: where each head looks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from clearhead.commands.common import (
    Folder,
    Given,
    Json,
    Pair,
    Plot,
    Target,
    Tokenizer,
    check_inputs,
    load_model,
    option,
    print_notes,
    save_plot,
    show_result,
)
from clearhead.errors import refuse
from clearhead.report import table

if TYPE_CHECKING:
    from rich.table import Table

    from clearhead.inside.attention_maps import AttentionMaps, Axis, HeadPattern, LayerMap

LINKS = 3  # tokens named per place in a table of rollout


def attention(
    folder: Folder,
    text: Given,
    target: Target = None,
    pair: Pair = None,
    kind: Annotated[
        Literal["self", "encoder", "cross"] | None,
        option("one kind of attention; default: all that there are"),
    ] = None,
    layer: Annotated[int | None, option("one layer, all of its heads")] = None,
    head: Annotated[str | None, option("one head, layer.head: 3.2, encoder.0.5, cross.1.2")] = None,
    rollout: Annotated[
        bool, option("follow attention through all layers: what each place is made of")
    ] = False,
    entropy: Annotated[
        bool, option("draw how spread each head's attention is, in place of the patterns")
    ] = False,
    plot: Plot = None,
    output: Annotated[Path | None, option("write the patterns themselves: FILE.json or .npz")] = None,
    tokenizer: Tokenizer = None,
    json: Json = False,
) -> None:
    """Show where each head looks: its entropy and strongest link, patterns and rollout as pictures and files.

    For example:
      clearhead attention my-model/ "The cat sat on the mat."
      clearhead attention my-model/ "The cat sat on the mat." --head 3.2 --plot head.png
      clearhead attention my-model/ "Ein Hund" --kind cross --plot cross.svg --output cross.npz
    """
    refuse(
        sum((layer is not None, head is not None, rollout, entropy)) > 1,
        "layer, head, rollout and entropy are four views: choose one of them",
    )
    refuse(
        entropy and plot is None,
        "entropy is a picture, and the table has its numbers anyway: name a file with --plot",
    )
    check_inputs(folder, text, plot=plot)
    from clearhead.inside.attention import attention as run
    from clearhead.inside.attention_maps import checked_ending
    from clearhead.inside.names import find_heads

    if output is not None:
        checked_ending(output)
    model = load_model(folder, tokenizer)
    chosen: str | None = "self" if rollout and kind is None else kind
    layers = None if layer is None else [layer]
    if head is not None:
        found = find_heads(model.config, [head])[0]
        other = kind is not None and kind != found.kind
        refuse(other, f'head "{head}" is of the kind {found.kind}, not {kind}: leave --kind out')
        chosen, layers, head = found.kind, [found.layer], str(found)
    maps = run(model, text, target, pair, None if chosen is None else [chosen], layers)
    shown = [maps.head(head)] if head is not None else maps.heads()
    body: dict[str, Any] = {
        "aggregated": maps.aggregated,
        "axes": {name: _axes(maps.of(name)[0]) for name in maps.kinds},
        "heads": [one.summary() if head is None else one.to_dict() for one in shown],
    }
    if rollout:
        body["rollout"] = maps.rollout(maps.kinds[0]).to_dict()
    if output is not None:
        body["output"] = str(maps.save(output))
        print_notes([f"saved {output}"])
    body |= save_plot(plot, lambda: _draw(maps, head, layer, rollout, entropy))

    def parts() -> Iterator[Any]:
        if plot is None:
            yield _rollout_table(maps) if rollout else _heads_table(shown)
        if maps.aggregated > 1:
            yield f"a long input: {maps.aggregated} tokens per cell; entropies are of single tokens"

    show_result(body, json, parts())


def _axes(one: LayerMap) -> dict[str, Any]:
    return {"queries": one.queries.to_dict(), "keys": one.keys.to_dict()}


def _draw(maps: AttentionMaps, head: str | None, layer: int | None, rollout: bool, entropy: bool) -> Any:
    """Draw the view that was asked for."""
    from clearhead.plot import attention as pictures

    kind = maps.kinds[0] if len(maps.kinds) == 1 else "self"
    if head is not None:
        return pictures.draw_head(maps.head(head))
    if layer is not None:
        return pictures.draw_layer(maps.layer(layer, kind))
    if rollout:
        return pictures.draw_rollout(maps.rollout(kind))
    return pictures.draw_entropy(maps, kind) if entropy else pictures.draw_model(maps, kind)


def _heads_table(shown: list[HeadPattern]) -> Table:
    """Show a row for each head."""
    rows = []
    for one in shown:
        link = one.strongest
        query, key = _named(one.queries, link.query), _named(one.keys, link.key)
        rows.append((str(one.head), f"{one.entropy:.2f}", query, key, f"{link.weight:.3f}"))
    return table("", ("head", ">entropy, bits", "query", "looks at key", ">weight"), rows)


def _rollout_table(maps: AttentionMaps) -> Table:
    """Show a row for each place: the tokens it is made of most."""
    rollout = maps.rollout(maps.kinds[0])
    rows = []
    for place, shares in enumerate(rollout.last):
        most = [token for token in shares.argsort()[::-1][:LINKS] if shares[token] > 0]
        parts = (f"{_named(rollout.tokens, token)} {shares[token]:.3f}" for token in most)
        rows.append((_named(rollout.tokens, place), ", ".join(parts)))
    return table(f"rollout over {len(rollout.flow)} layers", ("place", "made of"), rows)


def _named(axis: Axis, place: int) -> str:
    """Return a label with its place, which cells of several tokens have already."""
    return axis.labels[place] if axis.size > 1 else f"{place} {axis.labels[place]}"
