"""Positions for `plainly`: sinusoids, rotary angles and score biases, one number at a time.

Shapes: T tokens, D width, R rotated columns of a head, H heads.
"""

import math

import torch
from torch import Tensor

from clearhead.config import ModelConfig, RopeScaling


def wave(position: int, width: int, config: ModelConfig) -> list[float]:
    """Return the sinusoid of one position: `width` numbers."""
    pairs = width // 2 if config.sinusoid_ends else math.ceil(width / 2)
    angles = []
    for pair in range(pairs):
        exponent = pair / max(pairs - 1, 1) if config.sinusoid_ends else 2 * pair / width
        angles.append(position / 10_000**exponent)
    sines, cosines = [math.sin(angle) for angle in angles], [math.cos(angle) for angle in angles]
    if config.sinusoid_layout == "half":
        values = sines + cosines[: width // 2]
    else:
        values = [value for both in zip(sines, cosines) for value in both][:width]
    return values + [0.0] * (width - len(values))


def sinusoids(positions: list[int], width: int, config: ModelConfig, patches: bool) -> Tensor:
    """Return sinusoids [T, width]; a patch has its row in the first half and its column in the second."""
    rows = []
    for position in positions:
        place = position + config.position_offset
        if not patches:
            rows.append(wave(place, width, config))
        elif place < config.class_token:
            rows.append([0.0] * width)
        else:
            assert config.image_size is not None
            row, column = divmod(place - config.class_token, config.image_size[1] // config.patch_size)
            rows.append(wave(row, width // 2, config) + wave(column, width - width // 2, config))
    return torch.tensor(rows, dtype=torch.float64)


def rotated(x: Tensor, positions: list[int], longest: int, config: ModelConfig, window: int | None) -> Tensor:
    """Rotate one head's queries or keys [T, E], pair by pair, by an angle that grows with the position.

    `longest` is the length of the longest row at hand: two kinds of scaling go by it.
    """
    R = int(x.shape[1] * config.rope_fraction)
    speeds, factor = _speeds(R, longest, config, window)
    first = list(range(R // 2)) if config.rope_layout == "half" else list(range(0, R, 2))
    second = [column + (R // 2 if config.rope_layout == "half" else 1) for column in first]
    angles = torch.tensor(
        [[position * speed for speed in speeds] for position in positions], dtype=torch.float64
    )
    cos, sin = angles.cos() * factor, angles.sin() * factor  # T R/2
    turned = x.clone()
    turned[:, first] = x[:, first] * cos - x[:, second] * sin
    turned[:, second] = x[:, first] * sin + x[:, second] * cos
    return turned


def _speeds(R: int, longest: int, config: ModelConfig, window: int | None) -> tuple[list[float], float]:
    """Return the radians per position of each pair, and a factor on cosine and sine."""
    base, scaling = config.rope_base, config.rope_scaling
    if window is not None and config.rope_local_base is not None:
        base, scaling = config.rope_local_base, None
    plain = [base ** (-2 * pair / R) for pair in range(R // 2)]
    if scaling is None:
        return plain, 1.0
    trained = scaling.original_positions or config.max_positions
    if scaling.kind == "linear":
        return [speed / scaling.factor for speed in plain], 1.0
    if scaling.kind == "dynamic":
        stretch = scaling.factor * max(longest, trained) / trained - (scaling.factor - 1)
        stretched = base * stretch ** (R / (R - 2))
        return [stretched ** (-2 * pair / R) for pair in range(R // 2)], 1.0
    if scaling.kind == "llama3":
        return [_blended(speed, trained, scaling) for speed in plain], 1.0
    if scaling.kind == "yarn":
        return _yarn(plain, base, trained, scaling), _yarn_factor(scaling)
    divisors = scaling.long_factor if longest > trained else scaling.short_factor
    assert divisors is not None
    growth = scaling.factor if scaling.factor != 1 else config.max_positions / trained
    usual = math.sqrt(1 + math.log(growth) / math.log(trained)) if growth > 1 else 1.0
    return [speed / divisor for speed, divisor in zip(plain, divisors)], scaling.attention_factor or usual


def _blended(speed: float, trained: int, scaling: RopeScaling) -> float:
    """Keep the speed of fast pairs, divide that of slow ones by the factor, and mix in between."""
    wavelength = 2 * math.pi / speed
    if wavelength < trained / scaling.high_frequency_factor:
        return speed
    if wavelength > trained / scaling.low_frequency_factor:
        return speed / scaling.factor
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = (trained / wavelength - low) / (high - low)
    return kept * speed + (1 - kept) * speed / scaling.factor


def _yarn(plain: list[float], base: float, trained: int, scaling: RopeScaling) -> list[float]:
    """Keep pairs that turn more than beta_fast times over the trained length; slow those below beta_slow."""
    R = 2 * len(plain)

    def pair_of(turns: float) -> float:
        return R * math.log(trained / (2 * math.pi * turns)) / (2 * math.log(base))

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, R - 1)
    speeds = []
    for pair, speed in enumerate(plain):
        slowed = min(max((pair - first) / max(last - first, 0.001), 0.0), 1.0)
        speeds.append(slowed * speed / scaling.factor + (1 - slowed) * speed)
    return speeds


def _yarn_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    grown = max(math.log(scaling.factor), 0.0) / 10
    if scaling.mscale and scaling.mscale_all_dim:
        return (1 + scaling.mscale * grown) / (1 + scaling.mscale_all_dim * grown)
    return 1 + grown


def slope(head: int, n_heads: int) -> float:
    """Return ALiBi's slope: 2^(-8/n), 2^(-16/n), ...

    for a power of two n; the heads above it take every other one of 2n.
    """
    n = 1
    while 2 * n <= n_heads:
        n *= 2
    return math.pow(2, -8 * (head + 1) / n) if head < n else math.pow(2, -4 * (2 * (head - n) + 1) / n)


def bucket(distance: int, both_sides: bool, config: ModelConfig) -> int:
    """Return the row of the relative table for a key this far right of its query (negative: left)."""
    count, first = config.relative_buckets, 0
    if both_sides:
        count //= 2
        first = count if distance > 0 else 0
    away = abs(distance) if both_sides else max(-distance, 0)
    exact = count // 2
    if away < exact:
        return first + away
    steps = math.log(away / exact) / math.log(config.relative_max_distance / exact) * (count - exact)
    return first + min(exact + int(steps), count - 1)
