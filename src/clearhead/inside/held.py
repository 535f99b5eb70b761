"""A pass with attention patterns, norm sizes and gates held, cut at what every part adds to the stream.

    cut = CutPass.of(prepared, "scores")
    cut.leaves["blocks.3.attention.out"]          # [1, T, D] what a part added, as a leaf of its own
    cut.outs["blocks.3.attention.out"]            # the same, as a function of the leaves before it

Held, a norm divides by the size that it measured, a head mixes values by the pattern that it had, and a
feed-forward multiplies by what its gate gave. (One without a gate multiplies each neuron by its activation's
ratio of output to input, which is exact for this input.) What every part reads is then linear in what the
parts before it added, so gradients of `outs` with respect to `leaves` are direct effects, and exact.

In a batch everything is held at the values of the first row, so that the other rows can be interventions.

Shapes: B rows, T tokens, S keys, D model, H heads, E head width, F feed-forward.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import cast

import torch
from torch import Tensor, nn

from clearhead.core.config import StackSpec
from clearhead.core.norms import LayerNorm, RMSNorm
from clearhead.core.transformer import Output, Transformer
from clearhead.errors import refuse
from clearhead.inside import names
from clearhead.inside.features.dictionary import Dictionary, load
from clearhead.inside.inputs import CachedPass, Prepared
from clearhead.inside.logit_attribution import freeze
from clearhead.inside.names import part_of
from clearhead.run.quant.layers import quantized_parts
from clearhead.variants.contexts import Recording, edit, evaluating, record, tap_names
from clearhead.variants.kinds import GlobalKind


def refuse_bent(model: Transformer) -> None:
    """Refuse a model with a part that stays no linear map when patterns, norms and gates are held."""
    config = model.config
    names.refuse_shortcuts(config)
    kinds = [kind for kind in names.kinds_of(config).values() if kind.name != "none"]
    bent = [kind for kind in kinds if not (kind.patterned and kind.has_heads)]
    refuse(
        bool(bent),
        f"a graph takes attention with a pattern in every layer: {''.join(names.unpatterned(config))}",
    )
    refuse(
        config.gated and config.gated_clamp is not None,
        f"gated_clamp {config.gated_clamp} bounds what gates multiply, so a feed-forward is no linear map of "
        "its input: ask about a model without it, or take clearhead circuit",
    )
    for spec in config.stacks:
        inner = map(spec.feedforwards, range(spec.n_layers))
        experts = [layer for layer, own in enumerate(inner) if own and "feedforward" not in own]
        refuse(
            bool(experts),
            f"layers {', '.join(map(str, experts))} are mixtures of experts, which a graph does not take: "
            "ask about a model with plain feed-forwards",
        )
        refuse(
            min(spec.capacities) < 1,
            "a router sends some tokens past a layer (mixture of depths), which a graph does not take: "
            "ask about a model without it",
        )


def exact_copy(prepared: Prepared, dtype: torch.dtype = torch.float64) -> Prepared:
    """Return the same inputs for a copy of the model in another dtype, on the CPU."""
    refuse(
        bool(quantized_parts(prepared.model)), "the weights are quantized: ask about the model before that"
    )
    names.refuse_foreign(prepared.model)
    m = copy.copy(prepared.m)
    # Hooks are left out: they are of other threads that run the same model, and come and go meanwhile.
    hooks: dict[int, object] = {
        id(kept): OrderedDict()
        for part in prepared.model.modules()
        for kept in (part._forward_hooks, part._forward_pre_hooks)
    }
    m.model = copy.deepcopy(prepared.model, hooks).cpu().to(dtype).requires_grad_(False)
    arguments = {name: getattr(prepared, name) for name in ("main", "source", "types", "vectors", "axes")}
    arguments = {name: x if x is None else x.cpu().to(dtype if x.is_floating_point() else x.dtype)
                 for name, x in arguments.items()}  # fmt: skip
    return Prepared(m, tokens=prepared.tokens, source_tokens=prepared.source_tokens, **arguments)


def on_cpu(prepared: Prepared) -> Prepared:
    """Return the same inputs with the model on the CPU: themselves, where it is there."""
    weight = next(prepared.model.parameters())
    return prepared if weight.device.type == "cpu" else exact_copy(prepared, weight.dtype)


def dictionaries_of(model: Transformer, features: Sequence[str | Path | Dictionary]) -> dict[str, Dictionary]:
    """Return dictionaries by the feed-forward output that they write."""
    by_output: dict[str, Dictionary] = {}
    for given in features:
        own = copy.deepcopy(given if isinstance(given, Dictionary) else load(given)).double().cpu()
        part = own.out.removesuffix(".out")
        refuse(
            len(own.reads) > 1 or not part.endswith(".feedforward") or own.at not in (own.out, f"{part}.in"),
            "a dictionary here is of the output of a feed-forward, read from it or from its input: "
            f"this one reads {own.at} and writes {own.out}",
        )
        refuse(own.out not in tap_names(model), f"this model has no {own.out}, which the dictionary writes")
        width = model.config.d_model
        refuse(
            own.d_in != width or own.d_out != width,
            f"the dictionary of {own.out} is of {own.d_in} dimensions, and this model has {width}: "
            "it was trained on another model",
        )
        refuse(own.out in by_output, f"two dictionaries are of {own.out}: give one")
        by_output[own.out] = own
    return by_output


# Holding ----------------------------------------------------------------------------------------------------


@contextmanager
def holding(model: Transformer) -> Iterator[None]:
    """Hold patterns, norm sizes and gates of what runs in a `with` block at the values of its first row."""
    changes: dict[str, Callable[[Tensor], Tensor | None]] = {
        f"{attention.part}.pattern": _first for attention in names.patterned(model.config)
    }
    thread = get_ident()  # others may run the same model meanwhile

    def own(hook: Callable[..., Tensor]) -> Callable[..., Tensor | None]:
        return lambda *given: hook(*given) if get_ident() == thread else None

    hooks = []
    for stack in (model.encoder, model.decoder):
        if stack is None:
            continue
        for layer in filter(stack.spec.feedforwards, range(stack.spec.n_layers)):
            part, inner = f"{stack.spec.prefix}blocks.{layer}.feedforward", list[Tensor]()
            changes[f"{part}.pre"] = _first if stack.spec.gated else partial(_keep, inner)
            if not stack.spec.gated:
                changes[f"{part}.post"] = partial(_at_ratio, inner)
        for module in (*stack.blocks.modules(), *([stack.norm] if stack.norm is not None else [])):
            gate = getattr(module, "gate", None) if hasattr(module, "head_axes") else None
            if isinstance(module, LayerNorm | RMSNorm):
                hooks.append(module.register_forward_hook(own(_held_norm)))
            elif isinstance(gate, nn.Module):
                hooks.append(gate.register_forward_hook(own(lambda module, given, y: _first(y))))
    try:
        with edit(model, changes):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _first(x: Tensor) -> Tensor:
    """Return the first row, for every row."""
    return x[:1].detach().expand_as(x)


def _keep(kept: list[Tensor], x: Tensor) -> None:
    kept[:] = [x]


def _at_ratio(pre: list[Tensor], post: Tensor) -> Tensor:
    """Return neurons that give the same share of their input as in the first row."""
    (x,) = pre
    ratio = torch.where(x == 0, 0.0, post / torch.where(x == 0, 1.0, x))
    return _first(ratio) * x


def _held_norm(norm: nn.Module, given: tuple[Tensor, ...], y: Tensor) -> Tensor:
    (x,) = given
    return freeze(norm, x[:1].detach().double()).forward(x.double()).to(y)


@contextmanager
def removing(cut: "CutPass", sources: Sequence[tuple[str, int, Tensor]], hold: bool) -> Iterator[None]:
    """Remove what one part adds at one token from each row but the first, in a `with` block.

    `sources` are taps, positions and vectors [D], one for each row after the first. With `hold` all other
    parts add what they added in the pass that was cut, so that only direct effects remain.
    """
    by_tap: dict[str, list[tuple[int, int, Tensor]]] = {tap: [] for tap in cut.leaves} if hold else {}
    for row, (tap, position, vector) in enumerate(sources, 1):
        by_tap.setdefault(tap, []).append((row, position, vector))

    def change(x: Tensor, leaf: Tensor, some: list[tuple[int, int, Tensor]]) -> Tensor:
        x = leaf.detach().expand_as(x).clone() if hold else x.clone()
        for row, position, vector in some:
            x[row, position] -= vector
        return x

    changes = {tap: partial(change, leaf=cut.leaves[tap], some=some) for tap, some in by_tap.items()}
    with edit(cut.prepared.model, changes):
        yield


# Cutting ----------------------------------------------------------------------------------------------------


HEADS = (".attention.out", ".cross.out")
LOOKS = ("q", "k", "v", "pattern", "scores")


@dataclass
class CutPass:
    """What every part added, as leaves, and what parts compute from the leaves before them."""

    prepared: Prepared
    leaves: dict[str, Tensor] = field(default_factory=dict)  # [1, T, D] by tap, in the order of the pass
    outs: dict[str, Tensor] = field(default_factory=dict)
    seen: Recording = field(default_factory=Recording)  # other activations, with their graph
    output: Output | None = None

    @classmethod
    def of(cls, prepared: Prepared, *taps: str) -> "CutPass":
        """Run the pass; `taps` of attention are recorded too, such as "scores"."""
        model = prepared.model
        refuse_bent(model)
        cut = cls(prepared)
        whole = [name for spec in model.config.stacks for name in _added(spec)]
        parts = [attention.part for attention in names.patterned(model.config)]
        wanted = [f"{part}.{tap}" for part in parts for tap in ("z", *taps)]
        inner = [f"{part[:-3]}{tap}" for part in whole if part.endswith("feedforward.out")
                 for tap in ("in", "post")]  # fmt: skip
        with ExitStack() as stack:
            for each in (torch.enable_grad(), evaluating(model), holding(model)):
                stack.enter_context(each)
            cut.seen = stack.enter_context(record(model, *wanted, *inner, detach=False))
            stack.enter_context(edit(model, {name: partial(cut._cut, name) for name in whole}))
            cut.output = prepared.run(logits="none")
        return cut

    def _cut(self, name: str, x: Tensor) -> Tensor:
        self.outs[name] = x
        self.leaves[name] = x.detach().requires_grad_()
        return self.leaves[name]

    def __getitem__(self, tap: str) -> Tensor:
        """Return an activation with its graph."""
        return self.outs[tap] if tap in self.outs else self.seen[tap]

    def before(self, tap: str) -> list[str]:
        """Return the leaves of a pass before a part."""
        order = list(self.leaves)
        return order[: order.index(tap)] if tap in order else order

    @property
    def hidden(self) -> Tensor:
        """What the head reads: [1, T, D]."""
        assert self.output is not None
        return self.output.hidden

    def weight_out(self, tap: str) -> Tensor:
        """Return the output projection of an attention: [H, E, D]."""
        weight, heads = part_of(self.prepared.model, tap).out.weight, self.seen[f"{tap[:-4]}.z"].shape[1]
        return cast(Tensor, weight.detach().T.unflatten(0, (heads, -1)))

    def bias_out(self, tap: str) -> Tensor:
        """Return the bias of an attention's output projection, or zeros: [D]."""
        none = torch.zeros_like(self.leaves[tap][0, 0]).detach()
        if not tap.endswith(HEADS):
            return none
        bias = part_of(self.prepared.model, tap).out.bias
        return none if bias is None else bias.detach()

    def slopes(
        self, outs: Sequence[Tensor], slopes: Sequence[Tensor], to: Iterable[str]
    ) -> dict[str, Tensor]:
        """Return gradients of outputs [1, ...] at leaves; slopes [G, 1, ...] give a row [G, T, D] each."""
        wanted = list(to)
        got = torch.autograd.grad(
            list(outs), [self.leaves[name] for name in wanted], list(slopes), retain_graph=True,
            allow_unused=True, is_grads_batched=slopes[0].ndim > outs[0].ndim,
        )  # fmt: skip
        return {name: x.squeeze(-3) for name, x in zip(wanted, got) if x is not None}


def kept_cut(prepared: Prepared) -> CutPass:
    """Return a pass that records what scores are made of, on the CPU; it is kept with a cached pass."""
    if "_cut" in prepared.__dict__:
        return cast(CutPass, prepared.__dict__["_cut"])
    cut = CutPass.of(on_cpu(prepared), *LOOKS)
    if isinstance(prepared, CachedPass) and prepared.keeps_graph:
        prepared.__dict__["_cut"] = cut
    return cut


def _added(spec: StackSpec) -> list[str]:
    """Return the taps of a stack whose vectors are added to its stream."""
    parts = []
    for layer, kind in enumerate(spec.kinds):
        own = {"attention": kind.name != "none", "cross": spec.cross, "feedforward": spec.feedforwards(layer)}
        parts += [f"blocks.{layer}.{part}.out" for part, there in own.items() if there]
    return [f"{spec.prefix}{name}" for name in ("embedding", *parts)]


@dataclass(frozen=True)
class Scores:
    """The scores of one attention, and the shares of them that queries and keys make."""

    q: Tensor  # H T E
    k: Tensor  # H S E, those of a group repeated
    # H T S; q · k times this is the score without positions: scale, and the soft cap's ratio
    factor: Tensor | float
    total: Tensor  # H T S, with positions; 0 where a query sees nothing
    seen: Tensor  # H T S, True: it sees the key

    @classmethod
    def of(cls, cut: CutPass, part: str) -> "Scores":
        """Return those of an attention by its name, such as "blocks.3.attention"."""
        module = part_of(cut.prepared.model, f"{part}.out")
        q, k, total = (cut.seen[f"{part}.{tap}"][0].detach() for tap in ("q", "k", "scores"))
        k = k.repeat_interleave(len(q) // len(k), 0)
        scale = q.shape[-1] ** -0.5 if module.scale is None else module.scale
        factor: Tensor | float = scale
        if module.softcap is not None:
            raw = scale * (q @ k.mT)
            capped = module.softcap * torch.tanh(raw / module.softcap)
            factor = scale * torch.where(raw == 0, 1.0, capped / torch.where(raw == 0, 1.0, raw))
        seen = total > torch.finfo(total.dtype).min
        return cls(q, k, factor, total.masked_fill(~seen, 0.0), seen)


def refuse_unscored(prepared: Prepared, part: str | None = None) -> None:
    """Refuse attention whose scores are no product of a query and a key; None: any of the model's."""
    for attention, kind in names.kinds_of(prepared.m.config).items():
        other = "scores" in kind.untapped or not kind.has_heads or isinstance(kind, GlobalKind)
        unlike = kind.name != "none" and other
        refuse(
            unlike and part in (None, attention.part),
            f"the scores of attention {attention} ({kind}) are no product of one query and one key, so that "
            "they cannot be taken apart",
        )
