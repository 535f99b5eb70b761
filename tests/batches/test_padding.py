"""How rows of unequal length are grouped for a device."""

from __future__ import annotations

import random

import pytest
import torch

from clearhead.learn.batches.padding import DEVICE_TOGETHER, ROWS, for_device


@pytest.mark.parametrize(("device", "batch_size"), [("cpu", None), ("cuda", None), ("cpu", 3), ("cuda", 3)])
def test_rows_are_grouped_as_a_device_reads_them(device, batch_size):
    """Nothing runs on the device: a GPU is named, and need not be there."""
    draw = random.Random(0)
    lengths = [draw.randint(1, 400) for _ in range(500)]
    groups = for_device(lengths, batch_size, torch.device(device))
    assert sorted(place for group in groups for place in group) == list(range(500))
    sizes = [len(group) for group in groups]
    assert max(sizes) <= (batch_size or (ROWS if device == "cpu" else 500))
    if device == "cuda" and batch_size is None:
        tokens = [len(group) * max(lengths[place] for place in group) for group in groups]
        assert max(tokens) <= DEVICE_TOGETHER and len(groups) < 10 and max(sizes) > ROWS
    if device == "cuda" and batch_size:
        assert sizes[:-1] == [batch_size] * (len(sizes) - 1)
