"""clearhead: a Transformer you can see through."""

from clearhead.config import ModelConfig, RopeScaling
from clearhead.cost import Cost, cost
from clearhead.errors import CheckpointError, ClearheadError, ConfigError, InputError, MissingExtraError
from clearhead.generate.sampling import Sampling
from clearhead.generate.text import Generation, Score
from clearhead.inside.checks import Check, check
from clearhead.loaded import Loaded, load
from clearhead.model.cache import Cache, FixedCache
from clearhead.model.experts import balance_loss
from clearhead.model.taps import Recording, edit, record, tap_names
from clearhead.model.transformer import Output, Transformer, attending
from clearhead.model.window_cache import WindowCache
from clearhead.presets import PRESETS, preset

__version__ = "0.1.0"
__all__ = [
    "PRESETS",
    "Cache",
    "Check",
    "CheckpointError",
    "ClearheadError",
    "ConfigError",
    "Cost",
    "FixedCache",
    "Generation",
    "InputError",
    "Loaded",
    "MissingExtraError",
    "ModelConfig",
    "Output",
    "Recording",
    "RopeScaling",
    "Sampling",
    "Score",
    "Transformer",
    "WindowCache",
    "attending",
    "balance_loss",
    "check",
    "cost",
    "edit",
    "load",
    "preset",
    "record",
    "tap_names",
]
