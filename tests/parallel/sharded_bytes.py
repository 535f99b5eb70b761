"""Train odd models for one step under `fully_shard`, in one of several processes, and write its bytes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

import clearhead as ch
from clearhead.learn.parallel.shards import local
from clearhead.learn.parallel.world import joined


def local_bytes(tensors: Any) -> int:
    """Bytes that this rank has of each tensor."""
    return sum(local(tensor).numel() * tensor.element_size() for tensor in tensors)


def record(configs: list[dict[str, Any]], folder: Path) -> None:
    """Write bytes of weights, gradients and moments, for each config, to `bytes-RANK.json`."""
    torch.set_num_threads(1)
    found = []
    with joined():
        for settings in configs:
            torch.manual_seed(0)
            model = ch.Transformer(ch.ModelConfig(**settings))
            for block in model.decoder.blocks:
                fully_shard(block)
            fully_shard(model)
            optimizer = torch.optim.AdamW(model.parameters())
            model(torch.arange(8)[None] % 7).logits.square().mean().backward()
            optimizer.step()
            states = optimizer.state.values()
            parameters = list(model.parameters())
            found.append(
                {
                    "weights": local_bytes(parameters),
                    "gradients": local_bytes(parameter.grad for parameter in parameters),
                    "optimizer": local_bytes(
                        state[name] for state in states for name in ("exp_avg", "exp_avg_sq")
                    ),
                }
            )
    (folder / f"bytes-{os.environ['RANK']}.json").write_text(json.dumps(found))
