"""clearhead: a Transformer you can see through."""

from clearhead.bundle import Model, load
from clearhead.config import ModelConfig, RopeScaling
from clearhead.costs import Cost, cost
from clearhead.errors import (
    CheckpointError,
    ClearheadError,
    ConfigError,
    InputError,
    MissingExtraError,
    TrainingError,
)
from clearhead.evaluation.evaluate import Evaluation, evaluate
from clearhead.explorer.notebook import Shown, show
from clearhead.generate.sampling import Sampling
from clearhead.generate.text import Generation, Score
from clearhead.inside.checks import Check, check
from clearhead.inside.trace import Trace, trace
from clearhead.model.cache import Cache
from clearhead.model.fixed_cache import FixedCache
from clearhead.model.experts import balance_loss
from clearhead.model.taps import Recording, edit, record, tap_names
from clearhead.model.transformer import Output, Transformer, attending
from clearhead.model.window_cache import WindowCache
from clearhead.presets import PRESETS, preset
from clearhead.tasks import Answer, Candidate, Classification, Span, Tags, Word
from clearhead.training.recipe import Recipe, read_recipe
from clearhead.training.run import Trained, train

__version__ = "0.1.0"
__all__ = [
    "PRESETS",
    "Answer",
    "Cache",
    "Candidate",
    "Check",
    "CheckpointError",
    "Classification",
    "ClearheadError",
    "ConfigError",
    "Cost",
    "Evaluation",
    "FixedCache",
    "Generation",
    "InputError",
    "MissingExtraError",
    "Model",
    "ModelConfig",
    "Output",
    "Recipe",
    "Recording",
    "RopeScaling",
    "Sampling",
    "Score",
    "Shown",
    "Span",
    "Tags",
    "Trace",
    "Trained",
    "TrainingError",
    "Transformer",
    "WindowCache",
    "Word",
    "attending",
    "balance_loss",
    "check",
    "cost",
    "edit",
    "evaluate",
    "load",
    "preset",
    "read_recipe",
    "record",
    "show",
    "tap_names",
    "trace",
    "train",
]
