"""The recipe's sections `[train]` and `[generate]`: how a model learns, and how it speaks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from clearhead.errors import ConfigError
from clearhead.typed import check_least, check_types

Schedule = Literal["original", "cosine", "linear", "constant", "wsd"]
Optimizer = Literal["adamw", "adafactor"]
Precision = Literal["auto", "float32", "bfloat16", "float16"]

THREADS = 1024  # at most; with very many the process dies without a word
MAX_SEED = (
    2**32 - 1
)  # what follows from it, such as the seed of a step, stays a number that PyTorch and NumPy take


@dataclass(frozen=True, kw_only=True)
class TrainPlan:
    """How weights are learned."""

    # Length
    steps: int | None = None  # None: `epochs` passes
    epochs: float | None = None  # None: chosen by the amount of data, and said
    pretrain: int = 0  # classify, tag: steps of masked language modelling on the same texts before; 0: none
    accumulate: int = 1  # batches that make one step
    seed: int = 0

    # Optimizer
    optimizer: Optimizer = "adamw"  # adafactor: a fraction of the memory
    lr: float = 1e-3  # the highest rate; `original`: a factor on its own
    betas: tuple[float, float] = (0.9, 0.95)  # how slowly the averages of the gradient and of its square move
    eps: float = 1e-8  # added where the rate is divided by the latter's root
    weight_decay: float = 0.1  # of matrices; never of norms, biases and embeddings
    clip: float = 1.0  # largest norm of the gradient; 0: none
    layer_decay: float = 1.0  # each layer's rate is this times that of the layer above it

    # Schedule
    schedule: Schedule = "cosine"  # how the rate falls after the warm-up
    warmup: int | None = None  # steps; None: a twentieth of them, 4,000 for `original`
    decay: float = 0.2  # wsd: the share of the steps at the end in which the rate falls
    floor: float = 0.1  # the rate at the end, as a share of `lr`

    # Loss
    label_smoothing: float = 0.0  # the share of each target that is spread over all classes
    loss_chunk: int | None = None  # rows of logits at a time; None: by the vocabulary

    # Machine
    device: str = "auto"  # cuda, mps, cpu; auto: the best there is
    precision: Precision = "auto"  # auto: bfloat16 where the hardware has it, else float32
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
        check_least(
            self, 1, "steps", "accumulate", "validate_every", "save_every", "log_every", "threads", "patience"
        )
        check_least(self, 1, "keep_best", "keep_last")
        check_least(
            self, 0, "pretrain", "weight_decay", "clip", "warmup", "loss_chunk", "lora", "average", "samples"
        )
        for name in ("lr", "epochs", "eps", "lora_alpha"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} {value} must be above 0")
        for name in ("label_smoothing", "ema"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} {getattr(self, name)} must lie in [0, 1)")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas {self.betas[0]}, {self.betas[1]} must each lie in [0, 1)")
        for name in ("layer_decay", "decay"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{name} {getattr(self, name)} must be above 0, and 1 at most")
        if not 0 <= self.floor <= 1:
            raise ConfigError(f"floor {self.floor} must lie in [0, 1]: it is a share of lr")
        if self.threads is not None and self.threads > THREADS:
            raise ConfigError(
                f"threads {self.threads} must be {THREADS} at most: more than there are processors only slow it down"
            )
        if not 0 <= self.seed <= MAX_SEED:
            raise ConfigError(f"seed {self.seed} must lie between 0 and {MAX_SEED}")
        if self.steps is not None and self.epochs is not None:
            raise ConfigError(
                f"steps {self.steps} and epochs {self.epochs} both say how long to train: set one of them"
            )


@dataclass(frozen=True, kw_only=True)
class GeneratePlan:
    """How samples and answers are made during validation; saved as the model's defaults."""

    max_new_tokens: int = 100  # where a text ends at the latest
    temperature: float = 0.8  # lm; other tasks are greedy or take beams
    top_p: float = 0.95  # lm: draw from the likeliest tokens that have this much of the probability
    num_beams: int = 1  # answers searched side by side; 1: greedy
    length_penalty: float = 1.0  # beams: scores are divided by length to this power

    def __post_init__(self) -> None:
        check_types(self)
        check_least(self, 1, "max_new_tokens", "num_beams")
        check_least(self, 0, "temperature")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p {self.top_p} must be above 0, and 1 at most: 1 keeps every token")
        if not -20 <= self.length_penalty <= 20:
            raise ConfigError(
                f"length_penalty {self.length_penalty} must lie in [-20, 20]: it is an exponent, 1 takes the mean"
            )
