"""clearhead: a Transformer you can see through."""

from clearhead.config import ModelConfig, RopeScaling
from clearhead.errors import CheckpointError, ClearheadError, ConfigError, InputError, MissingExtraError
from clearhead.loaded import Loaded, load
from clearhead.model.cache import Cache, FixedCache
from clearhead.model.experts import balance_loss
from clearhead.model.taps import Recording, edit, record, tap_names
from clearhead.model.transformer import Output, Transformer, attending
from clearhead.model.window_cache import WindowCache

__version__ = "0.1.0"
__all__ = [
    "Cache",
    "CheckpointError",
    "ClearheadError",
    "ConfigError",
    "FixedCache",
    "InputError",
    "Loaded",
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
    "load",
    "record",
    "tap_names",
]
