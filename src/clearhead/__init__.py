"""clearhead: a Transformer you can see through."""

from clearhead.config import ModelConfig, RopeScaling
from clearhead.errors import CheckpointError, ClearheadError, ConfigError, InputError, MissingExtraError
from clearhead.model.cache import Cache, FixedCache, WindowCache
from clearhead.model.experts import balance_loss
from clearhead.model.taps import Recording, edit, record, tap_names
from clearhead.model.transformer import Output, Transformer, attending

__version__ = "0.1.0"
__all__ = [
    "Cache",
    "CheckpointError",
    "ClearheadError",
    "ConfigError",
    "FixedCache",
    "InputError",
    "MissingExtraError",
    "ModelConfig",
    "Output",
    "Recording",
    "RopeScaling",
    "Transformer",
    "WindowCache",
    "attending",
    "balance_loss",
    "edit",
    "record",
    "tap_names",
]
