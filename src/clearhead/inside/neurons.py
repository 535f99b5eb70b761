"""The neurons of a feed-forward: their names, what fires each most over a corpus, and what each promotes.

A name such as "2.117" is layer 2, neuron 117; "2.0.117" has an expert between them, or the shared one,
"2.shared.117"; "encoder.0.5" is in the stack before the head's.

A corpus is read as passages, stretches of a text that the model reads at once. The answer at a place is what
the head is there to say: the next token, or, for a masked model, the token itself. What fires a neuron is
kept as its highest activations, with a note on each place: memory does not grow with the corpus.

What a neuron promotes is the straight way from what it writes to the scores of the head. It adds its column
of `down` to the residual stream, as often as it fires. On its way to the head that vector passes norms and
perhaps linear layers; what attention and later feed-forwards make of it is left out. Of a norm the linear
part is kept: the mean is subtracted (layernorm) and the weight multiplied. Left out are the size by which a
norm divides, which depends on the text, and the activation in a masked model's head. So the scores rank the
tokens that a neuron promotes, and do not say by how much.

Shapes: N neurons of one feed-forward, K contexts kept, B batch, T tokens, W tokens of a window, P promoted
tokens, D model, V tokens of the vocabulary or classes.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.core.config import StackSpec
from clearhead.core.heads import ClassifierHead, LanguageHead, TokenHead
from clearhead.core.stack import Stack
from clearhead.errors import InputError, refuse
from clearhead.hub import preprocessor, tokenizer
from clearhead.inside import inputs, results
from clearhead.inside.logit_attribution import freeze
from clearhead.inside.names import layer_names
from clearhead.learn.batches.padding import real_tokens
from clearhead.run.api import Model
from clearhead.run.quant.layers import weight_of
from clearhead.variants.routing import Experts

Given = str | Sequence[int] | tuple[str, str] | preprocessor.Image | inputs.Prepared
LONGEST = 512  # tokens of a passage, though the model may take more
BATCH = 4096  # tokens of a batch, padding included
AROUND = 12  # tokens that are kept on each side of a token
WINDOW = 2 * AROUND + 1
NOTE = WINDOW + 3  # a window of ids, then the answer, the number of the text, the position in it
NOTHING = -1  # in a note: no token, no answer


# Passages of a corpus ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Passage:
    """A stretch of one text that the model reads at once."""

    prepared: inputs.Prepared
    number: int  # of the text
    start: int  # of the passage in its text, in tokens
    answers: tuple[int, ...]  # one per token of the stack that feeds the head; NOTHING: not known

    @property
    def size(self) -> int:
        """Tokens of both stacks."""
        return len(self.prepared.tokens) + len(self.prepared.source_tokens or ())

    def notes(self, stack: str) -> Tensor:
        """Return a note on each token of a stack: [T, NOTE]."""
        tokens = self.prepared.tokens_of(stack)
        ids = torch.tensor(tokens.ids or range(len(tokens)))  # a patch is known by its number
        around = nnf.pad(ids, (AROUND, AROUND), value=NOTHING).unfold(0, WINDOW, 1)  # T W
        answers = torch.tensor([NOTHING] * len(tokens) if stack else self.answers)
        where = self.start + torch.arange(len(tokens))
        about = torch.stack([answers, torch.full_like(where, self.number), where], 1)
        return torch.cat([around, about], 1).int()


def arguments(batch: Sequence[Passage]) -> dict[str, Tensor]:
    """Return what the model is called with: ids or pixels, masks, the source where there are two stacks."""
    rows = [passage.prepared for passage in batch]
    if not rows[0].tokens.ids:
        return {"ids": torch.cat([row.main for row in rows])}
    sources = [row.source_tokens.ids for row in rows if row.source_tokens is not None]
    return inputs.padded_rows(rows[0].m, [row.tokens.ids for row in rows], sources)


def batches(m: Model, texts: Iterable[Given], limit: int | None = None) -> Iterator[list[Passage]]:
    """Yield the passages of a corpus in the order they come, as many at a time as `BATCH` tokens hold.

    Args:
        m: the model.
        texts: texts or ids; (source, target) or a source alone for two stacks; images for a model of patches.
        limit: tokens, padding not counted, after which no further passage is read.
    """
    batch: list[Passage] = []
    read = longest = 0
    for passage in passages(m, texts):
        longest = max(longest, passage.size)
        if batch and (len(batch) + 1) * longest > BATCH:
            yield batch
            batch, longest = [], passage.size
        batch.append(passage)
        read += passage.size
        if limit is not None and read >= limit:
            break
    refuse(not batch, "the corpus is empty: give at least one text with a token in it")
    yield batch


def passages(m: Model, texts: Iterable[Any]) -> Iterator[Passage]:
    """Yield the stretches of each text that the model reads at once; texts without a token are left out."""
    for number, given in enumerate(texts):
        if isinstance(given, inputs.Prepared):
            read = given.tokens.ids or (NOTHING,) * len(given.tokens)
            answers = read if m.config.family == "encoder" else (*read[1:], NOTHING)
            yield Passage(given, number, 0, answers)
        elif m.config.family == "encoder-decoder":
            source, target = given if isinstance(given, tuple) else (given, None)
            if len(source):
                prepared = inputs.prepare(m, source, target)
                if len(prepared.tokens) > m.max_length:
                    prepared = inputs.prepare(m, source, prepared.tokens.ids[: m.max_length])
                ends = m.stops[0] if m.stops else NOTHING  # after its last token, the target ends
                yield Passage(prepared, number, 0, (*prepared.tokens.ids[1:], ends))
        elif m.model.main.spec.input != "tokens":
            prepared = inputs.prepare(m, given)
            yield Passage(prepared, number, 0, (NOTHING,) * len(prepared.tokens))
        else:
            refuse(
                isinstance(given, tuple),
                "a pair was given to a model of one stack: "
                "give texts, or a model with an encoder and a decoder",
            )
            for start, ids, following in _stretches(m, given):
                yield Passage(inputs.prepare(m, ids), number, start, tuple(following))


def _stretches(m: Model, given: str | Sequence[int]) -> Iterator[tuple[int, list[int], list[int]]]:
    """Yield where each stretch begins, its ids, and the answer at each."""
    length, masked = min(m.max_length, LONGEST), m.config.family == "encoder"
    if masked and isinstance(given, str):
        for start, encoding in tokenizer.windows(m.text_tokenizer, length, given, 0) if given.strip() else ():
            yield start, list(encoding.ids), list(encoding.ids)
        return
    ids = m.prompt_ids(given) if len(given) else []
    answers = ids if masked else [*ids[1:], NOTHING]
    for start in range(0, len(ids), length):
        yield start, ids[start : start + length], answers[start : start + length]


# What fires neurons -----------------------------------------------------------------------------------------


@dataclass(eq=False)
class Shelf:
    """The neurons of one feed-forward, or of one expert, with a note on each token that fired them most."""

    own: str  # how the names of its neurons begin
    stack: str  # "", or "encoder."
    layer: int
    part: str  # the feed-forward, or the expert, in its block
    units: Tensor  # [N]
    top: int
    activations: Tensor = field(init=False)  # [N, K], -inf where there are fewer contexts
    notes: Tensor = field(init=False)  # [N, K, NOTE], see `Passage.notes`
    written: Tensor | None = None  # [N, D], what each neuron says to the head
    promoted: tuple[Tensor, ...] | None = None  # [N, P] tokens, scores; suppressed tokens, scores
    agreement: Tensor | None = None  # [N]
    chance: Tensor | None = None  # [N]

    def __post_init__(self) -> None:
        self.activations = torch.full((len(self.units), self.top), -torch.inf)
        self.notes = torch.full((len(self.units), self.top, NOTE), NOTHING, dtype=torch.int32)

    @property
    def tap(self) -> str:
        """The activation of its neurons."""
        return f"{self.stack}blocks.{self.layer}.{self.part}.post"

    def name(self, row: int) -> str:
        """Return the name of one neuron."""
        return f"{self.own}.{int(self.units[row])}"

    def some(self, rows: Tensor | slice = slice(None)) -> "Shelf":
        """Return a shelf of some of its neurons, or of all."""
        found = replace(self, units=self.units[rows])
        found.activations, found.notes = self.activations[rows], self.notes[rows]
        return found

    def take(self, activations: Tensor, notes: Tensor) -> None:
        """Add activations [T, N] and a note on each token [T, NOTE]; of equal ones the earlier stays."""
        values, places = activations.topk(min(self.top, len(activations)), dim=0)  # K N
        values = values.T.masked_fill(values.T <= 0, -torch.inf)
        both = torch.cat([self.activations, values], 1)
        order = both.argsort(dim=1, descending=True, stable=True)[:, : self.top]
        self.activations = both.gather(1, order)
        noted = torch.cat([self.notes, notes[places.T]], 1)
        kept = noted.gather(1, order[:, :, None].expand(-1, -1, NOTE))
        self.notes = kept.masked_fill(self.activations.isinf()[:, :, None], NOTHING)


def read_batch(m: Model, batch: Sequence[Passage], shelves: Sequence[Shelf]) -> None:
    """Run one batch, and let each shelf take the activations at the real tokens that reached its neurons."""
    taps = [*{shelf.tap for shelf in shelves}, *(["*.router"] if m.config.n_experts else [])]
    taps += ["*.passed"] if m.config.depth_capacity != 1 else []
    alone = batch[0].prepared if len(batch) == 1 else None  # it may have been recorded already
    seen = (
        alone.record(*taps, logits="none")[1] if alone else inputs.recorded(m.model, taps, **arguments(batch))
    )
    notes_by_stack = {
        stack: [passage.notes(stack) for passage in batch] for stack in {shelf.stack for shelf in shelves}
    }
    for shelf in shelves:
        post = results.on_cpu(seen[shelf.tap].flatten(0, -2)[:, shelf.units.to(seen[shelf.tap].device)])
        noted = notes_by_stack[shelf.stack]
        real, notes = real_tokens([range(len(tokens)) for tokens in noted]).flatten(), torch.cat(noted)
        experts = stack_of(m, shelf.stack).layers()[shelf.layer].feedforward
        expert = shelf.part.rpartition(".")[2]
        if isinstance(experts, Experts) and expert.isdecimal():
            router = seen[f"{shelf.stack}blocks.{shelf.layer}.feedforward.router"]
            chosen = experts.choose(router.flatten(0, -2))[1].cpu()
            here = (chosen == int(expert)).any(-1)  # an expert gets its tokens in their order
            real, notes = real[here], notes[here[real]]
        passed = seen.get(f"{shelf.stack}blocks.{shelf.layer}.passed")
        if passed is not None:  # the others pass the layer by
            here = passed.flatten().cpu()
            real, notes = real & here, notes[here[real]]
        shelf.take(post[real], notes)


# Names ------------------------------------------------------------------------------------------------------


def stack_of(m: Model, prefix: str) -> Stack:
    """Return a stack by the prefix of its activations: "encoder." or ""."""
    return m.model.encoder if prefix and m.model.encoder is not None else m.model.main


def feedforwards(m: Model) -> dict[str, tuple[StackSpec, int, str, int]]:
    """Return the stack, layer, name and width of each feed-forward, by how the names of its neurons begin."""
    return {
        f"{spec.prefix}{layer}{re.sub('^feedforward(.experts)?', '', part)}": (spec, layer, part, width)
        for spec in m.config.stacks
        for layer in range(spec.n_layers)
        for part, width in spec.feedforwards(layer).items()
    }


def empty_shelves(m: Model, layer: int | str | None, neurons: Sequence[str] | None, top: int) -> list[Shelf]:
    """Return a shelf for every feed-forward that is to be looked at, with those of its neurons."""
    wanted, known = None if layer is None else str(layer).removeprefix("self."), layer_names(m.config)
    refuse(
        wanted is not None and wanted not in known,
        f'there is no layer "{layer}": layers are {", ".join(known)}',
    )
    chosen = None if neurons is None else [parse_neuron(m, name) for name in neurons]
    refuse(
        chosen is not None and not chosen,
        "no neurons are named: name some, such as 0.5, or leave neurons out",
    )
    shelves = []
    for name, (spec, number, part, width) in feedforwards(m).items():
        units = range(width) if chosen is None else sorted({unit for own, unit in chosen if own == name})
        if units and wanted in (None, f"{spec.prefix}{number}"):
            shelves.append(Shelf(name, spec.prefix, number, part, torch.tensor(units), top))
    return shelves


def parse_neuron(m: Model, name: str) -> tuple[str, int]:
    """Return the feed-forward and the unit from a neuron's name."""
    own, _, unit = name.strip().removeprefix("self.").rpartition(".")
    if own in feedforwards(m) and unit.isdecimal():
        width = feedforwards(m)[own][-1]
        refuse(int(unit) >= width, f'there is no neuron "{name}": this layer has neurons 0 to {width - 1}')
        return own, int(unit)
    form = "layer.expert.neuron, such as 0.0.5" if m.config.n_experts else "layer.neuron, such as 0.5"
    more = ", encoder.0.5 in the encoder" if m.config.family == "encoder-decoder" else ""
    raise InputError(f'there is no neuron "{name}": neurons are called {form}{more}')


# What neurons promote ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OutputLayer:
    """The last layer of a head."""

    weight: Tensor | None  # [V, D]; None where no straight way leads to scores
    names: tuple[str, ...]  # of classes; none for a vocabulary
    note: str  # what to keep in mind, or why there is no weight


def output_layer(m: Model) -> OutputLayer:
    """Return what turns the last state into scores."""
    head, names, note = m.model.head, m.class_names, "scores leave out what norms divide by"
    unread = "what a neuron promotes cannot be read off"
    if not isinstance(head, LanguageHead | TokenHead | ClassifierHead):
        return OutputLayer(None, (), f"head {m.config.head} scores no tokens and no classes: {unread}")
    if isinstance(head, TokenHead) and (head.up is not None or head.pooler is not None):
        return OutputLayer(None, (), f"a layer of the head bends what the tokens say: {unread}")
    if isinstance(head, LanguageHead):
        names = ()
        note += "; the bend in its head is taken as straight" if head.activation is not None else ""
    elif m.config.head == "span":
        names = ("answer begins", "answer ends")
    elif isinstance(head, ClassifierHead):
        if head.pooler is not None:
            note = f"a pooler bends what the tokens say before the classes are scored: {unread}"
            return OutputLayer(None, (), note)
        alone = "token alone: a neuron that fires elsewhere speaks through attention"
        where = {"cls": f"the first {alone}", "last": f"the last {alone}"}
        note += f"; classes are read from {where.get(head.pooling or 'mean', 'the mean of all tokens')}"
    return OutputLayer(results.on_cpu(head.out.weight), names, note)


def directions(m: Model, shelf: Shelf) -> Tensor:
    """Return what each neuron writes, as it arrives at the last layer of the head: [N, D]."""
    stack, head = stack_of(m, shelf.stack), m.model.head
    block, *later = stack.layers()[shelf.layer :]
    written = results.on_cpu(weight_of(block, f"{shelf.part}.down")).T[shelf.units]  # N D
    residual = block.feedforward_residual
    written = _through(residual.after, _through(residual.inside, written) * residual.scale)
    for block in later:
        for joined in (block.attention_residual, block.cross_residual, block.feedforward_residual):
            written = _through(joined.after if joined is not None else None, written)
    written = _through(stack.norm, written)
    if isinstance(head, LanguageHead):
        if head.transform is not None:
            written = written @ results.on_cpu(head.transform.weight).T
        written = _through(head.norm, written) * head.scale
    return written


def _through(norm: nn.Module | None, written: Tensor) -> Tensor:
    """Return what the linear part of a norm makes of it: without the size it divides by, and its bias."""
    return replace(freeze(norm, written), size=1.0, bias=0.0).forward(written).float()
