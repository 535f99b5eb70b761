"""The feed-forward as a memory (Geva et al. 2021): what fires each neuron, and what it promotes.

    result = memories(m, texts)                           # one pass over the corpus, for every neuron
    result.ranked("agreement", 5)                         # neurons whose contexts go on as they say
    result.neuron("2.117").contexts                       # the tokens that fired it most
    result.search("the")                                  # who promotes a token, and whom it fires

A name such as "2.117" is layer 2, neuron 117; "2.0.117" has an expert between them, or the shared one,
"2.shared.117"; "encoder.0.5" is in the stack before the head's.

A corpus is read as passages, stretches of a text that the model reads at once. The answer at a place is what
the head is there to say: the next token, or, for a masked model, the token itself. A neuron fires where its
activation is above zero. A gated neuron can also go below; it then promotes what is listed as suppressed.
Of the corpus the `top` highest activations of each neuron are kept, with a note on each place. Agreement is
the share of these contexts whose answer is among the `depth` tokens that the neuron promotes most; chance is
the share of all positions of the corpus.

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
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as nnf
from torch import Tensor

from clearhead.core.config import StackSpec
from clearhead.errors import InputError, refuse, refuse_unknown
from clearhead.hub import preprocessor, tokenizer
from clearhead.hub.tokens.text import decoded, label
from clearhead.inside import inputs
from clearhead.inside.names import layer_names
from clearhead.inside.promoted import OutputLayer, arriving, output_layer, stack_of
from clearhead.inside.results import Result, on_cpu, plain
from clearhead.learn.batches.ragged import real_tokens
from clearhead.learn.tasks.images import ImagePrompt, patch_names
from clearhead.run.api import Model
from clearhead.run.quant.layers import weight_of
from clearhead.variants.routing import Experts

Order = Literal["agreement", "activation"]
NEURONS = 1024  # scored at a time: their scores of all tokens are held at once
DEPTH = 10  # promoted tokens among which the answer must be; of a small vocabulary one in twenty
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


def batches(m: Model, texts: Iterable[Given], limit: int | None = None) -> Iterator[list[Passage]]:
    """Yield the passages of a corpus in the order they come, as many at a time as `BATCH` tokens hold.

    `limit` is of tokens, padding not counted, after which no further passage is read.
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
        refuse(
            isinstance(given, ImagePrompt) or getattr(given, "vectors", None) is not None,
            f"text {number} of the corpus has images, and passages are read from tokens alone: give its text",
        )
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
class NeuronGroup:
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

    def some(self, rows: Tensor | slice = slice(None)) -> "NeuronGroup":
        """Return a group of some of its neurons, or of all."""
        group = replace(self, units=self.units[rows])
        group.activations, group.notes = self.activations[rows], self.notes[rows]
        return group

    def take(self, activations: Tensor, notes: Tensor) -> None:
        """Add activations [T, N] and a note on each token [T, NOTE]; of equal ones the earlier stays."""
        values, tokens = activations.topk(min(self.top, len(activations)), dim=0)  # K N
        values = values.T.masked_fill(values.T <= 0, -torch.inf)
        both = torch.cat([self.activations, values], 1)
        order = both.argsort(dim=1, descending=True, stable=True)[:, : self.top]
        self.activations = both.gather(1, order)
        noted = torch.cat([self.notes, notes[tokens.T]], 1)
        kept = noted.gather(1, order[:, :, None].expand(-1, -1, NOTE))
        self.notes = kept.masked_fill(self.activations.isinf()[:, :, None], NOTHING)


def read_batch(m: Model, batch: Sequence[Passage], groups: Sequence[NeuronGroup]) -> None:
    """Run one batch, and let each group take the activations at the real tokens that reached its neurons."""
    taps = [*{group.tap for group in groups}, *(["*.router"] if m.config.n_experts else [])]
    taps += ["*.passed"] if m.config.depth_capacity != 1 else []
    rows = [passage.prepared for passage in batch]
    if len(rows) == 1:
        _, seen = rows[0].record(*taps, logits="none")  # it may have been recorded already
    elif not rows[0].tokens.ids:
        seen = inputs.recorded(m.model, taps, torch.cat([row.main for row in rows]))
    else:
        sources = [row.source_tokens.ids for row in rows if row.source_tokens is not None]
        seen = inputs.recorded(
            m.model, taps, **inputs.padded_rows(m, [row.tokens.ids for row in rows], sources)
        )
    notes_by_stack = {
        stack: [passage.notes(stack) for passage in batch] for stack in {group.stack for group in groups}
    }
    for group in groups:
        post = on_cpu(seen[group.tap].flatten(0, -2)[:, group.units.to(seen[group.tap].device)])
        noted = notes_by_stack[group.stack]
        real, notes = real_tokens([range(len(tokens)) for tokens in noted]).flatten(), torch.cat(noted)
        experts = stack_of(m, group.stack).layers()[group.layer].feedforward
        expert = group.part.rpartition(".")[2]
        if isinstance(experts, Experts) and expert.isdecimal():
            router = seen[f"{group.stack}blocks.{group.layer}.feedforward.router"]
            chosen = experts.choose(router.flatten(0, -2))[1].cpu()
            here = (chosen == int(expert)).any(-1)  # an expert gets its tokens in their order
            real, notes = real[here], notes[here[real]]
        passed = seen.get(f"{group.stack}blocks.{group.layer}.passed")
        if passed is not None:  # the others pass the layer by
            here = passed.flatten().cpu()
            real, notes = real & here, notes[here[real]]
        group.take(post[real], notes)


# Names ------------------------------------------------------------------------------------------------------


def feedforwards(m: Model) -> dict[str, tuple[StackSpec, int, str, int]]:
    """Return the stack, layer, name and width of each feed-forward, by how the names of its neurons begin."""
    return {
        f"{spec.prefix}{layer}{re.sub('^feedforward(.experts)?', '', part)}": (spec, layer, part, width)
        for spec in m.config.stacks
        for layer in range(spec.n_layers)
        for part, width in spec.feedforwards(layer).items()
    }


def empty_groups(
    m: Model, layer: int | str | None, neurons: Sequence[str] | None, top: int
) -> list[NeuronGroup]:
    """Return a group for every feed-forward that is to be looked at, with those of its neurons."""
    wanted, known = None if layer is None else str(layer).removeprefix("self."), layer_names(m.config)
    if wanted is not None:
        refuse_unknown("layer", wanted, known)
    chosen = None if neurons is None else [parse_neuron(m, name) for name in neurons]
    refuse(
        chosen is not None and not chosen,
        "no neurons are named: name some, such as 0.5, or leave neurons out",
    )
    groups = []
    for name, (spec, number, part, width) in feedforwards(m).items():
        units = range(width) if chosen is None else sorted({unit for own, unit in chosen if own == name})
        if units and wanted in (None, f"{spec.prefix}{number}"):
            groups.append(NeuronGroup(name, spec.prefix, number, part, torch.tensor(units), top))
    return groups


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


def directions(m: Model, group: NeuronGroup) -> Tensor:
    """Return what each neuron writes, as it arrives at the last layer of the head: [N, D]."""
    block = stack_of(m, group.stack).layers()[group.layer]
    written = on_cpu(weight_of(block, f"{group.part}.down")).T[group.units]  # N D
    return arriving(m, written, f"{group.stack}blocks.{group.layer}.feedforward.out")


# What was found ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Context:
    """One token of the corpus that fired a neuron."""

    before: str
    token: str
    after: str
    activation: float
    answer: str | None  # what the head is there to say; None where nothing is known
    text: int  # number of the text, counted from 0
    place: int  # of the token in it


@dataclass(frozen=True)
class Neuron(Result):
    """One neuron."""

    kind: ClassVar[str] = "neuron"

    name: str
    activation: float  # the highest seen; 0: it never fired
    contexts: tuple[Context, ...]  # highest first
    promoted: tuple[tuple[str, float], ...]  # tokens or classes, scores; highest first; () where unknown
    suppressed: tuple[tuple[str, float], ...]  # lowest first
    agreement: float | None
    chance: float | None


@dataclass(frozen=True)
class Found(Result):
    """Neurons that have to do with one token; best first."""

    token: str
    promoting: tuple[tuple[str, float], ...]  # name, score of the token
    fired: tuple[tuple[str, float, float], ...]  # name, share of its contexts at it, highest activation


@dataclass(frozen=True, eq=False)
class Memories(Result):
    """What a corpus showed of a model's neurons."""

    json_names = ("tokens", "top", "depth", "note")

    m: Model = field(repr=False)
    groups: tuple[NeuronGroup, ...] = field(repr=False)
    top: int
    depth: int
    tokens: int  # read, both stacks together
    head: OutputLayer = field(repr=False)
    note: str  # how to read what neurons promote, or why there is nothing to read

    def neuron(self, name: str) -> Neuron:
        """Return one neuron by its name."""
        own, unit = parse_neuron(self.m, name)
        for group in self.groups:
            if group.own == own and unit in group.units:
                return self._neuron(group, group.units.tolist().index(unit))
        raise InputError(f'neuron "{name}" was not looked at: name its layer, or leave layer and neurons out')

    def ranked(self, by: Order | None = None, count: int | None = 10) -> list[Neuron]:
        """Return the first neurons by agreement beyond chance, or by highest activation.

        Activation settles ties, too. With None, agreement counts where it is known.
        """
        by = by or ("agreement" if self.agrees else "activation")
        refuse(
            by == "agreement" and not self.agrees, f"no agreement is known ({self.note}): sort by activation"
        )
        rows = [(group, row) for group in self.groups for row in range(len(group.units))]
        order = torch.cat([group.activations[:, 0] for group in self.groups]).argsort(
            descending=True, stable=True
        )
        if by == "agreement":
            # Agreement beyond chance; -inf where it is not known.
            gains = [
                torch.full((len(group.units),), -torch.inf)
                if group.agreement is None or group.chance is None
                else group.agreement - group.chance
                for group in self.groups
            ]
            order = order[torch.cat(gains)[order].argsort(descending=True, stable=True)]
        return [self._neuron(*rows[place]) for place in order[:count].tolist()]

    @property
    def agrees(self) -> bool:
        """Is any neuron's agreement known?"""
        return any(group.agreement is not None for group in self.groups)

    def search(self, token: str | int, count: int = 10) -> Found:
        """Return the neurons that promote a token or class most, and those it fires most often."""
        names = self.head.names
        number = inputs.find_name(token, names, "class") if names else inputs.find_token(self.m, token)
        promoting: list[tuple[str, float]] = []
        fired: list[tuple[str, float, float]] = []
        for group in self.groups:
            if group.written is not None and self.head.weight is not None:
                best = (group.written @ self.head.weight[number]).topk(min(count, len(group.units)))
                promoting += [(group.name(int(row)), float(score)) for score, row in zip(*best)]
            if not self.head.names:
                shares = (group.notes[:, :, AROUND] == number).float().mean(1)
                best = shares.topk(min(count, len(group.units)))
                fired += [
                    (group.name(int(row)), float(share), float(group.activations[row, 0]))
                    for share, row in zip(*best)
                    if share > 0
                ]
        promoting.sort(key=lambda pair: -pair[1])
        fired.sort(key=lambda triple: (-triple[1], -triple[2]))
        return Found(self._label(number), tuple(promoting[:count]), tuple(fired[:count]))

    def to_dict(self, by: Order | None = None, count: int | None = 10) -> dict[str, Any]:
        """Return plain JSON values: the first `count` neurons, None: all."""
        return super().to_dict() | {"neurons": plain(self.ranked(by, count))}

    def _label(self, number: int) -> str:
        """Return a token or a class as people read it."""
        return self.head.names[number] if self.head.names else label(self.m.tokenizer, number)

    def _neuron(self, group: NeuronGroup, row: int) -> Neuron:
        contexts = tuple(
            context_of(self.m, float(value), note.tolist())
            for value, note in zip(group.activations[row], group.notes[row])
            if value > 0
        )
        lists = [part[row].tolist() for part in group.promoted or ()] or [[]] * 4
        return Neuron(
            name=group.name(row),
            activation=contexts[0].activation if contexts else 0.0,
            contexts=contexts,
            promoted=tuple(zip(map(self._label, lists[0]), lists[1])),
            suppressed=tuple(zip(map(self._label, lists[2]), lists[3])),
            agreement=None if group.agreement is None else float(group.agreement[row]),
            chance=None if group.chance is None else float(group.chance[row]),
        )


def memories(
    m: inputs.AnyModel,
    texts: Iterable[Given],
    layer: int | str | None = None,
    top: int = 10,
    neurons: Sequence[str] | None = None,
    limit: int | None = None,
) -> Memories:
    """Read a corpus once and keep what fires each neuron; say what each promotes.

    Args:
        m, texts: as for `prepare`, a text after the other, perhaps a stream; (source, target) for two stacks.
        layer: a layer of the stack that feeds the head, or "encoder.1"; None: all of both stacks.
        top: contexts that are kept for each neuron, and tokens listed as promoted and suppressed.
        neurons: names such as "2.117"; None: every neuron of the layers.
        limit: stop after so many tokens.
    """
    return read_corpus(m, texts, layer, top, neurons, limit).judged()


@dataclass(frozen=True, eq=False)
class ReadCorpus:
    """What fired the neurons of a model in a corpus; `judged` adds what they promote."""

    m: Model
    groups: tuple[NeuronGroup, ...]
    top: int
    texts: int
    tokens: int
    frequency: Tensor  # [V] of each token among the answers; [0] where nothing is chosen from a vocabulary

    def judged(self, neurons: Sequence[str] | None = None) -> Memories:
        """Return it with what the neurons promote; None: all of them."""
        m, head, groups = self.m, output_layer(self.m), [group.some() for group in self.groups]
        if neurons is not None:
            wanted = {parse_neuron(m, name) for name in neurons}
            rows = {own: [unit for name, unit in wanted if name == own] for own, _ in wanted}
            groups = [
                group.some(torch.isin(group.units, torch.tensor(rows[group.own])))
                for group in self.groups
                if group.own in rows
            ]
        depth = min(DEPTH, max(1, len(self.frequency) // 20)) if len(self.frequency) else 0
        only = "the encoder speaks to cross-attention, not to the head; " if head.weight is not None else ""
        for group in groups:
            if head.weight is not None and not group.stack:
                _judge(m, group, head.weight, depth, self.frequency)
                only = ""
        return Memories(m, tuple(groups), self.top, depth, self.tokens, head, only + head.note)


def read_corpus(
    m: inputs.AnyModel,
    texts: Iterable[Given],
    layer: int | str | None = None,
    top: int = 10,
    neurons: Sequence[str] | None = None,
    limit: int | None = None,
) -> ReadCorpus:
    """Read a corpus once and keep what fires each neuron; the arguments are those of `memories`."""
    m = inputs.as_model(m)
    refuse(top < 1, f"top {top} must be 1 or more")
    groups, head = empty_groups(m, layer, neurons, top), output_layer(m)
    count = tokens = 0
    vocabulary = m.config.vocab_size if head.weight is not None and not head.names else 0
    counts = torch.zeros(vocabulary, dtype=torch.long)
    for batch in batches(m, texts, limit):
        read_batch(m, batch, groups)
        count, tokens = batch[-1].number + 1, tokens + sum(passage.size for passage in batch)
        if vocabulary:
            answers = torch.tensor([answer for passage in batch for answer in passage.answers])
            counts += answers[answers != NOTHING].bincount(minlength=vocabulary)
    return ReadCorpus(m, tuple(groups), top, count, tokens, counts / counts.sum().clamp(min=1))


def _judge(m: Model, group: NeuronGroup, weight: Tensor, depth: int, frequency: Tensor) -> None:
    """Add to a group what its neurons promote, and how far that agrees with what fires them."""
    group.written = directions(m, group)
    count, parts = min(max(group.top, depth), len(weight)), []
    for some in torch.split(group.written, NEURONS):
        scores = some @ weight.T  # N V
        high, low = scores.topk(count), scores.topk(count, largest=False)
        parts.append((high.indices, high.values, low.indices, low.values))
    promoted = [torch.cat(column) for column in zip(*parts)]
    group.promoted = tuple(part[:, : group.top] for part in promoted)
    if depth:
        best = promoted[0][:, :depth]
        answers = group.notes[:, :, WINDOW]  # N K
        group.agreement = (answers[:, :, None] == best[:, None]).any(-1).float().mean(1)
        group.chance = frequency[best].sum(1)


def context_of(m: Model, value: float, note: list[int]) -> Context:
    """Return a note in words."""
    window, (answer, text, place) = note[:WINDOW], note[WINDOW:]
    here = window[AROUND]
    if m.model.main.spec.input != "tokens":
        return Context(f"image {text} ", patch_names(m.config)[here], "", value, None, text, place)
    left, right = (
        [token for token in part if token != NOTHING] for part in (window[:AROUND], window[AROUND + 1 :])
    )
    before, upto, whole = (_text(m, ids) for ids in (left, [*left, here], [*left, here, *right]))
    token = upto[len(before) :] if upto.startswith(before) else label(m.tokenizer, here)
    if token.strip(" "):  # the space before a word belongs to what comes before
        before, token = before + " " * (len(token) - len(token.lstrip(" "))), token.lstrip(" ")
    after = whole[len(upto) :] if whole.startswith(upto) else _text(m, right)
    known = None if answer == NOTHING else label(m.tokenizer, answer)
    return Context(before, token, after, value, known, text, place)


def _text(m: Model, ids: list[int]) -> str:
    if m.tokenizer is None:
        return "".join(f" {token}" for token in ids)
    return decoded(m.tokenizer, ids, special=True)
