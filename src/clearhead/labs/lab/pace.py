"""How quick this machine is beside the one on which the times of the experiments were taken."""

import time

import torch

from clearhead.core.config import ModelConfig
from clearhead.core.transformer import Transformer

REFERENCE = 0.020  # seconds of the step below on one core


def pace(device: str) -> float:
    """Return how many times as long a small step takes here: above 1 on a slower machine."""
    model = Transformer(ModelConfig(vocab_size=64, d_model=64, n_layers=2, n_heads=4, max_positions=64)).to(
        device
    )
    ids = torch.zeros(16, 64, dtype=torch.long, device=device)
    found = []
    for _ in range(6):
        start = time.perf_counter()
        model(ids).logits.sum().backward()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return min(found) / REFERENCE
