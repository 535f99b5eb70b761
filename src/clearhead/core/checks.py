"""Checks of the inputs of a model, before any compute.

On a GPU, an id outside the table makes every later call of the process fail, so ids are checked here.
Each error is one line that says what was given, what is allowed and the way out.
"""

from typing import Any

import torch
from torch import Tensor

from clearhead.core.cache import Cache
from clearhead.core.config import StackSpec
from clearhead.core.masks import Tokens, check_runs
from clearhead.errors import InputError, nearest, refuse

ARGUMENTS = (
    "ids", "mask", "source", "source_mask", "positions", "cache", "types", "documents", "source_documents",
    "prefix", "bias", "global_mask", "logits",
)  # fmt: skip

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
    "inputs_embeds": "vectors are for a config of input vectors; ch.edit replaces the activation embedding",
    "return_dict": "a call gives a ch.Output in any case",
    "return_type": "a call gives a ch.Output in any case",
}
READ_BY_ENCODER = {"ids": "source", "mask": "source_mask"}
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_call(
    spec: StackSpec,
    ids: Tensor,
    mask: Tensor | None,
    positions: Tensor | None,
    cache: Cache | None,
    types: Tensor | None,
    documents: Tensor | None,
    prefix: Tensor | None,
    bias: Tensor | None,
    global_mask: Tensor | None,
) -> None:
    """Check the inputs of one forward pass to the stack that feeds the head."""
    check_tokens(spec, ids, mask, positions, documents, "ids")
    batch, length = ids.shape[0], spec.n_tokens(ids.shape[1])
    refuse(
        types is not None and not spec.n_types,
        "types were given and the model has no segment embeddings: leave them out, or build it with n_types",
    )
    check_integers(types, batch, length, "types", spec.n_types, "n_types")
    scoreless = next((kind for kind in spec.kinds if not kind.chooses), None)
    for name, given in (("prefix", prefix), ("bias", bias)):
        refuse(
            given is not None and scoreless is not None,
            f"{name} speaks of pairs of tokens, and attention {scoreless} scores none: leave it out",
        )
    if prefix is not None:
        check_prefix(prefix, batch, length, cache, spec.causal)
    if bias is not None:
        check_bias(bias, spec, batch, length, cache)
    marked = {kind.global_tokens for kind in spec.kinds} - {None}
    refuse(
        global_mask is not None and not marked,
        "global_mask was given and no layer has global tokens: leave it out, or choose attention global(...)",
    )
    check_mask(global_mask, (batch, length), "global_mask")
    unmarked = documents is not None and global_mask is None
    refuse(
        unmarked and "question" in marked,
        "packed documents have a question each: give global_mask, or unpack them",
    )
    if cache is None:
        return
    refuse(
        not spec.causal,
        "a cache was given to a model without a decoder: its tokens see each other, so call it without",
    )
    rows = cache.rows
    refuse(
        rows not in (None, batch),
        f"the cache holds {rows} rows and ids have {batch}: go on with the same rows, or reorder the cache",
    )
    refuse(
        cache.packed and documents is None,
        "the cache holds packed documents and this call names none: give documents, to say which goes on",
    )


def check_tokens(
    spec: StackSpec,
    x: Tensor,
    mask: Tensor | None,
    positions: Tensor | None,
    documents: Tensor | None,
    name: str,
) -> None:
    """Check the inputs of one stack: ids or vectors, mask, positions, documents."""
    check_stack_input(x, spec, name)
    batch, length = x.shape[0], spec.n_tokens(x.shape[1])
    refuse(
        spec.input == "patches" and mask is not None,
        "a mask was given for an image: all of its patches are real, so leave it out",
    )
    check_mask(mask, (batch, x.shape[1]), "mask" if name == "ids" else f"{name}_mask")
    table = spec.max_positions if spec.bounded else None
    check_integers(positions, batch, length, "positions", table, "max_positions")
    check_integers(documents, batch, length, "documents", None, "")


def check_mask(mask: Tensor | None, wanted: tuple[int, int], name: str) -> None:
    """Check a boolean for each token, if any."""
    if mask is None:
        return
    way_out = "it must be boolean, True for a real token (or a global one); mask.bool() converts 0 and 1"
    refuse(mask.dtype != torch.bool, f"{name} is {mask.dtype}: {way_out}")
    refuse(mask.shape != wanted, f"{name} has shape {tuple(mask.shape)}: it must match its tokens, {wanted}")


def check_stack_input(x: Tensor | None, spec: StackSpec, name: str) -> None:
    """Check shape, dtype and range of the ids, pixels or vectors that feed one stack."""
    if not isinstance(x, Tensor):
        raise InputError(f"{name} must be a tensor, not {type(x).__name__}")
    if spec.input == "tokens":
        _shape(x, ("B", "T"), name, "token ids")
        refuse(
            x.dtype not in INTEGERS,
            f"{name} are {x.dtype}: token ids must be whole numbers, such as torch.long",
        )
        _range(x, spec.vocab_size, name, "vocab_size")
        return
    image = spec.input == "patches"
    wanted = (spec.n_channels, *spec.image_size) if image else ("T", spec.d_input)
    _shape(x, ("B", *wanted), name, "pixels" if image else spec.input)
    _floating(x, name)


def check_integers(
    x: Tensor | None, batch: int, length: int, name: str, below: int | None, limit: str
) -> None:
    """Check whole numbers beside the tokens: positions, segment types, documents."""
    if x is None:
        return
    refuse(x.dtype not in INTEGERS, f"{name} are {x.dtype}: they must be whole numbers, such as torch.long")
    refuse(
        x.ndim != 2 or x.shape[0] not in (1, batch) or x.shape[1] != length,
        f"{name} have shape {tuple(x.shape)}: they must match the tokens, ({batch}, {length})",
    )
    if below is not None:
        _range(x, below, name, limit)


def check_length(tokens: Tokens, cache: Cache | None, spec: StackSpec, name: str) -> None:
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


def check_bias(bias: Tensor, spec: StackSpec, batch: int, length: int, cache: Cache | None) -> None:
    """Check a pairwise bias given by the caller."""
    n_heads, keys = spec.n_heads, length + (cache.length if cache is not None else 0)
    _floating(bias, "bias")
    allowed = ((1, batch), (1, n_heads), (length,), (keys,))
    refuse(
        bias.ndim != 4 or any(size not in sizes for size, sizes in zip(bias.shape, allowed)),
        f"bias has shape {tuple(bias.shape)}: it must be ({batch} or 1, {n_heads} or 1, {length}, {keys})",
    )


def check_prefix(prefix: Tensor, batch: int, length: int, cache: Cache | None, causal: bool) -> None:
    """Check the number of leading tokens of each row that every token may see."""
    refuse(not causal, "prefix belongs to a causal model: in this one every token sees all others already")
    refuse(
        prefix.dtype not in INTEGERS or prefix.shape != (batch,),
        f"prefix is {prefix.dtype} {tuple(prefix.shape)}: it must be one whole number per row, ({batch},)",
    )
    if cache is not None:
        longest = int(prefix.max())
        refuse(
            longest > length,
            f"prefix {longest} passes the {length} tokens of this call: "
            "a cache needs all of the prefix in one call",
        )
        refuse(
            cache.length,
            f"prefix came after {cache.length} tokens were cached: "
            "hand it in with the call that holds the whole prefix",
        )


def _shape(x: Tensor, wanted: tuple[str | int, ...], name: str, what: str) -> None:
    fits = x.ndim == len(wanted) and all(
        isinstance(want, str) or size == want for size, want in zip(x.shape, wanted)
    )
    shape = tuple(x.shape)
    refuse(not fits, f"{name} have shape {shape}: {what} must be [{', '.join(map(str, wanted))}]")
    refuse(0 in shape, f"{name} are empty, shape {shape}: give one row and one token at least")


def _floating(x: Tensor, name: str) -> None:
    refuse(
        not x.is_floating_point(), f"{name} are {x.dtype}: they must be floating point; x.float() converts"
    )


def _range(x: Tensor, below: int, name: str, limit: str) -> None:
    if x.device.type != "meta" and not (x.is_cuda and torch.cuda.get_sync_debug_mode() == 2):  # must not wait
        low, high = (int(end) for end in torch.aminmax(x))
        bad = low if low < 0 else high
        refuse(not 0 <= bad < below, f"{name} contain {bad}: allowed are 0 to {below - 1} ({limit} {below})")


class CalledByName:
    """A model whose call refuses an argument that goes by another name, in one line with ours."""

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Run the model."""
        for name in named:
            if name not in ARGUMENTS:
                refuse_name(name, both=len(vars(self)["config"].stacks) == 2)
        return super().__call__(*inputs, **named)  # type: ignore[misc]  # that of nn.Module


def refuse_name(name: str, both: bool) -> None:
    """Raise an error about an argument, with the name or the way that we have; `both`: of two stacks."""
    ours = OTHER_NAMES.get(name, "")
    if both and not name.startswith(("decoder", "tgt")):
        ours = READ_BY_ENCODER.get(ours, ours)  # elsewhere the bare names are the encoder's
    way = OTHER_WAYS.get(name) or f"the model takes {', '.join(ARGUMENTS)}"
    raise InputError(f'no argument is called "{name}"{nearest(ours or name, ARGUMENTS)}: {way}')
