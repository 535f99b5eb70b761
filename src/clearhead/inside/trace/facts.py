"""What fills in the words of a step: facts of the model and of the value."""

from typing import Any

import torch
from torch import Tensor

from clearhead.core.config import ModelConfig
from clearhead.inside.trace.kind_words import own_words
from clearhead.inside.trace.words import Words, words_of

ANSWERS = {"lm": "B T V", "mlm": "B T V", "classifier": "B C"}  # shape of the logits; other heads: B T C
POOLING = {"cls": "the first token's state", "mean": "mean over tokens", "last": "the last token's state"}
BUCKET = "table[bucket of distance]"
BIAS_FORMULAS = {"alibi": "−slope · distance", "relative": BUCKET, "learned+relative": BUCKET}


def filled_words(config: ModelConfig, name: str, x: Tensor, **facts: Any) -> Words:
    """Return title, shape, formula and reason of a step, filled in for this model; `facts` fill in more."""
    words = words_of(name, tuple(x.shape), own_words(config, name))
    known = {**facts_of(config, name, x), **facts}
    return words._replace(
        **{part: getattr(words, part).format_map(known) for part in ("title", "symbols", "formula")}
    )


def facts_of(config: ModelConfig, name: str, x: Tensor) -> dict[str, Any]:
    """Return the values that fill in the formula and the symbols of a step."""
    spec = config.stacks[0] if name.startswith("encoder.") else config.main
    window = name.rpartition("mask.")[2] if "mask." in name else spec.windows[0]
    nearer = "" if window in (None, "full") else f", nearer than {window}"
    masks = name.endswith(".masked") and x.is_floating_point() and x.numel()
    hides = masks and float(x.min()) == torch.finfo(x.dtype).min
    inner = "Fx" if ".experts." in name and spec.d_expert != spec.d_ff else "F"
    weighed = "softmax(all), the chosen" + (" / their sum" if config.router_renormalise else "")
    of_tokens = ".front." in name or name.startswith("head.")  # as wide as their table
    return {
        "W": "D" if (spec.d_embedding if of_tokens else spec.d_summed) == spec.d_model else "W",
        "front_bias": "" if spec.project_tokens else " + b",
        "N": "N" if spec.input == "patches" else "T",
        "Ev": "E" if spec.d_value == spec.d_head else "Ev",
        "Tin": "Tin" if spec.input == "frames" else "T",
        "rows": "B·T·A" if ".experts." in name else "B T",
        "F": "Fs" if ".shared." in name else inner,
        "z": "gate" if config.attention_gate else "mix values",
        "z_formula": "mixed · sigmoid(gate)" if config.attention_gate else "pattern · v",
        "q_normed": "B T H·E" if spec.qk_norm == "full" else "B H T E",
        "k_normed": "B S K·E" if spec.qk_norm == "full" else "B K S E",
        "bias": BIAS_FORMULAS.get(spec.positions, "a function of the distance"),
        "mask": ("earlier" if spec.causal else "all") + nearer,
        "scale": f"{spec.attention_scale:.4g}",
        "hidden": "lowest number where hidden" if hides else "nothing is hidden",
        "norm": config.norm,
        "activation": config.activation,
        "head_activation": config.head_activation,
        "embedding_scale": f"{config.embedding_scale:.4g}",
        "residual_scale": f"{config.residual_scale:.4g}",
        "logit_scale": f"{config.logit_scale:.4g}",
        "softcap": config.attention_softcap,
        "logit_softcap": config.logit_softcap,
        "qkv_bias": " + b" if config.qkv_bias else "",
        "key_bias": " + b" if config.key_bias else "",
        "out_bias": " + b" if config.attention_out_bias else "",
        "feedforward_bias": " + b" if config.feedforward_bias else "",
        "head_bias": " + b" if config.head_bias else "",
        "clamp": config.gated_clamp,
        "shift": f"{config.gated_shift:.4g}",
        "router_bias": " + b" if config.router_bias else "",
        "n_experts": config.n_experts,
        "n_active": config.n_active_experts,
        "router": "softmax(the chosen)" if config.router_order == "topk_softmax" else weighed,
        "pooling": POOLING[config.readout.pooling],
        "pooler": config.pooler,
        "pooler_bias": " + b" if config.pooler_bias else "",
        "vectors": "B T D" if config.head in ("tagger", "span") else "B D",
        "answers": ANSWERS.get(config.readout.head, "B T C"),
        "shape": " ".join(map(str, x.shape)),
    }
