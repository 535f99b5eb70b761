"""The public names of clearhead, each with the module it comes from.

Type checkers and editors read this file. `__init__.py` reads it too, and imports each name when it is first
used. To add a public name, add it here. An assignment gives an old name, which warns when it is used.
"""

from clearhead.app.explorer.record import Shown as Shown
from clearhead.app.explorer.record import show as show
from clearhead.core.cache import Cache as Cache
from clearhead.core.config import ModelConfig as ModelConfig
from clearhead.core.config import RopeScaling as RopeScaling
from clearhead.core.transformer import Output as Output
from clearhead.core.transformer import Transformer as Transformer
from clearhead.errors import CheckpointError as CheckpointError
from clearhead.errors import ClearheadError as ClearheadError
from clearhead.errors import ConfigError as ConfigError
from clearhead.errors import InputError as InputError
from clearhead.errors import MissingExtraError as MissingExtraError
from clearhead.errors import TrainingError as TrainingError
from clearhead.hub.onnx import Exported as Exported
from clearhead.hub.onnx import export as export
from clearhead.inside.ablation import ablate as ablate
from clearhead.inside.attention import attention as attention
from clearhead.inside.checks import Check as Check
from clearhead.inside.checks import check as check
from clearhead.inside.circuit import Circuit as Circuit
from clearhead.inside.circuit import circuit as circuit
from clearhead.inside.features.training import train_features as train_features
from clearhead.inside.folding import fold_norms as fold_norms
from clearhead.inside.graph import graph as graph
from clearhead.inside.heads import heads as heads
from clearhead.inside.inputs import run_with_cache as run_with_cache
from clearhead.inside.lens import lens as lens
from clearhead.inside.long import LongReport as LongReport
from clearhead.inside.long import long as long
from clearhead.inside.patch import patch as patch
from clearhead.inside.probe import probe as probe
from clearhead.inside.pruning import prune as prune
from clearhead.inside.quantize import QuantReport as QuantReport
from clearhead.inside.quantize import quantize as quantize
from clearhead.inside.trace import Trace as Trace
from clearhead.inside.trace import trace as trace
from clearhead.labs.retrieval.index import Index as Index
from clearhead.labs.retrieval.index import build_index as build_index
from clearhead.labs.retrieval.passages import Hit as Hit
from clearhead.labs.sweep import Sweep as Sweep
from clearhead.labs.sweep import sweep as sweep
from clearhead.learn.evaluation.evaluate import Evaluation as Evaluation
from clearhead.learn.evaluation.evaluate import evaluate as evaluate
from clearhead.learn.losses import balance_loss as balance_loss
from clearhead.learn.parallel.estimate import MeshCost as MeshCost
from clearhead.learn.parallel.planner import MeshReport as MeshReport
from clearhead.learn.parallel.planner import plan as plan
from clearhead.learn.recipe import Recipe as Recipe
from clearhead.learn.recipe import read_recipe as read_recipe
from clearhead.learn.tasks.images import ImagePrompt as ImagePrompt
from clearhead.learn.tasks.results import Answer as Answer
from clearhead.learn.tasks.results import Candidate as Candidate
from clearhead.learn.tasks.results import Classification as Classification
from clearhead.learn.tasks.results import Generation as Generation
from clearhead.learn.tasks.results import Ranked as Ranked
from clearhead.learn.tasks.results import Score as Score
from clearhead.learn.tasks.results import Segment as Segment
from clearhead.learn.tasks.results import Span as Span
from clearhead.learn.tasks.results import SpokenWord as SpokenWord
from clearhead.learn.tasks.results import Tags as Tags
from clearhead.learn.tasks.results import Transcription as Transcription
from clearhead.learn.tasks.results import WindowReading as WindowReading
from clearhead.learn.tasks.results import Word as Word
from clearhead.learn.training.run import Trained as Trained
from clearhead.learn.training.run import train as train
from clearhead.run.api import Model as Model
from clearhead.run.api import load as load
from clearhead.run.generate.request import Request as Request
from clearhead.run.generate.request import Sampling as Sampling
from clearhead.run.kernels.fixed_cache import FixedCache as FixedCache
from clearhead.run.quant.apply import QuantPlan as QuantPlan
from clearhead.variants.caches import StreamCache as StreamCache
from clearhead.variants.caches import WindowCache as WindowCache
from clearhead.variants.contexts import Recording as Recording
from clearhead.variants.contexts import attending as attending
from clearhead.variants.contexts import edit as edit
from clearhead.variants.contexts import record as record
from clearhead.variants.contexts import tap_names as tap_names
from clearhead.variants.costs import Cost as Cost
from clearhead.variants.costs import cost as cost
from clearhead.variants.presets import PRESETS as PRESETS
from clearhead.variants.presets import preset as preset

__version__: str

Loaded = Model
