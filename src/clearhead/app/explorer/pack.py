"""Arrays as a page gets them: a byte for each value where that is enough, base64 within JSON."""

import base64
import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


def packed_bytes(values: ArrayLike, low: float = 0.0, high: float = 1.0) -> dict[str, Any]:
    """Pack values between `low` and `high`, a byte each: off by 1/510 of that range at most."""
    array = np.nan_to_num(np.asarray(values, dtype=np.float32), nan=low)
    levels = np.clip(np.rint((array - low) / (high - low or 1.0) * 255), 0, 255).astype(np.uint8)
    return {**_packed(levels, "u8"), "low": low, "high": high}


def packed_floats(values: ArrayLike) -> dict[str, Any]:
    """Pack values as float32; what is not finite becomes the largest number there is, so that order stays."""
    return _packed(np.nan_to_num(np.asarray(values, dtype=np.float32)), "f32")


def packed_picture(pixels: ArrayLike) -> dict[str, Any]:
    """Pack pixels [channels, height, width] as a picture between 0 and 1, whatever range the model reads."""
    array = np.asarray(pixels, dtype=np.float32)
    low, high = float(array.min()), float(array.max())
    return packed_bytes(array if low >= 0 and high <= 1 else (array - low) / (high - low or 1.0))


def packed_numbers(values: ArrayLike) -> dict[str, Any]:
    """Pack whole numbers, four bytes each."""
    return _packed(np.asarray(values, dtype=np.int32), "i32")


def _packed(array: NDArray[Any], kind: str) -> dict[str, Any]:
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")
    return {"shape": list(array.shape), "type": kind, "data": data}


def short(value: float) -> float:
    """Return a float32 with the digits that it has: in a file the others would be most of the bytes."""
    return float(f"{value:.9g}")


def finite(value: Any) -> Any:
    """Return plain JSON: numbers that are not finite become null, in lists and objects too."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return value
