"""Checks of the inputs of a model, before any compute.

On a GPU, an id outside the table makes every later call of the process fail, so ids are checked here.
Each error is one line that says what was given, what is allowed and the way out.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from clearhead.core.cache import Cache
from clearhead.core.config import StackSpec
from clearhead.core.masks import TokenInfo, of_real
from clearhead.core.stack import Inputs
from clearhead.core.transformer import ARGUMENTS
from clearhead.errors import InputError, nearest, refuse
from clearhead.variants.kinds import block_length

# What other libraries call an argument of `forward`, or what to do in its place.
OTHER_NAMES = {
    **dict.fromkeys(("input_ids", "tokens", "x", "idx", "pixel_values", "inputs"), "ids"),
    **dict.fromkeys(("attention_mask", "padding_mask", "key_padding_mask"), "mask"),
    **dict.fromkeys(("decoder_input_ids", "tgt"), "ids"),
    "decoder_attention_mask": "mask",
    "src": "source",
    "encoder_attention_mask": "source_mask",
    "token_type_ids": "types",
    "position_ids": "positions",
    **dict.fromkeys(("past_key_values", "use_cache", "past_kv_cache"), "cache"),
    "global_attention_mask": "global_mask",
}
OTHER_WAYS = {
    **dict.fromkeys(
        ("labels", "targets", "target"), "a call gives logits, and the loss is cross_entropy of them"
    ),
    **dict.fromkeys(("output_attentions", "output_hidden_states"), "use ch.record, or ch.run_with_cache"),
    "inputs_embeds": "give them as vectors, next to the ids whose positions they take",
    "return_dict": "a call gives a ch.Output in any case",
    "return_type": "a call gives a ch.Output in any case",
}
READ_BY_ENCODER = {"ids": "source", "mask": "source_mask"}
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_call(spec: StackSpec, inputs: Inputs, cache: Cache | None) -> None:
    """Check the inputs of one forward pass to the stack that feeds the head."""
    refuse_first(call_mistakes(spec, inputs, cache))


def check_tokens(spec: StackSpec, inputs: Inputs, name: str) -> None:
    """Check ids or vectors, mask, positions and documents of one stack."""
    refuse_first(token_mistakes(spec, inputs, name))


def check_stack_input(x: Tensor | None, spec: StackSpec, name: str) -> None:
    """Check shape, dtype and range of the ids, pixels or vectors that feed one stack."""
    refuse_first(input_mistakes(x, spec, name))


def refuse_first(mistakes: Iterator[str]) -> None:
    """Raise an error about the first mistake, if there is one."""
    for mistake in mistakes:
        raise InputError(mistake)


def call_mistakes(spec: StackSpec, inputs: Inputs, cache: Cache | None) -> Iterator[str]:
    """Yield what is wrong with the inputs of one forward pass."""
    yield from token_mistakes(spec, inputs, "ids")
    ids, _, _, documents, types, prefix, bias, global_mask, vectors, axes = inputs
    batch, length = ids.shape[0], spec.n_tokens(ids.shape[1])
    if types is not None and not spec.n_types:
        no = "types were given and the model has no segment embeddings"
        yield f"{no}: leave them out, or build it with n_types"
    yield from integer_mistakes(types, batch, length, "types", spec.n_types, "n_types")
    scoreless = next((kind for kind in spec.kinds if kind.stateful), None)
    for name, given in (("prefix", prefix), ("bias", bias)):
        if given is not None and scoreless is not None:
            yield f"{name} speaks of pairs of tokens, and attention {scoreless} scores none: leave it out"
    if prefix is not None:
        yield from prefix_mistakes(prefix, batch, length, cache, spec.causal)
    if bias is not None:
        yield from bias_mistakes(bias, spec, batch, length, cache)
    marked = {kind.global_tokens for kind in spec.kinds} - {None}
    if global_mask is not None and not marked:
        no = "global_mask was given and no layer has global tokens"
        yield f"{no}: leave it out, or choose attention global(...)"
    yield from mask_mistakes(global_mask, (batch, length), "global_mask")
    if vectors is not None:
        if spec.input != "tokens":
            yield f"vectors are for a model of tokens, and this one reads {spec.input}: leave them out"
        yield from _shape(vectors, (batch, length, spec.d_summed), "vectors", "those of these ids")
        yield from _floating(vectors, "vectors")
    if axes is not None:
        wanted = (batch if axes.shape[0] != 1 else 1, length, len(spec.rope_sections))
        if not spec.rope_sections:
            yield "axes were given and the model has positions alone: leave them out, or set rope_sections"
        yield from _shape(axes, wanted, "axes", "a position on each axis")
        if axes.dtype not in INTEGERS:
            yield f"axes are {axes.dtype}: they must be whole numbers, such as torch.long"
    if documents is not None and global_mask is None and "question" in marked:
        yield "packed documents have a question each: give global_mask, or unpack them"
    if cache is None:
        return
    size = block_length(spec)
    if not spec.causal and size is None:
        yield "a cache was given to a model without a decoder: its tokens see each other, so call it without"
    if size is not None and cache.length % size:
        held = f"the cache holds {cache.length} tokens and blocks have {size}"
        yield f"{held}: go on after a whole block (cache.crop)"
    if cache.rows not in (None, batch):
        held = f"the cache holds {cache.rows} rows and ids have {batch}"
        yield f"{held}: go on with the same rows, or reorder the cache"
    if cache.packed and documents is None:
        held = "the cache holds packed documents and this call names none"
        yield f"{held}: give documents, to say which goes on"


def token_mistakes(spec: StackSpec, inputs: Inputs, name: str) -> Iterator[str]:
    """Yield what is wrong with ids or vectors, mask, positions and documents of one stack."""
    x, mask = inputs.ids, inputs.mask
    yield from input_mistakes(x, spec, name)
    batch, length = x.shape[0], spec.n_tokens(x.shape[1])
    if spec.input == "patches" and mask is not None:
        yield "a mask was given for an image: all of its patches are real, so leave it out"
    yield from mask_mistakes(mask, (batch, x.shape[1]), "mask" if name == "ids" else f"{name}_mask")
    table = spec.max_positions if spec.bounded else None
    yield from integer_mistakes(inputs.positions, batch, length, "positions", table, "max_positions")
    yield from integer_mistakes(inputs.documents, batch, length, "documents", None, "")


def mask_mistakes(mask: Tensor | None, wanted: tuple[int, int], name: str) -> Iterator[str]:
    """Yield what is wrong with a boolean for each token, if any."""
    if mask is None:
        return
    if mask.dtype != torch.bool:
        way_out = "it must be boolean, True for a real token (or a global one); mask.bool() converts 0 and 1"
        yield f"{name} is {mask.dtype}: {way_out}"
    if mask.shape != wanted:
        yield f"{name} has shape {tuple(mask.shape)}: it must match its tokens, {wanted}"


def input_mistakes(x: Tensor | None, spec: StackSpec, name: str) -> Iterator[str]:
    """Yield what is wrong with the ids, pixels or vectors that feed one stack."""
    if not isinstance(x, Tensor):
        yield f"{name} must be a tensor, not {type(x).__name__}"
        return
    if spec.input == "tokens":
        yield from _shape(x, ("B", "T"), name, "token ids")
        if x.dtype not in INTEGERS:
            yield f"{name} are {x.dtype}: token ids must be whole numbers, such as torch.long"
        yield from _range(x, spec.vocab_size, name, "vocab_size")
        return
    image = spec.input == "patches"
    wanted = (spec.n_channels, *spec.image_size) if image else ("T", spec.d_input)
    yield from _shape(x, ("B", *wanted), name, "pixels" if image else spec.input)
    yield from _floating(x, name)


def integer_mistakes(
    x: Tensor | None, batch: int, length: int, name: str, below: int | None, limit: str
) -> Iterator[str]:
    """Yield what is wrong with whole numbers given for each token: positions, segment types, documents."""
    if x is None:
        return
    if x.dtype not in INTEGERS:
        yield f"{name} are {x.dtype}: they must be whole numbers, such as torch.long"
    if x.ndim != 2 or x.shape[0] not in (1, batch) or x.shape[1] != length:
        yield f"{name} have shape {tuple(x.shape)}: they must match the tokens, ({batch}, {length})"
    if below is not None:
        yield from _range(x, below, name, limit)


def check_length(tokens: TokenInfo, cache: Cache | None, spec: StackSpec, name: str) -> None:
    """Check that positions fit the table, where the scheme has one, and that documents are runs."""
    if tokens.documents is not None:
        before = [cache.tokens] if cache is not None and cache.tokens is not None and cache.packed else []
        check_runs(*((part.document_ids(), part.real_mask()) for part in (*before, tokens)))
    slots = tokens.length + (cache.length if cache is not None else 0)
    if not spec.bounded or slots <= spec.max_positions:
        return
    # Fewer than the slots where some are padding, or where documents begin again at 0.
    reached, most = int(tokens.positions.max()) + 1, spec.max_positions
    way_out = "shorten the input, or choose positions without a table (rope, alibi, sinusoidal, relative)"
    refuse(reached > most, f"{name} reach {reached} positions and the model has {most}: {way_out}")


def check_runs(*tokens: tuple[Tensor, Tensor]) -> None:
    """Refuse an id that comes back after another one; `tokens` are ids and which are real, [B|1, T] each."""
    batch = max(len(ids) for ids, _ in tokens)
    ids, real = (torch.cat([x.expand(batch, -1) for x in part], dim=1) for part in zip(*tokens))
    ids = of_real(ids, real)
    runs, distinct = ((x[:, 1:] != x[:, :-1]).sum(1) for x in (ids, ids.sort(1).values))
    rows = (runs > distinct).nonzero().flatten().tolist()
    refuse(
        rows,
        f"documents of row {rows and rows[0]} come back to an id after another one: a document is one run of "
        "equal ids, so give each run its own",
    )


def bias_mistakes(
    bias: Tensor, spec: StackSpec, batch: int, length: int, cache: Cache | None
) -> Iterator[str]:
    """Yield what is wrong with a pairwise bias given by the caller."""
    n_heads, keys = spec.n_heads, length + (cache.length if cache is not None else 0)
    yield from _floating(bias, "bias")
    allowed = ((1, batch), (1, n_heads), (length,), (keys,))
    if bias.ndim != 4 or any(size not in sizes for size, sizes in zip(bias.shape, allowed)):
        must = f"it must be ({batch} or 1, {n_heads} or 1, {length}, {keys})"
        yield f"bias has shape {tuple(bias.shape)}: {must}"


def prefix_mistakes(
    prefix: Tensor, batch: int, length: int, cache: Cache | None, causal: bool
) -> Iterator[str]:
    """Yield what is wrong with the number of leading tokens of each row that every token may see."""
    if not causal:
        yield "prefix belongs to a causal model: in this one every token sees all others already"
    if prefix.dtype not in INTEGERS or prefix.shape != (batch,):
        shape = f"{prefix.dtype} {tuple(prefix.shape)}"
        yield f"prefix is {shape}: it must be one whole number per row, ({batch},)"
    if cache is None:
        return
    if (longest := int(prefix.max())) > length:
        passes = f"prefix {longest} passes the {length} tokens of this call"
        yield f"{passes}: a cache needs all of the prefix in one call"
    if cache.length:
        late = f"prefix came after {cache.length} tokens were cached"
        yield f"{late}: hand it in with the call that holds the whole prefix"


def _shape(x: Tensor, wanted: tuple[str | int, ...], name: str, what: str) -> Iterator[str]:
    shape = tuple(x.shape)
    fits = len(shape) == len(wanted) and all(want in (size, "B", "T") for size, want in zip(shape, wanted))
    if not fits:
        yield f"{name} have shape {shape}: {what} must be [{', '.join(map(str, wanted))}]"
    if 0 in shape:
        yield f"{name} are empty, shape {shape}: give one row and one token at least"


def _floating(x: Tensor, name: str) -> Iterator[str]:
    if not x.is_floating_point():
        yield f"{name} are {x.dtype}: they must be floating point; x.float() converts"


def _range(x: Tensor, below: int, name: str, limit: str) -> Iterator[str]:
    if x.device.type != "meta" and not (x.is_cuda and torch.cuda.get_sync_debug_mode() == 2):  # must not wait
        low, high = (int(end) for end in torch.aminmax(x))
        bad = low if low < 0 else high
        if not 0 <= bad < below:
            yield f"{name} contain {bad}: allowed are 0 to {below - 1} ({limit} {below})"


def check_name(name: str, both: bool) -> None:
    """Raise an error about an argument, with the name or the way that we have; `both`: of two stacks."""
    ours = OTHER_NAMES.get(name, "")
    if both and not name.startswith(("decoder", "tgt")):
        ours = READ_BY_ENCODER.get(ours, ours)  # elsewhere the bare names are the encoder's
    way = OTHER_WAYS.get(name) or f"the model takes {', '.join(ARGUMENTS)}"
    near = "" if name in OTHER_WAYS else nearest(ours or name, ARGUMENTS)
    raise InputError(f'no argument is called "{name}"{near}: {way}')
