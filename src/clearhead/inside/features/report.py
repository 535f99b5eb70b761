"""What a dictionary is worth on text that it was not trained on, and what its features are.

    report = measure(m, dictionary, rows)                # loss recovered, variance explained, L0, dead share
    shown = show_features(m, dictionary, texts, [17])    # strongest examples, what is promoted, neighbours

Loss recovered: the model runs with the reconstruction in the place of the activation, and with zeros; 1 is
the loss of the model itself, 0 that of zeros. The loss is of the next token; of a model that does not write
on, it is the KL divergence from its own answers.

Shapes: B rows, T tokens, N features, D of what is read, O of what is written, V vocabulary.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as nnf
from torch import Tensor

from clearhead.errors import refuse
from clearhead.hub.tokens.text import label
from clearhead.inside import inputs
from clearhead.inside.features.dictionary import Dictionary
from clearhead.inside.features.streams import Row, Stream
from clearhead.inside.memories import Given, Neuron, NeuronGroup, batches, context_of
from clearhead.inside.promoted import arriving, output_layer
from clearhead.inside.results import Floats, Result, on_cpu
from clearhead.learn.batches.ragged import real_tokens
from clearhead.run.api import Model
from clearhead.variants.contexts import edit, evaluating, record

AT_ONCE = 1024  # tokens of one pass whose logits are held
SOME = 256  # features whose scores of the vocabulary are held at once


@dataclass(frozen=True, eq=False)
class FeatureReport(Result):
    """A dictionary on held-out text."""

    json_names = (
        "tokens", "loss", "loss_replaced", "loss_ablated", "loss_recovered", "variance_explained", "l0",
        "dead",
    )  # fmt: skip

    tokens: int  # whose activations were reconstructed
    loss: float | None  # of the model; None where its head gives no scores
    loss_replaced: float | None  # with the reconstruction in the activation's place
    loss_ablated: float | None  # with zeros there
    variance_explained: float
    l0: float  # features active per token
    density: Floats = field(repr=False)  # [N] share of the tokens at which each is active

    @property
    def loss_recovered(self) -> float | None:
        """Return what of the loss between zeros and the model the reconstruction recovers."""
        if self.loss is None or self.loss_replaced is None or self.loss_ablated is None:
            return None
        return (self.loss_ablated - self.loss_replaced) / (self.loss_ablated - self.loss)

    @property
    def dead(self) -> float:
        """Return the share of features that no held-out token activates."""
        return float((self.density == 0).mean())


@torch.no_grad()
def measure(m: Model, dictionary: Dictionary, rows: Sequence[Row]) -> FeatureReport:
    """Return what a dictionary is worth on rows."""
    stream = Stream(m, rows, dictionary.reads, dictionary.writes)
    model, tokens, targets = m.model, 0, 0
    losses, active = (
        torch.zeros(3, dtype=torch.double),
        torch.zeros(dictionary.n_features, dtype=torch.double),
    )
    left = squares = 0.0
    total: Tensor | float = 0.0
    scored = True
    for some in stream.batches(rows, AT_ONCE):
        arguments, counts = stream.arguments(some)
        with evaluating(model), record(model, *stream.taps) as seen:
            clean = model(**arguments).logits
        x, y = dictionary.joined(seen)
        replaced = dictionary(x).to(y.dtype)
        tokens += int(counts.sum())
        active += (dictionary.encode(x[counts]) > 0).sum(0).double().cpu()
        wanted, got = y[counts].double(), replaced[counts].double()
        left += float((wanted - got).square().sum())
        squares += float(wanted.square().sum())
        total = total + wanted.sum(0)
        scored = scored and clean is not None
        if scored:
            loss, count = _loss(m, clean, clean, arguments)
            each = [loss]
            for values in (replaced, torch.zeros_like(y)):
                parts = dictionary.parts(torch.where(counts[..., None], values, y))
                with evaluating(model), edit(model, {tap: _value(part) for tap, part in parts.items()}):
                    each.append(_loss(m, model(**arguments).logits, clean, arguments)[0])
            losses, targets = losses + torch.tensor(each, dtype=torch.double), targets + count
    assert isinstance(total, Tensor)
    variance = squares - float(total.square().sum()) / tokens
    means: list[Any] = (losses / targets).tolist() if scored else [None] * 3
    density = (active / tokens).float().numpy()
    loss, with_features, with_zeros = means
    explained, l0 = 1 - left / variance, float(active.sum()) / tokens
    return FeatureReport(tokens, loss, with_features, with_zeros, explained, l0, density)


def _value(y: Tensor) -> Any:
    return lambda x: y.to(x)


def _loss(m: Model, logits: Tensor, clean: Tensor, arguments: dict[str, Tensor]) -> tuple[float, int]:
    """Return the sum of losses of next tokens, or of KL divergences from `clean`, and their number."""
    real = arguments.get("mask", torch.ones_like(arguments["ids"], dtype=torch.bool))
    if m.config.head == "lm" and m.model.main.spec.causal:
        ids = arguments["ids"][:, 1:].masked_fill(~real[:, 1:], -100).flatten()
        scores = logits[:, :-1].flatten(0, 1).float()
        return float(nnf.cross_entropy(scores, ids, reduction="sum")), int(real[:, 1:].sum())
    if logits.ndim == 3 and logits.shape[:2] == real.shape:
        logits, clean = logits[real], clean[real]
    p, q = (nnf.log_softmax(x.float().flatten(0, -2), -1) for x in (clean, logits))
    return float((p.exp() * (p - q)).sum()), len(p)


# What features are ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Feature(Neuron):
    """One feature: its strongest examples, what it promotes, how often it is active, its neighbours."""

    kind: ClassVar[str] = "feature"

    density: float = 0.0  # share of the tokens at which it is active
    nearest: tuple[tuple[int, float], ...] = ()  # features whose directions have the highest cosine


@dataclass(frozen=True)
class ShownFeatures(Result):
    """Features of a dictionary, as a text shows them."""

    features: tuple[Feature, ...]
    tokens: int  # read
    note: str  # how to read what is promoted, or why there is nothing to read


def show_features(
    m: Model,
    dictionary: Dictionary,
    texts: Iterable[Given],
    features: Sequence[int] = (),
    top: int = 5,
    count: int = 10,
    limit: int | None = 30_000,
) -> ShownFeatures:
    """Read a text, and return features with the tokens at which they are strongest.

    Args:
        m, texts: as for `memories`.
        dictionary: of this model.
        features: which; (): the `count` with the highest activations.
        top: examples, promoted tokens and neighbours of each.
        count: features that are listed where none are named.
        limit: of tokens that are read.
    """
    prefix = "encoder." if dictionary.at.startswith("encoder.") else ""
    for number in features:
        refuse(not 0 <= number < dictionary.n_features, f"there is no feature {number}: they are 0 to "
               f"{dictionary.n_features - 1}")  # fmt: skip
    group = NeuronGroup("", prefix, 0, "", torch.arange(dictionary.n_features), top)
    active, tokens = torch.zeros(dictionary.n_features), 0
    first = 0 if prefix or m.config.family == "encoder" else 1  # as in training
    for batch in batches(m, texts, limit):
        prepared = [passage.prepared for passage in batch]
        sources = [row.source_tokens.ids for row in prepared if row.source_tokens is not None]
        arguments = inputs.padded_rows(m, [row.tokens.ids for row in prepared], sources)
        seen = inputs.recorded(m.model, dictionary.reads, **arguments)
        noted = [passage.notes(prefix) for passage in batch]
        x, _ = dictionary.joined({tap: seen[tap] for tap in dictionary.reads} | _blank(dictionary, seen))
        kept = real_tokens([range(len(notes)) for notes in noted])
        kept[:, :first] = False
        with torch.no_grad():
            a = on_cpu(dictionary.encode(x[kept.to(x.device)]))
        tokens, active = tokens + len(a), active + (a > 0).sum(0)
        if len(a):
            group.take(a, torch.cat([notes[first:] for notes in noted]))
    refuse(not tokens, "the text has no token to show features at: give a longer one")
    names, density = output_layer(m).names, active / tokens
    chosen = (
        list(features) or group.activations[:, 0].topk(min(count, dictionary.n_features)).indices.tolist()
    )
    promoted, note = _promoted(m, dictionary, chosen, top)
    directions = nnf.normalize(on_cpu(dictionary.W_dec), dim=1)
    listed = []
    for row, number in enumerate(chosen):
        near = (directions @ directions[number]).index_fill(0, torch.tensor(number), -2.0)
        best = near.topk(min(top, len(near) - 1))
        high, low = (
            tuple((names[at] if names else label(m.tokenizer, at), value) for at, value in zip(*side))
            for side in promoted[row]
        )
        contexts = tuple(
            context_of(m, float(value), notes.tolist())
            for value, notes in zip(group.activations[number], group.notes[number])
            if value > 0
        )
        listed.append(
            Feature(
                name=str(number),
                activation=contexts[0].activation if contexts else 0.0,
                contexts=contexts,
                promoted=high,
                suppressed=low,
                agreement=None,
                chance=None,
                density=float(density[number]),
                nearest=tuple(zip(best.indices.tolist(), best.values.tolist())),
            )
        )
    return ShownFeatures(tuple(listed), tokens, note)


def _blank(dictionary: Dictionary, seen: Any) -> dict[str, Tensor]:
    """Return what `joined` wants besides what is read."""
    return {tap: seen[dictionary.at] for tap in dictionary.writes if tap not in dictionary.reads}


def _promoted(m: Model, dictionary: Dictionary, features: Sequence[int], top: int) -> tuple[list[Any], str]:
    """Return for each feature the tokens that it promotes and those that it suppresses: ids and scores.

    Scores are less their mean over the vocabulary, which changes no probability.
    """
    head, none = output_layer(m), [[((), ()), ((), ())]] * len(features)
    if head.weight is None:
        return none, head.note
    if dictionary.out.startswith("encoder."):
        return none, "the encoder speaks to cross-attention, not to the head"
    if dictionary.out.endswith(("feedforward.in", "feedforward.pre")):
        return none, f"what {dictionary.out} promotes passes an activation function: it cannot be read off"
    directions = on_cpu(dictionary.W_dec[list(features)])
    written = sum(arriving(m, part, tap) for tap, part in dictionary.parts(directions).items())
    listed = []
    for some in torch.split(torch.as_tensor(written), SOME):
        scores = some @ head.weight.T  # N V
        scores -= scores.mean(1, keepdim=True)
        count = min(top, scores.shape[1])
        high, low = scores.topk(count), scores.topk(count, largest=False)
        for row in range(len(some)):
            listed.append([(side.indices[row].tolist(), side.values[row].tolist()) for side in (high, low)])
    return listed, head.note + "; scores are less their mean"
