"""The recipe's sections `[train]` and `[generate]`: settings of training and of generation."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from clearhead.errors import ConfigError, refuse
from clearhead.typed import check_least, check_types, check_values

MAX_THREADS = 1024  # with very many the process dies without a message
MAX_SEED = 2**32 - 1  # so that the seed of each step is one that PyTorch and NumPy take
# What the numbers of [train] may be: names of keys, which values are allowed, and the same in words
AT_LEAST_1 = (
    *("steps", "accumulate", "validate_every", "save_every", "log_every", "threads", "patience"),
    *("keep_best", "keep_last"),
)
AT_LEAST_0 = ("pretrain", "weight_decay", "clip", "warmup", "loss_chunk", "lora", "average", "samples")
RULES: tuple[tuple[tuple[str, ...], Callable[[float], bool], str], ...] = (
    (("lr", "epochs", "eps", "lora_alpha"), lambda value: value > 0, "must be above 0"),
    (("label_smoothing", "ema"), lambda value: 0 <= value < 1, "must lie in [0, 1)"),
    (("layer_decay", "decay"), lambda value: 0 < value <= 1, "must be above 0, and 1 at most"),
    (("floor",), lambda value: 0 <= value <= 1, "must lie in [0, 1]: it is a share of lr"),
    (("seed",), lambda value: 0 <= value <= MAX_SEED, f"must lie between 0 and {MAX_SEED}"),
    (
        ("threads",),
        lambda value: value <= MAX_THREADS,
        f"must be {MAX_THREADS} at most: more than there are processors only slow it down",
    ),
)


@dataclass(frozen=True, kw_only=True)
class TrainPlan:
    """Settings of training."""

    # Length
    steps: int | None = None  # None: what `epochs` passes over the data take
    epochs: float | None = None  # None: chosen by the amount of data
    pretrain: int = 0  # classify, tag: steps of masked language modelling on the same texts before; 0: none
    accumulate: int = 1  # batches that make one step
    seed: int = 0

    # Optimizer
    optimizer: Literal["adamw", "adafactor"] = "adamw"  # adafactor: a fraction of the memory
    lr: float = 1e-3  # the peak learning rate; `original`: a factor on its own rate
    betas: tuple[float, float] = (0.9, 0.95)  # decay of the running means of the gradient and of its square
    eps: float = 1e-8  # added to the root of the latter, which divides the update
    weight_decay: float = 0.1  # of matrices; never of norms, biases and embeddings
    clip: float = 1.0  # largest norm of the gradient; 0: none
    layer_decay: float = 1.0  # each layer's rate is this times that of the layer above it

    # Schedule
    schedule: Literal["original", "cosine", "linear", "constant", "wsd"] = "cosine"  # after the warm-up
    warmup: int | None = None  # steps; None: a twentieth of them, 4,000 for `original`
    decay: float = 0.2  # wsd: the share of the steps at the end in which the rate falls
    floor: float = 0.1  # the rate at the end, as a share of `lr`

    # Loss
    label_smoothing: float = 0.0  # the share of each target that is spread over all classes
    loss_chunk: int | None = None  # rows of logits at a time; None: by the vocabulary

    # Machine
    device: str = "auto"  # cuda, mps, cpu; auto: the best there is
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: bfloat16 where it is fast
    compile: bool | None = None  # None: where it pays
    checkpointing: bool = False  # recompute activations in the backward pass: slower, smaller
    threads: int | None = None  # of the CPU; None: PyTorch's own choice

    # What is trained
    freeze: tuple[str, ...] = ()  # names of parameters that stay as they are, with * for any part
    lora: int = 0  # rank of low-rank updates; 0: every weight is trained
    lora_alpha: float = 16.0  # they are scaled by this over their rank
    lora_targets: tuple[str, ...] = ("q", "v")  # last names of the linear layers that get them

    # Validation
    validate_every: int | None = None  # steps; None: about twenty times in all
    metric: str | None = None  # what the best checkpoint is chosen by; None: by the task
    patience: int | None = None  # validations without progress before stopping; None: never
    keep_best: int = 1  # checkpoints to keep by the metric
    ema: float = 0.0  # decay of the averaged weights; 0: none
    average: int = 0  # average the weights of this many last checkpoints at the end; 0: none

    # Checkpoints
    save_every: int | None = None  # steps; None: at each validation
    keep_last: int = 1  # checkpoints to keep by age

    # Show
    log_every: int = 10  # steps
    samples: int = 2  # shown at each validation; 0: none
    tensorboard: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        check_least(self, 1, *AT_LEAST_1)
        check_least(self, 0, *AT_LEAST_0)
        for names, allowed, rule in RULES:
            check_values(self, names, allowed, rule)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas {self.betas[0]}, {self.betas[1]} must each lie in [0, 1)")
        refuse(
            self.steps is not None and self.epochs is not None,
            f"steps {self.steps} and epochs {self.epochs} both say how long to train: set one of them",
            ConfigError,
        )


@dataclass(frozen=True, kw_only=True)
class GeneratePlan:
    """Settings of generation during validation; saved as the model's defaults."""

    max_new_tokens: int = 100  # where a text ends at the latest
    temperature: float = 0.8  # lm; other tasks are greedy or take beams
    top_p: float = 0.95  # lm: draw from the likeliest tokens that have this much of the probability
    num_beams: int = 1  # answers searched side by side; 1: greedy
    length_penalty: float = 1.0  # beams: scores are divided by length to this power

    def __post_init__(self) -> None:
        check_types(self)
        check_least(self, 1, "max_new_tokens", "num_beams")
        check_least(self, 0, "temperature")
        check_values(
            self,
            ("top_p",),
            lambda value: 0 < value <= 1,
            "must be above 0, and 1 at most: 1 keeps every token",
        )
        check_values(
            self,
            ("length_penalty",),
            lambda value: -20 <= value <= 20,
            "must lie in [-20, 20]: it is an exponent, 1 takes the mean",
        )
