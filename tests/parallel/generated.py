"""What split models write, and what they refuse, as JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

import clearhead as ch
from clearhead.core.cache import Cache
from clearhead.learn.parallel.shards import local

PROMPTS = [[3, 4, 5, 6, 7, 8], [9, 10], [11, 12, 13]]  # of several lengths
REQUESTS: list[dict[str, Any]] = [
    {"max_new_tokens": 6},
    {"max_new_tokens": 6, "temperature": 1.0, "top_k": 20, "seed": 7},
    {"max_new_tokens": 5, "num_beams": 3, "num_return": 2},
]
MODELS: dict[str, dict[str, Any]] = {
    "decoder": {"n_kv_heads": 1, "positions": "rope", "gated": True, "norm": "rmsnorm"},
    "encoder-decoder": {"family": "encoder-decoder", "positions": "relative", "n_kv_heads": 2},
    "uneven": {"family": "encoder-decoder", "n_heads": 6, "n_kv_heads": 3, "d_model": 24},
    "experts": {
        **{"n_experts": 3, "n_active_experts": 1, "d_expert": 40, "n_kv_heads": 2, "bias": True},
        **{"tie_embeddings": False, "head_bias": True, "logit_softcap": 20.0},
    },
}


def write_models(folder: Path) -> list[Path]:
    """Write small models with large random weights, whose best token is far ahead of the next."""
    found = []
    for name, more in MODELS.items():
        torch.manual_seed(1)
        sizes = {"vocab_size": 51, "d_model": 16, "n_layers": 2, "n_heads": 4, "d_ff": 24}
        model = ch.Transformer(ch.ModelConfig(**{**sizes, "max_positions": 32, **more}))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.0, 0.5)
        ch.Model(model, special={"bos": 1, "eos": 2, "decoder_start": 1}).save(folder / name)
        found.append(folder / name)
    return found


def written(m: ch.Model) -> list[Any]:
    """Return the ids of every request."""
    made = [m.generate(PROMPTS, **options) for options in REQUESTS]
    return [[[one.ids for one in (row if isinstance(row, list) else [row])] for row in rows] for rows in made]


def record(folders: list[str], path: Path) -> None:
    """Write down what each model writes, the heads in its cache, the weights that are here, its refusals."""
    processes, found = int(os.environ["WORLD_SIZE"]), {}
    for name in folders:
        m = ch.load(name, parallel={"tensor": processes})
        cache = Cache()
        with torch.no_grad():
            source = {"source": torch.tensor([PROMPTS[0]])} if m.config.family != "decoder" else {}
            logits = m.model(torch.tensor([PROMPTS[0]]), cache=cache, **source).logits
        found[Path(name).name] = {
            "ids": written(m),
            "logits": logits.tolist(),
            "heads": [layer.k.shape[1] for layer in (*cache.layers.values(), *cache.cross.values())],
            "weights": sum(local(parameter).numel() for parameter in m.model.parameters()),
            "refused": refused(m),
        }
    if os.environ["RANK"] == "0":
        path.write_text(json.dumps(found))


def refused(m: ch.Model) -> list[str]:
    """Return what a split model refuses."""
    lines, target = [], [1, 3] if m.config.family == "encoder-decoder" else None
    for attempt in (
        lambda: m.generate(PROMPTS, seconds=1.0),
        lambda: m.generate(PROMPTS, compile=True),
        lambda: m.save("never"),
        lambda: ch.trace(m, PROMPTS[0], target),
    ):
        try:
            attempt()
            lines.append("")
        except ch.ClearheadError as error:
            lines.append(str(error))
    return lines
