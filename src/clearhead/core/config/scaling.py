"""How rotary positions go beyond the length that a model was trained on."""

from dataclasses import dataclass
from typing import Literal

from clearhead.core.config.typed import check_types
from clearhead.errors import ConfigError, refuse


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary angles are stretched beyond the length a model was trained on."""

    kind: Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
    factor: float = 1.0  # longrope: 1 stands for max_positions / original_positions
    original_positions: int | None = None  # trained length; None: the model's max_positions
    low_frequency_factor: float = 1.0  # llama3: wavelengths longer than original / low are divided by factor
    high_frequency_factor: float = 4.0  # llama3: wavelengths shorter than original / high are kept
    beta_fast: float = 32.0  # yarn: rotations over the trained length above which a pair is kept
    beta_slow: float = 1.0  # yarn: rotations below which a pair is interpolated
    truncate: bool = True  # yarn: round the ends of the ramp to whole pairs
    attention_factor: float | None = None  # yarn, longrope: scale of cos and sin; None: from the factor
    mscale: float | None = None  # yarn: the two weights from which some models derive attention_factor
    mscale_all_dim: float | None = None
    short_factor: tuple[float, ...] | None = None  # longrope: one divisor per pair within the trained length
    long_factor: tuple[float, ...] | None = None  # longrope: and beyond it

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("factor", "beta_fast", "beta_slow"):
            value = getattr(self, name)
            refuse(value <= 0, f"rope scaling {name} {value} must be positive", ConfigError)
        refuse(
            self.kind == "longrope" and (self.short_factor is None or self.long_factor is None),
            "rope scaling longrope needs short_factor and long_factor, one number per rotated pair",
            ConfigError,
        )
