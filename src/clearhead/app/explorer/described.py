"""What the page says of a model before anything is run."""

from typing import Any

from clearhead.inside.names import kinds_of, unpatterned
from clearhead.run.api import Model

TASKS = {"lm": "next", "mlm": "fill", "classifier": "classify", "tagger": "tag", "span": "span"}


def model_view(m: Model, name: str, example: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return what the model is, and what the page begins with."""
    config, main = m.config, m.config.main
    encoder = config.encoder if config.decoder is not None else None
    return {
        **{"name": name, "ready": True, "failed": False, "says": "", "example": example},
        "family": config.family,
        "head": config.head,
        "task": TASKS.get(config.head or "", "embed"),
        "input": (encoder or main).input,
        "parameters": sum(parameter.numel() for parameter in m.model.parameters()),
        "layers": main.n_layers,
        "encoder_layers": encoder.n_layers if encoder is not None else 0,
        "d_model": config.d_model,
        "n_heads": main.n_heads,
        "n_kv_heads": main.n_kv_heads,
        "vocab_size": config.vocab_size,
        "max_length": m.max_length,
        "image_size": list(config.image_size) if config.image_size else None,
        "n_channels": config.n_channels,
        "labels": list(m.labels),
        "tokenizer": m.tokenizer is not None,
        "unknown": getattr(m.tokenizer.model, "unk_token", None) if m.tokenizer else None,
        "mask": m.tokenizer.id_to_token(m.special["mask"]) if m.tokenizer and "mask" in m.special else None,
        "attentions": [
            {"kind": one.kind, "layer": one.layer, "heads": one.n_heads, "pattern": kind.patterned}
            for one, kind in kinds_of(config).items()
        ],
        "unpatterned": unpatterned(config),
    }
