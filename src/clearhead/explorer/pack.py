"""Arrays as a page gets them: a byte for each value where that is enough, base64 within JSON."""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


def packed_bytes(values: ArrayLike, low: float = 0.0, high: float = 1.0) -> dict[str, Any]:
    """Values between `low` and `high`, a byte each: off by 1/510 of that range at most."""
    array = np.nan_to_num(np.asarray(values, dtype=np.float32), nan=low)
    levels = np.clip(np.rint((array - low) / (high - low or 1.0) * 255), 0, 255).astype(np.uint8)
    return {"shape": list(array.shape), "type": "u8", "low": low, "high": high, "data": _text(levels)}


def packed_floats(values: ArrayLike) -> dict[str, Any]:
    """Values as they are, in float32; what is not finite becomes the largest number there is, so that order stays."""
    array = np.nan_to_num(np.asarray(values, dtype=np.float32))
    return {"shape": list(array.shape), "type": "f32", "data": _text(array)}


def packed_picture(pixels: ArrayLike) -> dict[str, Any]:
    """Pixels [channels, height, width] as a picture between 0 and 1: what a model was trained to read may have any range."""
    array = np.asarray(pixels, dtype=np.float32)
    low, high = float(array.min()), float(array.max())
    return packed_bytes(array if low >= 0 and high <= 1 else (array - low) / (high - low or 1.0))


def packed_numbers(values: ArrayLike) -> dict[str, Any]:
    """Whole numbers, four bytes each."""
    array = np.asarray(values, dtype=np.int32)
    return {"shape": list(array.shape), "type": "i32", "data": _text(array)}


def unpacked(body: dict[str, Any]) -> NDArray[Any]:
    """The array again, as the page reads it."""
    raw = base64.b64decode(body["data"])
    if body["type"] == "f32":
        return np.frombuffer(raw, np.float32).reshape(body["shape"])
    if body["type"] == "i32":
        return np.frombuffer(raw, np.int32).reshape(body["shape"])
    levels = np.frombuffer(raw, np.uint8).astype(np.float32)
    return np.asarray(body["low"] + levels * ((body["high"] - body["low"]) / 255), dtype=np.float32).reshape(
        body["shape"]
    )


def finite(value: Any) -> Any:
    """Plain JSON: numbers that are not finite become null, in lists and objects too."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return value


def _text(array: NDArray[Any]) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")
