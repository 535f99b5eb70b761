"""Analyses of a prompt, from its text to its prediction: tokens, trace, attention, lens, patch."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import clearhead as ch
from clearhead.app.commands.common import check_output, is_gguf_file
from clearhead.app.report import Cell, Column, count, listing, size, table
from clearhead.app.views import ModelArgument, Prompt, View, drawing
from clearhead.errors import CheckpointError, refuse
from clearhead.hub.tokens import TokenKind, TokensPlan

if TYPE_CHECKING:
    import tokenizers
    from rich.table import Table
    from rich.text import Text

    from clearhead.hub.tokens.text import Stages, TextStages
    from clearhead.inside.attention import AttentionMaps, Axis, HeadPattern
    from clearhead.inside.lens import Contributions, Lens
    from clearhead.inside.patch import Patching
    from clearhead.inside.trace import Prediction, TraceRow, TraceStep
    from clearhead.inside.translators import Translators

WIDTH = 190  # columns, where the output is no terminal
DETAILS = {  # headings, and the width of the terminal that each needs
    "formula": 165,
    "shape": 80,
    "is": 100,
    "first values": 125,
    "mean ± std": 145,
    "range": 185,
}
LINKS = 3  # tokens named per place in a table of rollout
TERMS = 20  # terms in a table of contributions
PATCHES = 6  # patches per map in the table
Part = Literal["residual", "attention", "feedforward", "heads"]


def tokens(
    text: str, *, model: Path | None = None, kind: TokenKind | None = None, pair: str | None = None
) -> View:
    """Show how a text becomes tokens, in four stages: normalise, pre-split, subword model, post-process.

    Args:
        text (TEXT): the text; - reads it from stdin
        model (DIR|FILE): a model directory, or a tokenizer.json
        kind: without a model: a tokenizer of this kind, trained on the text itself
        pair: a second text that belongs to the first

    For example:
      clearhead tokens "Hello  wörld" --model my-model/
      clearhead tokens "a rose is a rose is a rose" --kind bpe
      clearhead tokens "Who?" --pair "Me." --model bert/ --json
      clearhead tokens - --model my-model/tokenizer.json < text.txt
    """
    text = sys.stdin.read() if text == "-" else text
    refuse(not text, "the text is empty: give some, or pipe it in and write - in its place")
    refuse(
        model is not None and kind is not None,
        f"--kind {kind} trains a tokenizer and --model {model} has one: give one of the two",
    )
    from clearhead.hub.tokens.text import stages

    if model is not None:
        tokenizer, which = _read_tokenizer(model), str(model)
    else:
        tokenizer, which = _make_tokenizer(text, kind)
    seen = stages(tokenizer, text, pair)
    body = {"tokenizer": which, "vocab_size": tokenizer.get_vocab_size(), **seen.to_dict()}
    return View(body, _stage_parts(seen, f"{which}, {tokenizer.get_vocab_size():,} tokens"))


def _read_tokenizer(model: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer of a model directory, or of a file."""
    from tokenizers import Tokenizer

    from clearhead.hub.tokenizer import load_tokenizer

    if model.is_file() and not is_gguf_file(model):
        try:
            return Tokenizer.from_file(str(model))
        except Exception as error:
            raise CheckpointError(f"{model} is no tokenizer: {str(error).splitlines()[0][:200]}") from None
    refuse(
        not model.is_dir() and not is_gguf_file(model),
        f"{model} is no file and no directory: name a model directory or a tokenizer.json",
        CheckpointError,
    )
    tokenizer = load_tokenizer(model)
    if tokenizer is None:
        raise CheckpointError(f"{model} has no tokenizer: add tokenizer.json, or leave --model out")
    return tokenizer


def _make_tokenizer(text: str, kind: TokenKind | None) -> tuple[tokenizers.Tokenizer, str]:
    """Return a tokenizer of bytes, or one trained on the text, and in words which it is."""
    from clearhead.hub.tokens.training import GENERATOR, byte_tokenizer, train_tokenizer

    if kind in (None, "byte"):
        return byte_tokenizer(), "the bytes of UTF-8" + ("" if kind else ", as no --model is given")
    tokenizer = train_tokenizer(
        [text], TokensPlan(kind=kind), GENERATOR, len(text.encode("utf-8", "replace"))
    )
    return tokenizer, f"kind {kind}, trained on this text alone"


def _stage_parts(seen: Stages, title: str) -> Iterator[Any]:
    """Show the first three stages of each text, and the last of both together."""
    yield f"tokenizer: {title}"
    texts = {"": seen.text} if seen.pair is None else {"\ntext A": seen.text, "\ntext B": seen.pair}
    for heading, part in texts.items():
        if heading:
            yield heading
        normalised = "unchanged" if part.normalised == part.text else part.normalised
        yield _visible("1. normalise", ("text", "normalised"), [(part.text, normalised)])
        pieces = (
            (str(number), piece.text, *_source(piece, part)) for number, piece in enumerate(part.pieces)
        )
        yield _visible("2. pre-split", (">piece", "as the model reads it", ">offsets", "from"), pieces)
        tokens = (
            (str(token.piece), token.token, str(token.id), *_source(token, part)) for token in part.tokens
        )
        yield _visible("3. subword model", (">piece", "token", ">id", ">offsets", "from"), tokens)
    sources = {None: None, 0: seen.text, 1: seen.pair}
    final = (
        (token.token, str(token.id), str(token.type), *_source(token, sources[token.text]))
        for token in seen.final
    )
    yield _visible("4. post-process", ("token", ">id", ">type", ">offsets", "from"), final)


def _source(place: Any, part: TextStages | None) -> tuple[str, str]:
    """Return the offsets of a token and the text there, which is empty for one that post-processing added."""
    return f"{place.start}:{place.end}", "" if part is None else part.text[place.start : place.end]


def _visible(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table in which spaces and line breaks can be seen."""
    from clearhead.hub.tokens.text import visible

    return table(title, headings, ([visible(cell) for cell in row] for row in rows))


def trace(
    model: ModelArgument,
    text: Prompt,
    *,
    target: str | None = None,
    pair: str | None = None,
    depth: int | None = None,
    layer: int | None = None,
    top: int = 5,
    why: bool = False,
) -> View:
    """Follow the forward pass, step by step: shapes, values, parameters, FLOPs, bytes, time, predictions.

    Args:
        text (TEXT|IMAGE): what the model reads: a text, or the path of an image
        depth: 1: stacks, 2: blocks, 3: sublayers, 4: all steps (default; with --layer: 2)
        layer: open this block in full
        top: candidates to show
        why: say next to each step why it is there

    For example:
      clearhead trace my-model/ "The cat sat on the"
      clearhead trace my-model/ "The cat sat on the" --layer 3 --why
      clearhead trace my-translator/ "Ein Hund schläft" --target "A dog" --depth 3
      clearhead trace my-vit/ photo.png --json
    """
    refuse(
        depth not in (None, 1, 2, 3, 4),
        f"depth {depth} is not known: 1 shows stacks, 2 blocks, 3 sublayers, 4 all steps",
    )
    m = model()
    seen = ch.trace(m, text, target, pair, top, keep_values=False)
    rows = seen.rows(depth or (4 if layer is None else 2), layer)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH

    def parts() -> Iterator[Any]:
        yield steps_table(seen, rows, width, why)
        yield _dim("; ".join(f"{letter} {meaning}" for letter, meaning in seen.legend.items()))
        shown = _shown(seen, m.config, m.special.get("mask"))
        if shown:
            yield _predictions_table(shown, m.config)
        yield _dim(f"walked step by step and run as one, the results differ by {seen.difference:.1e} at most")

    return View(seen, parts(), width=width)


def steps_table(seen: ch.Trace, rows: tuple[TraceRow, ...], width: int, why: bool = False) -> Table:
    """Show each row of the tree, groups with their sums; a narrow terminal gets fewer columns."""
    details = [heading for heading, needed in DETAILS.items() if width >= needed]
    headings = ["step", *details, ">parameters", ">FLOPs", ">bytes", ">ms", *(["why"] if why else [])]
    lines: list[Sequence[Cell]] = []
    for row in rows:
        step = row.step
        name = "  " * (row.level - 1) + row.title
        values = _details(step) if step else dict.fromkeys(details, "")
        cells = [values[heading] for heading in details]
        sums = (count(number) if number else "" for number in (row.parameters, row.flops))
        reason = [[(step.why if step else "", "dim")]] if why else []
        lines.append(
            [
                name if step else [(name, "bold")],
                *cells,
                *sums,
                size(row.bytes),
                f"{row.seconds * 1000:.3f}",
                *reason,
            ]
        )
    totals = (f"{seen.parameters:,}", count(seen.flops), size(seen.bytes), f"{seen.seconds * 1000:.3f}")
    lines += [(), [[("total", "bold")], *[""] * len(details), *totals]]
    steps = _open_table("the forward pass, step by step", headings, lines)
    for column in steps.columns:
        column.no_wrap = column.header not in ("formula", "why")
        column.overflow = "ellipsis"
    return steps


def _open_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[Cell]]) -> Table:
    """Return a table with no lines between its columns."""
    from rich import box

    return table(title, headings, rows, box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)


def _dim(line: str) -> Text:
    from rich.text import Text

    return Text(line, style="dim")


def _details(step: TraceStep) -> dict[str, str]:
    """Return what stands in the columns of DETAILS."""
    peek = step.peek
    numbers = ["hidden" if value < -1e38 else f"{value:.4g}" for value in peek.first[:3]]
    words, more = (
        (step.sample[:6], len(step.sample) > 6) if step.sample else (numbers, math.prod(step.shape) > 3)
    )
    return {
        "formula": step.formula,
        "shape": step.symbols,
        "is": " ".join(map(str, step.shape)),
        "first values": " ".join(words) + (" …" if more else ""),
        "mean ± std": "" if peek.mean is None or peek.std is None else f"{peek.mean:.3g} ± {peek.std:.3g}",
        "range": "" if peek.min is None or peek.max is None else f"{peek.min:.3g} … {peek.max:.3g}",
    }


def _shown(seen: ch.Trace, config: ch.ModelConfig, mask: int | None) -> list[Prediction]:
    """Return the predictions worth a line: what comes next, what a mask stands for, or all there are."""
    if config.head == "lm" and config.family == "decoder":
        return list(seen.predictions[-1:])
    masked = [prediction for prediction in seen.predictions if mask is not None and prediction.id == mask]
    return masked if config.head == "mlm" and masked else list(seen.predictions)


def _predictions_table(predictions: list[Prediction], config: ch.ModelConfig) -> Table:
    """Show what the head finds likely; for an encoder-decoder one line for each token it writes."""
    rows = [
        (
            prediction.at if prediction.position is None else f"{prediction.position} {prediction.at}",
            prediction.chosen.label,
            f"{prediction.chosen.probability:.4f}",
            "  ".join(f"{choice.label} {choice.probability:.4f}" for choice in prediction.candidates),
        )
        for prediction in predictions
    ]
    if config.head != "lm":
        return _open_table("what the head says", ("at", "says", ">probability", "candidates"), rows)
    title = "token by token" if config.family == "encoder-decoder" else "what comes next"
    return _open_table(title, ("after", "writes", ">probability", "candidates"), rows)


def attention(
    model: ModelArgument,
    text: Prompt,
    *,
    target: str | None = None,
    pair: str | None = None,
    kind: Literal["self", "encoder", "cross"] | None = None,
    layer: int | None = None,
    head: str | None = None,
    rollout: bool = False,
    entropy: bool = False,
    plot: Path | None = None,
    output: Path | None = None,
) -> View:
    """Show where each head looks: its entropy and strongest link, patterns and rollout as pictures and files.

    Args:
        text (TEXT): the text; for a model of images, an image file
        kind: one kind of attention; default: all that there are
        layer: one layer, all of its heads
        head: one head, layer.head: 3.2, encoder.0.5, cross.1.2
        rollout: follow attention through all layers: what each position is made of
        entropy: draw how spread each head's attention is, in place of the patterns
        output: write the patterns themselves: FILE.json or .npz

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
    if output is not None:
        from clearhead.inside.attention import checked_ending

        checked_ending(output)
    m = model()
    from clearhead.inside import attention as inside
    from clearhead.inside import names

    chosen: str | None = "self" if rollout and kind is None else kind
    layers = None if layer is None else [layer]
    if head is not None:
        chosen_head = names.find_heads(m.config, [head])[0]
        refuse(
            kind not in (None, chosen_head.kind),
            f'head "{head}" is of the kind {chosen_head.kind}, not {kind}: leave --kind out',
        )
        chosen, layers, head = chosen_head.kind, [chosen_head.layer], str(chosen_head)
    maps = inside.attention(m, text, target, pair, None if chosen is None else [chosen], layers)
    notes = [*names.unpatterned(m.config)]
    shown = maps.heads() if head is None else [maps.head(head)]
    body: dict[str, Any] = {
        "aggregated": maps.aggregated,
        "axes": {
            each.kind: {"queries": each.queries.to_dict(), "keys": each.keys.to_dict()}
            for each in (maps.of(name)[0] for name in maps.kinds)
        },
        "heads": [pattern.summary() if head is None else pattern.to_dict() for pattern in shown],
    }
    if rollout:
        body["rollout"] = maps.rollout(maps.kinds[0]).to_dict()
    if output is not None:
        body["output"] = str(maps.save(output))
        notes.append(f"saved {output}")
    parts: list[Any] = []
    if plot is None:
        parts.append(_rollout_table(maps) if rollout else _heads_table(shown))
    if maps.aggregated > 1:
        parts.append(f"a long input: {maps.aggregated} tokens per cell; entropies are of single tokens")
    of = maps.kinds[0] if len(maps.kinds) == 1 else "self"
    if head is not None:
        draw = drawing("prompts:draw_head", maps.head(head))
    elif layer is not None:
        draw = drawing("prompts:draw_layer", maps.layer(layer, of))
    elif rollout:
        draw = drawing("prompts:draw_rollout", maps.rollout(of))
    else:
        draw = drawing(f"prompts:draw_{'entropy' if entropy else 'model'}", maps, of)
    return View(body, parts, draw, notes)


def _heads_table(shown: list[HeadPattern]) -> Table:
    """Show a row for each head."""
    columns: dict[str, Column] = {
        **{"head": "{[0].head}", ">entropy, bits": "{[0].entropy:.2f}"},
        "query": lambda row: _named(row[0].queries, row[1].query),
        "looks at key": lambda row: _named(row[0].keys, row[1].key),
        ">weight": "{[1].weight:.3f}",
    }
    return listing("", columns, ((pattern, pattern.strongest) for pattern in shown))


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
    model: ModelArgument,
    text: Prompt,
    *,
    target: str | None = None,
    pair: str | None = None,
    top: int | None = None,
    position: int = -1,
    contributions: bool = False,
    token: str | None = None,
    against: str | None = None,
    tuned: tuple[str, ...] = (),
    jacobian: tuple[str, ...] = (),
    save: Path | None = None,
    through: Path | None = None,
) -> View:
    """Show what the model would say if it stopped after each layer, or what each part adds to a logit.

    Args:
        text (TEXT): the text; for a model of images, an image file
        top: how many of the likeliest tokens to keep; default: 5
        position: which token's answer to print; -1 is the last
        contributions: show what each head, feed-forward and embedding adds to a token's logit over the mean
        token: of contributions: whose logit (· is a space); default: what the model says
        against: of contributions: subtract this token's logit, not the mean; "runner-up": the best other one
        tuned (DATA): first train a tuned lens on this data: files, or an embedded corpus
        jacobian (DATA): first measure a Jacobian lens on this data
        save (FILE): where to write the tuned or Jacobian lens, as safetensors
        through (FILE): read through a lens that was saved

    For example:
      clearhead lens my-model/ "The cat sat on the" --plot lens.png
      clearhead lens m/ "The cat sat" --tuned corpus.txt --save tuned.safetensors
      clearhead lens my-model/ "The cat sat on the" --through tuned.safetensors
      clearhead lens m/ "The cat sat on the" --contributions --against runner-up
      clearhead lens my-model/ "Ein Hund" --target "A dog" --position 0 --json
    """
    refuse(
        not contributions and (token is not None or against is not None),
        "--token and --against choose a logit to take apart: add --contributions",
    )
    fitted = [name for name in (tuned, jacobian, through) if name]
    refuse(len(fitted) > 1, "--tuned, --jacobian and --through each give a lens: choose one")
    refuse(
        contributions and bool(fitted),
        "--contributions reads no layer through a lens: leave one of the two out",
    )
    refuse(save is not None and not (tuned or jacobian), "--save writes a lens: add --tuned or --jacobian")
    refuse(
        contributions and top is not None,
        "--top counts tokens of each layer, and --contributions shows parts: leave one of the two out",
    )
    check_output(save)
    m = model()
    from clearhead.inside import lens as inside
    from clearhead.inside import translators
    from clearhead.inside.inputs import find_column

    if contributions:
        terms = inside.contributions(m, text, token, position, target, against, pair)
        return View(terms, [_contribution_table(terms)], drawing("prompts:draw_contributions", terms))
    own = None
    if fitted:
        fit = translators.fit_tuned if tuned else translators.fit_jacobian
        own = translators.Translators.load(through) if through else fit(m, tuned or jacobian)
    if own is not None and save is not None:
        own.save(save)
    seen = inside.lens(m, text, target, pair, 5 if top is None else top, translators=own)
    parts = [_lens_table(seen, find_column(position, seen.columns))]
    if own is None:
        return View(seen, parts, drawing("prompts:draw_lens", seen))
    body = {**seen.to_dict(), "lens": own.kind, "logit_lens_bits": own.plain, "lens_bits": own.divergence}
    notes = [] if save is None else [f"saved {save}"]
    return View(body, [*parts, _fitted_table(own, seen.layers)], drawing("prompts:draw_lens", seen), notes)


def _fitted_table(lens: Translators, layers: Sequence[str]) -> Table:
    """Show how far each layer is from the model, through the logit lens and through this one."""
    rows = [(name, f"{a:.3f}", f"{b:.3f}") for name, a, b in zip(layers, lens.plain, lens.divergence)]
    caption = "bits of Kullback-Leibler divergence from the model, on text that was held out"
    return table(f"{lens.kind} lens", ("layer", ">logit lens", f">{lens.kind} lens"), rows, caption)


def _lens_table(lens: Lens, column: int) -> Table:
    """Show a row for each layer, for one column."""
    chosen, true = lens.chosen_names[column], lens.true_names[column]
    ranks = [lens.chosen_ranks, *([lens.true_ranks] if true else [])]
    rows = []
    for layer, name in enumerate(lens.layers):
        best = zip(lens.top_names[layer][column], lens.top_probabilities[layer, column].tolist())
        bits = [f"{float(each[layer, column]):.2f}" for each in (lens.entropy, lens.divergence)]
        ranked = [str(int(each[layer, column])) for each in ranks]
        rows.append((name, "  ".join(f"{token} {share:.2f}" for token, share in best), *bits, *ranked))
    headings = ("layer", f"likeliest {lens.kind}, probability", ">entropy", ">KL", ">rank", ">true")
    caption = f"entropy and KL (of the last layer from this one) in bits; rank: of {chosen}"
    also = f"; true: rank of {true}, which does come" if true else ""
    return table(
        f"after {lens.columns[column]}: {chosen}", headings if true else headings[:-1], rows, caption + also
    )


def _contribution_table(contributions: Contributions) -> Table:
    """Show the largest terms, the rest in one row, and the sum."""
    largest = contributions.largest(TERMS)
    values = {f"head {term.name}" if term.head is not None else term.name: term.value for term in largest}
    if len(largest) < len(contributions.terms):
        values[f"{len(contributions.terms) - len(largest)} others"] = contributions.total - sum(
            values.values()
        )
    sums = {"sum": contributions.total, "the model's logit": contributions.logit}
    if contributions.capped is not None:
        before = {"the model's logit before its soft cap": contributions.logit}
        sums = {"sum": contributions.total, **before, "the model's logit": contributions.capped}
    rows, totals = ([(name, f"{value:+.4f}") for name, value in part.items()] for part in (values, sums))
    title = f"{contributions.logit_name}, after {contributions.columns[contributions.column]}"
    p = contributions.probability
    caption = "" if p is None else f"the model gives {contributions.choice} the probability {p:.4f}"
    return table(title, ("part", ">adds"), [*rows, (), *totals], caption)


def patch(
    model: ModelArgument,
    clean: str,
    corrupt: str,
    *,
    answer: str | None = None,
    wrong: str | None = None,
    part: tuple[Part, ...] = ("residual", "attention", "feedforward"),
    position: int = -1,
    target: str | None = None,
    align: Literal["tokens", "words"] = "tokens",
    subject: tuple[str, str] | None = None,
) -> View:
    """Find which layer, token and head carries the answer: put clean activations into a corrupt run.

    Activations are put in one at a time. The logit of the answer less that of the wrong one is 0 in the
    corrupt run and 1 in the clean run.

    Args:
        clean (CLEAN): the prompt whose activations are put into the other run
        corrupt (CORRUPT): the prompt that is run
        answer: what the clean run should say (· is a space); default: what it says
        wrong: what the corrupt run says; default: that, or the runner-up
        part: what is patched; heads at all tokens at once
        position: where the answer is read; -1 is the last token
        target: what the decoder of an encoder-decoder has written; default: what it writes for both alike
        align: compare prompts token by token, or, of unequal length, by the words that both have
        subject (TEXT): prompts of unequal length: the text that differs, in CLEAN and in CORRUPT

    For example:
      clearhead patch my-model/ "Ann met Tom. Ann" "Ann met Tom. Tom" --plot map.png
      clearhead patch my-model/ "Paris is in" "Rome is in" --answer " France"
      clearhead patch my-model/ "Paris is in" "New York is in" --align words
      clearhead patch my-model/ "Oslo is" "New York is" --subject Oslo "New York"
    """
    m = model()
    from clearhead.inside.patch import patch as run

    by: Literal["words"] | None = "words" if align == "words" else None
    patching = run(m, clean, corrupt, answer, wrong, part, position, target, align=by, subject=subject)
    return View(patching, _patches(patching), drawing("prompts:draw_patching", patching))


def _patches(patching: Patching) -> Iterator[Any]:
    """Show the patches that bring back most, map by map."""
    rows: list[Sequence[str]] = []
    for patch_map in patching.maps:
        cells = [
            (value, row, column)
            for row, values in enumerate(patch_map.values.tolist())
            for column, value in enumerate(values)
            if not math.isnan(value)  # not a number: no such head
        ]
        most = sorted(cells, key=lambda cell: abs(cell[0]), reverse=True)[:PATCHES]
        rows += [
            (patch_map.title, patch_map.rows[row], patch_map.columns[column], f"{value:+.3f}")
            for value, row, column in most
        ]
        rows.append(())
    title = f"logit of {patching.answer} less that of {patching.wrong}, after {patching.position}"
    yield table(title, ("part", "layer", "token or head", ">brought back"), rows)
    clean, corrupt = patching.clean_difference, patching.corrupt_difference
    yield f"clean run {clean:+.4f} = 1, corrupt run {corrupt:+.4f} = 0"
    if patching.note:
        yield patching.note
