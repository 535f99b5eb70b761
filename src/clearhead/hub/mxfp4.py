"""MXFP4: experts whose weights are stored in 4 bits, 32 of them with one exponent. They are read as bfloat16.

A tensor `name` is two in the file: `name_blocks` [X, out, in/32, 16] has two numbers in each byte, the lower
half first, and `name_scales` [X, out, in/32] the exponents, 127 more than they are. Every number of the
format is one of bfloat16 too, but for exponents at the very end: nothing is rounded.
"""

import math
import warnings

import torch
from torch import Tensor

from clearhead.hub.architecture import QUANTIZATION
from clearhead.hub.fields import Json
from clearhead.hub.files import refuse
from clearhead.hub.weights import Entry

METHOD = "mxfp4"  # the quant_method that config.json names
BLOCKS, SCALES = "_blocks", "_scales"
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of 3 bits; the fourth is the sign


def unpacked(entries: dict[str, Entry], theirs: Json) -> tuple[dict[str, Entry], Json]:
    """Return tensors and config.json of a model whose weights are not quantized; warn where some were.

    Each pair of blocks and scales becomes the tensor that it stands for.
    """
    if not theirs.get(QUANTIZATION):
        return entries, theirs
    packed = [name.removesuffix(BLOCKS) for name in entries if name.endswith(BLOCKS)]
    if packed:
        warnings.warn(
            f"{len(packed)} tensors are stored in 4 bits ({METHOD}): they are read as bfloat16, or as the "
            "dtype asked for, and saved as that",
            stacklevel=6,
        )
    halves = {name + half for name in packed for half in (BLOCKS, SCALES)}
    plain = {name: entry for name, entry in entries.items() if name not in halves}
    plain |= {name: _joined(name, entries) for name in packed}
    return plain, {key: value for key, value in theirs.items() if key != QUANTIZATION}


def _joined(name: str, entries: dict[str, Entry]) -> Entry:
    """Return the tensor [X, in, out] of a name whose blocks and scales the file has."""
    refuse(
        name + SCALES not in entries, f"the file has {name}{BLOCKS} and not {name}{SCALES}: fetch it again"
    )
    blocks, scales = entries[name + BLOCKS], entries[name + SCALES]
    fitting = len(blocks.shape) == 4 and blocks.shape[:-1] == scales.shape
    refuse(
        not fitting or {blocks.dtype, scales.dtype} != {torch.uint8},
        f"tensors {name}{BLOCKS} {blocks.shape} {blocks.dtype} and {name}{SCALES} {scales.shape} "
        f"{scales.dtype} do not belong together: MXFP4 has bytes, and one scale for each block",
    )
    X, out = blocks.shape[:2]

    def release() -> None:
        blocks.release()
        scales.release()

    return Entry(
        (X, 2 * math.prod(blocks.shape[2:]), out),
        torch.bfloat16,
        lambda: dequantise(blocks.read(), scales.read()),
        release,
    )


def dequantise(blocks: Tensor, scales: Tensor) -> Tensor:
    """Map bytes [X, out, G, 16] and exponents [X, out, G] to numbers in bfloat16 [X, in, out]."""
    values = torch.tensor([*MAGNITUDES, *(-x for x in MAGNITUDES)], dtype=torch.bfloat16)
    byte = torch.arange(256)
    pairs = torch.stack([values[byte % 16], values[byte // 16]], dim=1)
    whole = torch.empty(*blocks.shape, 2, dtype=torch.bfloat16)  # X out G 16 2
    for expert, into in enumerate(whole):  # one at a time: the indices take eight times their room
        into.copy_(pairs[blocks[expert].int()])
        into.copy_(torch.ldexp(into, scales[expert].int()[..., None, None] - 127))
    return whole.flatten(2).transpose(1, 2)
