"""What a vector that is added to the stream promotes: the straight way from there to the scores of the head.

On its way the vector passes norms and perhaps linear layers; what attention and later feed-forwards make of
it is left out. Of a norm the linear part is kept: the mean is subtracted (layernorm) and the weight
multiplied. Left out are the size by which a norm divides, which depends on the text, and the activation in a
masked model's head. So the scores rank what is promoted, and do not say by how much.

Shapes: N vectors, D model, V tokens of the vocabulary or classes.
"""

from dataclasses import dataclass, replace

from torch import Tensor, nn

from clearhead.core.heads import LanguageHead
from clearhead.core.stack import Residual, Stack
from clearhead.inside.logit_attribution import freeze
from clearhead.inside.results import on_cpu
from clearhead.run.api import Model
from clearhead.run.quant.layers import weight_of
from clearhead.variants.heads import ClassifierHead, TokenHead


def stack_of(m: Model, prefix: str) -> Stack:
    """Return a stack by the prefix of its activations: "encoder." or ""."""
    return m.model.encoder if prefix and m.model.encoder is not None else m.model.main


@dataclass(frozen=True)
class OutputLayer:
    """The last layer of a head."""

    weight: Tensor | None  # [V, D]; None where no straight way leads to scores
    names: tuple[str, ...]  # of classes; none for a vocabulary
    note: str  # what to keep in mind, or why there is no weight


def output_layer(m: Model) -> OutputLayer:
    """Return what maps the last state to scores."""
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
    return OutputLayer(on_cpu(head.out.weight), names, note)


def arriving(m: Model, written: Tensor, tap: str) -> Tensor:
    """Return vectors that are added to an activation as they arrive at the last layer of the head: [N, D]."""
    prefix = "encoder." if tap.startswith("encoder.") else ""
    stack, head, where = stack_of(m, prefix), m.model.head, tap.removeprefix(prefix)
    joins: dict[str, Residual] = {}  # what joins each part to the stream, in order
    for layer, block in enumerate(stack.layers()):
        for part in ("attention", "cross", "feedforward"):
            if getattr(block, f"{part}_residual") is not None:
                joins[f"blocks.{layer}.{part}"] = getattr(block, f"{part}_residual")
    part, _, leaf = where.rpartition(".")
    if leaf == "post":
        written = written @ on_cpu(weight_of(stack.layers()[int(part.split(".")[1])], "feedforward.down")).T
    begins = {"resid_pre": ".attention", "resid_mid": ".feedforward", "resid_post": ".feedforward"}
    names = [] if where == "hidden" else list(joins)
    if where not in ("embedding", "hidden"):
        names = names[names.index(part + begins.get(leaf, "")) + (leaf == "resid_post") :]
    if leaf in ("out", "post"):
        written = _through(joins[names[0]].inside, written) * joins[names[0]].scale
    for name in names:
        written = _through(joins[name].after, written)
    if where != "hidden":
        written = _through(stack.norm, written)
    if isinstance(head, LanguageHead):
        if head.transform is not None:
            written = written @ on_cpu(head.transform.weight).T
        written = _through(head.norm, written) * head.scale
    return written


def _through(norm: nn.Module | None, written: Tensor) -> Tensor:
    """Return what the linear part of a norm makes of it: without the size it divides by, and its bias."""
    return replace(freeze(norm, written), size=1.0, bias=0.0).forward(written).float()
