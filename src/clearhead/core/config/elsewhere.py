"""What other libraries call the arguments of a model; for fields of a config, see `typed`."""

from typing import Any

from clearhead.errors import InputError, nearest

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
