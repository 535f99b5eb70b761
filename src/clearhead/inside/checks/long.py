"""Rows of the equality suite on long inputs: past every length at which a model does something else.

A window begins to forget, the last bucket of distances is reached, a scaling of RoPE switches, a table of
positions ends, a prompt is read in chunks. A copy with a few layers makes such lengths affordable. It has the
weights of the lively copy and the windows of the config.

Shapes: B rows, T tokens, D model, V vocabulary.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from clearhead.core.cache import Cache
from clearhead.core.config import LEARNED_BIASES, ModelConfig
from clearhead.core.config.fields import Fields
from clearhead.core.transformer import Transformer
from clearhead.errors import InputError
from clearhead.inside.checks.reference_float64 import Reference
from clearhead.inside.checks.reference_inputs import ReferenceRow
from clearhead.inside.checks.rows import TOLERANCE, Comparison, Inputs, cache_forms, gap
from clearhead.inside.long_text import scaled
from clearhead.learn.batches.ragged import real_tokens
from clearhead.run.generate import decode
from clearhead.run.generate.request import Request
from clearhead.run.generate.sequence import Prompts
from clearhead.run.kernels.prepare import prepared
from clearhead.variants.caches import StreamCache, check_stream, sees_past
from clearhead.variants.checks import MIXTURE
from clearhead.variants.kinds import Blocks

MOST = 2048  # tokens of a row; a length beyond is reached by position alone
USUAL = 128  # tokens of a row where no length matters
PAST = 8  # tokens past a length at which something changes
SHORT, NEW = 6, 3  # tokens of the short row next to a long one; how many tokens of each row follow its prompt
# Of a copy whose layers are all dense.
UNMIXED = {"n_experts": 0, **{name: getattr(Fields, name) for name in MIXTURE}}
STREAM, WINDOW, SINKS = 24, 9, 3  # tokens of a stream, and how many and which of them it keeps


def thresholds(config: ModelConfig) -> list[int]:
    """Return the lengths at which a model of this config does something else, in ascending order."""
    scaling = config.rope_scaling
    lengths = {
        *(kind.nearby for spec in config.stacks for kind in spec.kinds),
        *(kind.full for spec in config.stacks for kind in spec.kinds if isinstance(kind, Blocks)),
        config.relative_max_distance if config.positions in LEARNED_BIASES else None,
        config.max_positions if config.bounded else None,
        None if scaling is None else scaling.original_positions or config.max_positions,
    }
    return sorted(length for length in lengths if length is not None)


def reach(config: ModelConfig, *others: int, usual: int = USUAL) -> int:
    """Return the tokens of a row past every threshold, and past `others`, as far as `MOST` and a table go."""
    within = [length + PAST for length in (*thresholds(config), *others) if length <= MOST]
    length = max([usual, *within])
    return min(length, config.max_positions) if config.bounded else length


def long_rows(inputs: Inputs, lively: Callable[[], Inputs]) -> list[Comparison]:
    """Return the rows for a model that reads sequences; `lively` returns inputs of its lively copy."""
    config = inputs.model.config
    length = reach(config, *((decode.PREFILL_CHUNK,) if inputs.caches else ()))
    tops = _tops(config)
    long = functools.cache(lambda: LongInputs(shallow(lively().model, config), 2, length))
    fits = inputs.sequences and length > NEW
    row = functools.partial(inputs.compare, tolerance=TOLERANCE[torch.float32], copies=True)
    return [
        row(
            "model = formula (long)",
            f"the same in a few layers: {length} tokens, alone and next to a short row",
            lambda _: _long(long()),
            fits=fits,
        ),
        row(
            "model = formula (far)",
            f"the same on a few tokens at positions up to {', '.join(map(str, tops))}",
            lambda _: max(_far(long().model, top) for top in tops),
            fits=fits,
        ),
        row(
            "cached = formula (long)",
            f"the same through the fast copy and each form of cache: a prompt, then {NEW} tokens",
            lambda _: _generated(long().as_generated()),
            fits=fits and inputs.caches and not inputs.model.config.rotates_by_length,
        ),
        row(
            "cached = formula (switch)",
            f"log-probabilities of {2 * NEW} new tokens across the length at which angles change",
            lambda _: _switched(long()),
            fits=fits and inputs.caches and inputs.model.config.rotates_by_length,
        ),
        row(
            "streamed = kept",
            f"a stream of {STREAM} tokens, layer by layer, with the {SINKS} first and {WINDOW - SINKS} last "
            "ones as a text of their own",
            lambda _: _streamed(lively().model, config),
            fits=inputs.caches and not config.main.carries and _can_stream(config),
        ),
    ]


class LongInputs(Inputs):
    """A long row, and a short one that is padded on the left."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The tokens of each row."""
        return self.length, SHORT

    def own(self, number: int) -> dict[str, Tensor]:
        """Return what the model is called with for one row alone: each [1, T, ...]."""
        names = [
            name for name in self.arguments if name != "source" or self.source_kind in ("tokens", "vectors")
        ]
        cut = {name: self.arguments[name][:, -self.sizes[number] :] for name in names}
        return {name: x[number : number + 1] for name, x in {**self.arguments, **cut}.items()}

    def together(self) -> dict[str, Tensor]:
        """Return what the model is called with for all rows, with their masks."""
        arguments = {**self.arguments, "mask": self._mask(self.length)}
        if self.source_kind in ("tokens", "vectors"):
            arguments["source_mask"] = self._mask(arguments["source"].shape[1])
        return arguments

    def _mask(self, length: int) -> Tensor:
        sizes = [min(size, length) for size in self.sizes[: self.rows]]
        return real_tokens([range(size) for size in sizes], self.device, left=True)

    def as_generated(self) -> "LongInputs":
        """Return the same rows as generation reads them: without segments, so all of segment 0."""
        if "types" not in self.arguments:
            return self
        untyped = LongInputs(self.model, self.rows, self.length)
        del untyped.arguments["types"]
        return untyped

    @functools.cached_property
    def expected(self) -> list[tuple[Tensor, ReferenceRow]]:
        """The last states [T, D] of each row by the formula, and the row."""
        return [self.plain.read(0, **self.own(number)) for number in range(self.rows)]

    @functools.cached_property
    def plain(self) -> Reference:
        """The formula."""
        return Reference(self.model.config, self.model.state_dict())


def _long(inputs: LongInputs) -> float:
    """Compare the states of the long row alone, and of all rows together.

    Where angles go by the longest row of a call, the short one differs from itself alone, and is left out.
    """
    alone = inputs.model(**inputs.own(0), logits="none").hidden[0]
    together = inputs.model(**inputs.together(), logits="none").hidden
    rows = 1 if inputs.model.config.rotates_by_length else inputs.rows
    pairs = zip(together[:rows], inputs.expected)
    return max(
        gap(alone, inputs.expected[0][0]), *(gap(ours[-len(states) :], states) for ours, (states, _) in pairs)
    )


def _far(model: Transformer, top: int) -> float:
    """Compare the states of tokens whose distances from the last one, at position `top`, double."""
    positions_read = sorted({top, *(max(top + 1 - (1 << power), 0) for power in range(top.bit_length() + 1))})
    inputs = Inputs(model, 1, len(positions_read))
    positions = torch.tensor([positions_read], device=inputs.device)
    ours = model(**inputs.arguments, positions=positions, logits="none").hidden[0]
    plain = Reference(model.config, model.state_dict())
    return gap(ours, plain.read(0, **inputs.arguments, positions=positions)[0])


def _tops(config: ModelConfig) -> list[int]:
    """Return the last positions to try: just within and just past each threshold, as far as a table goes."""
    edges = {*thresholds(config), config.max_positions}
    tops = {edge + step for edge in edges for step in (-1, 0, 1)}
    return sorted(top for top in tops if top > 0 and not (config.bounded and top >= config.max_positions))


def _generated(inputs: LongInputs) -> float:
    """Read both prompts as generation does, then the long one in each form of cache; go on by some tokens."""
    fast, alone = prepared(inputs.model), LongInputs(inputs.model, 1, inputs.length)
    expected = torch.stack([inputs.plain.head(states[-NEW - 1 :], row) for states, row in inputs.expected])
    caches = [form() for form in cache_forms(alone).values()]
    return max(
        gap(_continued(fast, inputs, decode.cache_for(inputs.model, inputs.length), 2), expected),
        *(gap(_continued(fast, inputs, cache, 1), expected[:1]) for cache in caches),
    )


def _continued(fast: Transformer, inputs: LongInputs, cache: Cache, count: int) -> Tensor:
    """Return the logits [B, 1 + N, V] after `count` prompts, and after each new token."""
    arguments = {name: x[:count] for name, x in inputs.together().items()}
    rows = [inputs.own(number)["ids"][0] for number in range(count)]
    prompts = [row[:-NEW].tolist() for row in rows]
    logits = [decode.prefill(fast, prompts, cache, arguments.get("source"), arguments.get("source_mask"))]
    for place in range(inputs.length - NEW, inputs.length):
        new = arguments["ids"][:, place : place + 1]
        logits.append(fast(new, cache=cache, logits="last").logits[:, -1])
    return torch.stack(logits, dim=1)


def _switched(inputs: LongInputs) -> float:
    """Generate from within the trained length to past it; a copy has a short one, if that is far away.

    A token keeps the angles of the length at which it was read, under `dynamic`. Under `longrope` all are
    read again where the length changes them.
    """
    model, config = inputs.model, inputs.model.config
    scaling = config.rope_scaling
    assert scaling is not None
    trained = min(scaling.original_positions or config.max_positions, USUAL)
    near_model = scaled(model, dataclasses.replace(scaling, original_positions=trained))
    arguments = inputs.own(0)
    ids, sources = arguments["ids"][0].tolist(), (arguments.get("source"), None)
    prompts = Prompts([ids[: max(trained - NEW, 1)]], *sources)
    request = Request(max_new_tokens=2 * NEW, logprobs=True)
    (row,) = decode.decode(prepared(near_model), request, prompts)
    plain, text, start = (
        Reference(near_model.config, model.state_dict()),
        row.prompt + row.ids,
        len(row.prompt),
    )
    expected = []
    for end in range(start, len(text)):
        together = end if scaling.kind == "longrope" else start
        lengths = torch.arange(1, end + 1).clamp(min=together)
        read = plain.read(0, torch.tensor([text[:end]]), None, *sources, lengths=lengths)
        expected.append(plain.head(read[0][-1:], read[1])[0].log_softmax(-1)[text[end]])
    return gap(torch.tensor(row.logprobs), torch.stack(expected))


def _can_stream(config: ModelConfig) -> bool:
    try:
        check_stream(config, WINDOW, SINKS)
    except InputError:
        return False
    return True


@torch.no_grad()
def _streamed(lively: Transformer, config: ModelConfig) -> float:
    """Compare each layer that streams, as a model by itself: what it keeps of a token is the token's own."""
    gaps = []
    for layer in various(config):
        if not sees_past(config.main.kinds[layer], WINDOW):
            continue
        model = shallow(lively, config, [layer])
        inputs = LongInputs(model, 2, STREAM)
        caches = [StreamCache(model.config, WINDOW, SINKS) for _ in range(2)]
        rows = [inputs.own(number)["ids"] for number in range(2)]
        expected = [_of_kept(model, ids) for ids in rows]
        gaps.append(
            gap(
                _continued(prepared(model), inputs, caches[0], 2),
                torch.cat([last[:, -NEW - 1 :] for last in expected]),
            )
        )
        sizes = [WINDOW - 2, *[1] * 6, STREAM - WINDOW - 4]  # over the window one at a time, then at once
        chunks = torch.split(rows[0], sizes, dim=1)
        logits = [model(chunk, cache=caches[1]).logits for chunk in chunks]
        gaps.append(gap(torch.cat(logits, dim=1), expected[0]))
    return max(gaps)


def _of_kept(model: Transformer, ids: Tensor) -> Tensor:
    """Return the logits of a row [1, T] where each token reads what a stream would keep: [1, T, V]."""
    logits = [model(ids[:, :WINDOW]).required_logits]
    ends = range(WINDOW + 1, ids.shape[1] + 1)
    if ends:
        kept = [torch.cat([ids[:, :SINKS], ids[:, end - WINDOW + SINKS : end]], dim=1) for end in ends]
        logits.append(model(torch.cat(kept), logits="last").required_logits.transpose(0, 1))
    return torch.cat(logits, dim=1)


def various(config: ModelConfig) -> list[int]:
    """Return the first layer of each kind: of each kind of attention, rotated or not, with experts or not."""
    deepest = max(config.stacks, key=lambda spec: spec.n_layers)
    if deepest.carries:  # layers read each other by number: all of them stay
        return list(range(deepest.n_layers))
    listed = (config.rope_skips, config.dense_layers, config.feedforward_skips)
    kinds = [
        (kind, *(layer in layers for layers in listed), deepest.capacities[layer])
        for layer, kind in enumerate(deepest.kinds)
    ]
    return sorted({kinds.index(kind) for kind in kinds})


@torch.no_grad()
def shallow(lively: Transformer, config: ModelConfig, kept: Sequence[int] = ()) -> Transformer:
    """Return a copy with some layers, or with those that are `various` and the last one.

    It shares its weights with the lively copy; its windows are those of `config`.
    """
    fewer_layers = copy.deepcopy(lively, {id(weight): weight for weight in lively.parameters()})
    deepest = max(config.stacks, key=lambda spec: spec.n_layers)
    kept = kept or sorted({deepest.n_layers - 1, *various(config)})
    stacks = [stack for stack in (fewer_layers.encoder, fewer_layers.decoder) if stack is not None]
    counts = [sum(layer < spec.n_layers for layer in kept) for spec in config.stacks]
    pruned = {
        f"{spec.prefix}blocks.{number}.{kind}": spec.pruned_heads.get(f"{spec.prefix}blocks.{layer}.{kind}")
        for spec in config.stacks
        for number, layer in enumerate(kept)
        for kind in ("attention", "cross")
    }
    kinds = tuple(str(deepest.kinds[layer]) for layer in kept)

    def of(layers: Sequence[int]) -> tuple[int, ...]:
        return tuple(number for number, layer in enumerate(kept) if layer in layers)

    dense, skips = of(config.dense_layers), of(config.feedforward_skips)
    mixture = {"dense_layers": dense} if len({*dense, *skips}) < counts[-1] else UNMIXED
    fewer_layers.config = lively.config.replace(
        n_layers=counts[-1],
        n_encoder_layers=counts[0] if len(stacks) > 1 else None,
        layer_groups=None,
        loop=None,
        window=None,
        attention=kinds if len({*kinds}) > 1 else kinds[:1],  # stacks of unequal depth have one kind
        depth_capacity=tuple(deepest.capacities[layer] for layer in kept) if len(stacks) == 1 else 1.0,
        rope_skips=of(config.rope_skips),
        feedforward_skips=skips,
        **mixture,
        pruned_heads={name: heads for name, heads in pruned.items() if heads},
    )
    for stack, spec in zip(stacks, fewer_layers.config.stacks):
        layers = stack.layers()
        stack.blocks = nn.ModuleList(layers[layer] for layer in kept if layer < len(layers))
        stack.spec = spec
    return fewer_layers
