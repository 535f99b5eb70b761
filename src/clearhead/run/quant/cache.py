"""The cache in 8 bits: keys and values as whole numbers, with one scale for each token and head.

Keys are rounded once, when they are written, and every query reads them so, that of their own token too: what
a model says does not depend on how many tokens it is given at a time. Nor does a token's rounding depend on
other tokens, so that the server's pool holds the same codes in its blocks (`run/serve/kv_cache.py`). What is
read has the model's dtype, and one layer's keys are wide at a time. A layer with a window keeps all keys.

Shapes: B batch, K key/value heads, T new tokens, S all tokens, E head width.
"""

import torch
from torch import Tensor

from clearhead.core.cache import Cache, LayerKV, with_room
from clearhead.core.config import ModelConfig
from clearhead.errors import refuse
from clearhead.run.quant.grid import bf16

MOST = 127  # the largest code


class Int8KV(LayerKV):
    """Codes of keys and of values [B, K, S, E], and their scales in bfloat16 [B, K, S, 1]."""

    parts: tuple[Tensor, ...] = ()  # codes and scales of keys, codes and scales of values
    dtype = torch.float32  # of what is read

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Round and append the new keys and values; return those of all tokens."""
        start, stop = self.cache.length, self.cache.length + k.shape[2]
        new = (*rounded(k.detach()), *rounded(v.detach()))
        before = self.parts or (None,) * len(new)
        room = max(stop, self.cache.reserve)
        self._keep(*(with_room(buffer, part, start, room) for buffer, part in zip(before, new)))
        for buffer, part in zip(self.parts, new):
            buffer.narrow(2, start, stop - start).copy_(part)
        self.dtype = k.dtype
        return self._wide(stop)

    def buffers(self) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all tokens, as attention reads them."""
        super().buffers()  # refuses an empty layer
        return self._wide(self.cache.length)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all that is kept."""
        return self.parts

    def reorder(self, rows: Tensor) -> None:
        """Replace row i by row `rows[i]`."""
        if self.parts:
            self._keep(*(part[rows] for part in self.parts))

    def _keep(self, *parts: Tensor) -> None:
        self.parts = parts
        self.k, self.v = parts[0], parts[2]  # for the number of rows

    def _wide(self, stop: int) -> tuple[Tensor, Tensor]:
        """Dequantize the slots before `stop`."""
        codes, scales, v_codes, v_scales = (part.narrow(2, 0, stop) for part in self.parts)
        return widened(codes, scales, self.dtype), widened(v_codes, v_scales, self.dtype)


def int8_cache(config: ModelConfig, reserve: int) -> Cache:
    """Make a cache of 8 bits; refuse it for a model that keeps keys in another way."""
    refuse(
        min(config.main.capacities) < 1,
        'cache "int8" with layers that take some tokens alone (depth_capacity): their keys lie otherwise, '
        "so leave cache out",
    )
    check_no_indexer(config, 'cache "int8"')
    return Cache(reserve, Int8KV)


def check_no_indexer(config: ModelConfig, option: str) -> None:
    """Refuse what would change the keys by which an indexer chooses (`Latent`)."""
    chooses = any(getattr(kind, "top", 0) for kind in config.main.kinds)
    refuse(chooses, f"{option} with an indexer, whose keys lie in the same cache: leave it out")


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and the scale of each token and head: [B, K, T, E] -> the same of int8, [B, K, T, 1]."""
    wide = torch.promote_types(x.dtype, torch.float32)
    scales = bf16(x.to(wide).abs().amax(-1, keepdim=True) / MOST, up=True)
    codes = x.to(wide) / torch.where(scales == 0, 1.0, scales.to(wide))
    return codes.round().clamp(-MOST, MOST).to(torch.int8), scales


def widened(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers that codes stand for: [B, K, S, E] and [B, K, S, 1] -> [B, K, S, E]."""
    return codes.to(dtype).mul_(scales.to(dtype))
