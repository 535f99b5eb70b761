"""The public names of clearhead, each with the module it comes from.

Type checkers and editors read this file. `__init__.py` reads it too, and imports each name when it is first
used. To add a public name, add it here. An assignment gives an old name, which warns when it is used.
"""

from clearhead.api import Model as Model
from clearhead.api import load as load
from clearhead.config import ModelConfig as ModelConfig
from clearhead.config import RopeScaling as RopeScaling
from clearhead.costs import Cost as Cost
from clearhead.costs import cost as cost
from clearhead.errors import CheckpointError as CheckpointError
from clearhead.errors import ClearheadError as ClearheadError
from clearhead.errors import ConfigError as ConfigError
from clearhead.errors import InputError as InputError
from clearhead.errors import MissingExtraError as MissingExtraError
from clearhead.errors import TrainingError as TrainingError
from clearhead.evaluation.evaluate import Evaluation as Evaluation
from clearhead.evaluation.evaluate import evaluate as evaluate
from clearhead.explorer.record import Shown as Shown
from clearhead.explorer.record import show as show
from clearhead.fast.fixed_cache import FixedCache as FixedCache
from clearhead.generate.request import Sampling as Sampling
from clearhead.graph.export import Exported as Exported
from clearhead.graph.export import export as export
from clearhead.inside.attention import attention as attention
from clearhead.inside.checks import Check as Check
from clearhead.inside.checks import check as check
from clearhead.inside.folding import fold_norms as fold_norms
from clearhead.inside.heads import heads as heads
from clearhead.inside.inputs import run_with_cache as run_with_cache
from clearhead.inside.lens import lens as lens
from clearhead.inside.long import LongReport as LongReport
from clearhead.inside.long import long as long
from clearhead.inside.parts.ablate import ablate as ablate
from clearhead.inside.parts.prune import prune as prune
from clearhead.inside.patch import patch as patch
from clearhead.inside.probe import probe as probe
from clearhead.inside.quantize import QuantReport as QuantReport
from clearhead.inside.quantize import quantize as quantize
from clearhead.inside.trace import Trace as Trace
from clearhead.inside.trace import trace as trace
from clearhead.losses import balance_loss as balance_loss
from clearhead.model.cache import Cache as Cache
from clearhead.model.cache import WindowCache as WindowCache
from clearhead.model.kinds.stream_cache import StreamCache as StreamCache
from clearhead.model.taps import Recording as Recording
from clearhead.model.taps import edit as edit
from clearhead.model.taps import record as record
from clearhead.model.taps import tap_names as tap_names
from clearhead.model.transformer import Output as Output
from clearhead.model.transformer import Transformer as Transformer
from clearhead.model.transformer import attending as attending
from clearhead.parallel.estimate import MeshCost as MeshCost
from clearhead.parallel.planner import MeshReport as MeshReport
from clearhead.parallel.planner import plan as plan
from clearhead.presets import PRESETS as PRESETS
from clearhead.presets import preset as preset
from clearhead.quant.apply import QuantPlan as QuantPlan
from clearhead.recipe import Recipe as Recipe
from clearhead.recipe import read_recipe as read_recipe
from clearhead.retrieval.index import Hit as Hit
from clearhead.retrieval.index import Index as Index
from clearhead.retrieval.index import build_index as build_index
from clearhead.tasks.results import Answer as Answer
from clearhead.tasks.results import Candidate as Candidate
from clearhead.tasks.results import Classification as Classification
from clearhead.tasks.results import Generation as Generation
from clearhead.tasks.results import Ranked as Ranked
from clearhead.tasks.results import Score as Score
from clearhead.tasks.results import Segment as Segment
from clearhead.tasks.results import Span as Span
from clearhead.tasks.results import Tags as Tags
from clearhead.tasks.results import Transcription as Transcription
from clearhead.tasks.results import WindowReading as WindowReading
from clearhead.tasks.results import Word as Word
from clearhead.training.run import Trained as Trained
from clearhead.training.run import train as train

__version__: str

Loaded = Model
