"""Commands that look into the run of a prompt: attention, lens, patch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional

from clearhead.app.commands.common import (
    Folder,
    Given,
    Json,
    Pair,
    Plot,
    Target,
    TokenIds,
    Tokenizer,
    check_inputs,
    load_model,
    option,
    print_notes,
    show_result,
    token_ids,
)
from clearhead.app.report import table
from clearhead.errors import refuse

if TYPE_CHECKING:
    from rich.table import Table

    from clearhead.inside.attention import AttentionMaps, Axis, HeadPattern
    from clearhead.inside.lens import Contributions, Lens
    from clearhead.inside.patch import Patching

LINKS = 3  # tokens named per place in a table of rollout
TERMS = 20  # terms in a table of contributions
PATCHES = 6  # patches per map in the table
Part = Literal["residual", "attention", "feedforward", "heads"]


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
    ids: TokenIds = False,
    tokenizer: Tokenizer = None,
    json: Json = False,
) -> None:
    """Show where each head looks: its entropy and strongest link, patterns and rollout as pictures and files.

    For example:
      clearhead attention my-model/ "The cat sat on the mat."
      clearhead attention my-model/ "The cat sat on the mat" --head 3.2 --plot h.png
      clearhead attention my-model/ "Ein Hund" --kind cross --output cross.npz
    """
    refuse(
        sum((layer is not None, head is not None, rollout, entropy)) > 1,
        "layer, head, rollout and entropy are four views: choose one of them",
    )
    refuse(
        entropy and plot is None,
        "entropy is a picture, and the table has its numbers anyway: name a file with --plot",
    )
    check_inputs(folder, plot)
    from clearhead.inside import attention as inside
    from clearhead.inside import names

    if output is not None:
        inside.checked_ending(output)
    model = load_model(folder, tokenizer=tokenizer)
    chosen: str | None = "self" if rollout and kind is None else kind
    layers = None if layer is None else [layer]
    if head is not None:
        found = names.find_heads(model.config, [head])[0]
        refuse(
            kind not in (None, found.kind),
            f'head "{head}" is of the kind {found.kind}, not {kind}: leave --kind out',
        )
        chosen, layers, head = found.kind, [found.layer], str(found)
    maps = inside.attention(
        model, token_ids(text) if ids else text, target, pair, None if chosen is None else [chosen], layers
    )
    print_notes(names.unpatterned(model.config))
    shown = maps.heads() if head is None else [maps.head(head)]
    body: dict[str, Any] = {
        "aggregated": maps.aggregated,
        "axes": {
            one.kind: {"queries": one.queries.to_dict(), "keys": one.keys.to_dict()}
            for one in (maps.of(name)[0] for name in maps.kinds)
        },
        "heads": [one.summary() if head is None else one.to_dict() for one in shown],
    }
    if rollout:
        body["rollout"] = maps.rollout(maps.kinds[0]).to_dict()
    if output is not None:
        body["output"] = str(maps.save(output))
        print_notes([f"saved {output}"])
    parts: list[Any] = []
    if plot is None:
        parts.append(_rollout_table(maps) if rollout else _heads_table(shown))
    if maps.aggregated > 1:
        parts.append(f"a long input: {maps.aggregated} tokens per cell; entropies are of single tokens")
    show_result(body, json, parts, plot, lambda: _draw(maps, head, layer, rollout, entropy))


def _draw(maps: AttentionMaps, head: str | None, layer: int | None, rollout: bool, entropy: bool) -> Any:
    """Draw the view that was asked for."""
    from clearhead.app.plot import attention as pictures

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
    rows = (
        (
            str(one.head),
            f"{one.entropy:.2f}",
            _named(one.queries, link.query),
            _named(one.keys, link.key),
            f"{link.weight:.3f}",
        )
        for one, link in ((one, one.strongest) for one in shown)
    )
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


def lens(
    folder: Folder,
    text: Given,
    target: Target = None,
    pair: Pair = None,
    top: Annotated[int, option("how many of the likeliest tokens to keep")] = 5,
    position: Annotated[int, option("which token's answer to print; -1 is the last")] = -1,
    contributions: Annotated[
        bool, option("show what each head, feed-forward and embedding adds to a token's logit")
    ] = False,
    token: Annotated[
        str | None, option("of contributions: whose logit (· is a space); default: what the model says")
    ] = None,
    against: Annotated[str | None, option("of contributions: subtract this token's logit")] = None,
    ids: TokenIds = False,
    plot: Plot = None,
    tokenizer: Tokenizer = None,
    json: Json = False,
) -> None:
    """Show what the model would say if it stopped after each layer, or what each part adds to a logit.

    For example:
      clearhead lens my-model/ "The cat sat on the" --plot lens.png
      clearhead lens my-model/ "The cat sat on the" --contributions --token " mat"
      clearhead lens my-model/ "Ein Hund" --target "A dog" --position 0 --json
    """
    refuse(
        not contributions and (token is not None or against is not None),
        "--token and --against choose a logit to take apart: add --contributions",
    )
    model = load_model(folder, tokenizer=tokenizer, plot=plot)
    from clearhead.app.plot import lens as pictures
    from clearhead.inside.inputs import find_column
    from clearhead.inside.lens import contributions as take_apart
    from clearhead.inside.lens import lens as run

    given = token_ids(text) if ids else text
    if contributions:
        terms = take_apart(model, given, token, position, target, against, pair)
        parts = [_contribution_table(terms)]
        show_result(terms.to_dict(), json, parts, plot, lambda: pictures.draw_contributions(terms))
    else:
        found = run(model, given, target, pair, top)
        parts = [_lens_table(found, find_column(position, found.columns))]
        show_result(found.to_dict(), json, parts, plot, lambda: pictures.draw_lens(found))


def _lens_table(found: Lens, column: int) -> Table:
    """Show a row for each layer, for one column."""
    chosen, true = found.chosen_names[column], found.true_names[column]
    ranks = [found.chosen_ranks, *([found.true_ranks] if true else [])]
    rows = []
    for layer, name in enumerate(found.layers):
        best = zip(found.top_names[layer][column], found.top_probabilities[layer, column].tolist())
        bits = [f"{float(each[layer, column]):.2f}" for each in (found.entropy, found.divergence)]
        places = [str(int(each[layer, column])) for each in ranks]
        rows.append((name, "  ".join(f"{token} {share:.2f}" for token, share in best), *bits, *places))
    headings = ("layer", f"likeliest {found.kind}, probability", ">entropy", ">KL", ">rank", ">true")
    caption = f"entropy and KL (of the last layer from this one) in bits; rank: of {chosen}"
    also = f"; true: rank of {true}, which does come" if true else ""
    return table(
        f"after {found.columns[column]}: {chosen}", headings if true else headings[:-1], rows, caption + also
    )


def _contribution_table(found: Contributions) -> Table:
    """Show the largest terms, the rest in one row, and the sum."""
    largest = found.largest(TERMS)
    values = {f"head {term.name}" if term.head is not None else term.name: term.value for term in largest}
    if len(largest) < len(found.terms):
        values[f"{len(found.terms) - len(largest)} others"] = found.total - sum(values.values())
    sums = {"sum": found.total, "the model's logit": found.logit}
    if found.capped is not None:
        before = {"the model's logit before its soft cap": found.logit}
        sums = {"sum": found.total, **before, "the model's logit": found.capped}
    terms, totals = ([(name, f"{value:+.4f}") for name, value in part.items()] for part in (values, sums))
    versus = f" less that of {found.against}" if found.against is not None else ""
    title = f"logit of {found.choice}{versus}, after {found.columns[found.column]}"
    return table(title, ("part", ">adds"), [*terms, (), *totals])


def patch(
    folder: Folder,
    clean: Annotated[
        Positional[str], option("the prompt whose activations are put into the other run", metavar="CLEAN")
    ],
    corrupt: Annotated[
        Positional[str],
        option("the prompt that is run", metavar="CORRUPT"),
    ],
    answer: Annotated[
        str | None, option("what the clean run should say (· is a space); default: what it says")
    ] = None,
    wrong: Annotated[str | None, option("what the corrupt run says; default: that, or the runner-up")] = None,
    part: Annotated[tuple[Part, ...], option("what is patched; heads at all tokens at once")] = (
        "residual",
        "attention",
        "feedforward",
    ),
    position: Annotated[int, option("where the answer is read; -1 is the last token")] = -1,
    target: Annotated[
        str | None,
        option("what the decoder of an encoder-decoder has written; default: what it writes for both alike"),
    ] = None,
    align: Annotated[
        Literal["tokens", "words"],
        option("compare prompts token by token, or, of unequal length, by the words that both have"),
    ] = "tokens",
    subject: Annotated[
        tuple[str, str] | None,
        option("prompts of unequal length: the text that differs, in CLEAN and in CORRUPT", metavar="TEXT"),
    ] = None,
    plot: Plot = None,
    tokenizer: Tokenizer = None,
    json: Json = False,
) -> None:
    """Find which layer, token and head carries the answer: put clean activations into a corrupt run.

    Activations are put in one at a time. The logit of the answer less that of the wrong one is 0 in the
    corrupt run and 1 in the clean run.

    For example:
      clearhead patch my-model/ "Ann met Tom. Ann" "Ann met Tom. Tom" --plot map.png
      clearhead patch my-model/ "Paris is in" "Rome is in" --answer " France"
      clearhead patch my-model/ "Paris is in" "New York is in" --align words
      clearhead patch my-model/ "Oslo is" "New York is" --subject Oslo "New York"
    """
    model = load_model(folder, tokenizer=tokenizer, plot=plot)
    from clearhead.app.plot.lens import draw_patching
    from clearhead.inside.patch import patch as run

    by: Literal["words"] | None = "words" if align == "words" else None
    found = run(model, clean, corrupt, answer, wrong, part, position, target, align=by, subject=subject)
    show_result(found.to_dict(), json, _patches(found), plot, lambda: draw_patching(found))


def _patches(found: Patching) -> Iterator[Any]:
    """Show the patches that bring back most, map by map."""
    rows: list[Sequence[str]] = []
    for one in found.maps:
        cells = [
            (value, row, column)
            for row, values in enumerate(one.values.tolist())
            for column, value in enumerate(values)
            if not math.isnan(value)  # not a number: no such head
        ]
        most = sorted(cells, key=lambda cell: abs(cell[0]), reverse=True)[:PATCHES]
        rows += [
            (one.title, one.rows[row], one.columns[column], f"{value:+.3f}") for value, row, column in most
        ]
        rows.append(())
    title = f"logit of {found.answer} less that of {found.wrong}, after {found.position}"
    yield table(title, ("part", "layer", "token or head", ">brought back"), rows)
    yield f"clean run {found.clean_difference:+.4f} = 1, corrupt run {found.corrupt_difference:+.4f} = 0"
    if found.note:
        yield found.note
