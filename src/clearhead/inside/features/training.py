"""Train a sparse dictionary on activations.

    features = train_features(m, "book.txt", at="blocks.3.feedforward", kind="transcoder", folder="features/")
    features.dictionary.encode(x), features.report.loss_recovered

Activations are mean-centred and scaled, so that every tap has a mean square of one; both are folded into the
weights at the end. The directions that are written have unit norm. Sparsity, with `k` features active on
average (Gao et al. 2024; Bussmann et al. 2024; Rajamanoharan et al. 2024):

    topk        the k largest of each token
    batchtopk   the k · B largest of a batch; afterwards JumpReLU, at the mean of the lowest that passed
    jumprelu    a learned threshold for each feature, and a loss where more or fewer than k are active

Features that have not been active for a while get a loss of their own: the strongest of them reconstruct what
the others leave over (Gao et al. 2024).

Shapes: B tokens of a batch, N features, D of what is read, O of what is written.
"""

import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from clearhead.errors import refuse, refuse_outside, refuse_seed, refuse_unknown
from clearhead.inside.features.dictionary import CONFIG, KINDS, Dictionary, Kind, find_taps
from clearhead.inside.features.report import FeatureReport, measure
from clearhead.inside.features.streams import Data, Stream, read_rows
from clearhead.inside.inputs import AnyModel, as_model
from clearhead.inside.results import Result
from clearhead.learn.evaluation.metrics import OnProgress

Activation = Literal["topk", "batchtopk", "jumprelu"]
Blocks = Callable[[int], tuple[Tensor, Tensor]]  # a block's number -> activations [n, D], [n, O], shuffled
ACTIVATIONS = ("topk", "batchtopk", "jumprelu")
AUX = 1 / 32  # weight of the loss of inactive features
BANDWIDTH = 0.1  # of JumpReLU: how near its threshold an activation moves it
SPARSITY = 0.5  # weight of (active / k - 1)², of JumpReLU
EMA = 0.05  # of the threshold of BatchTopK, at each step: the mean of about twenty
LENGTH = 128  # tokens of a row
HELD_OUT = 2**14  # tokens, at most
STATE = "training.pt"  # next to the dictionary until training is done
SAVE_EVERY = 60.0  # seconds, at least: the state has three times the size of the dictionary


@dataclass(frozen=True)
class FeaturePlan:
    """How a dictionary is trained."""

    kind: Kind = "autoencoder"
    activation: Activation = "batchtopk"
    n_features: int = 0  # 0: eight for each dimension that is read
    k: int = 32  # features active per token, on average
    tokens: int = 1_000_000
    batch: int = 2048  # tokens
    lr: float = 1e-3
    warmup: float = 0.05  # share of the tokens in which the learning rate rises
    decay: float = 0.3  # share at the end in which it falls to zero
    inactive: float = 0.1  # share of the tokens after which a feature that was never active is helped
    precision: Literal["float32", "bfloat16"] = "float32"  # of the matmuls; weights are float32
    seed: int = 0
    data: str = ""  # a digest of the rows and activations, so that a run does not go on with others

    def __post_init__(self) -> None:
        refuse_unknown("kind", self.kind, KINDS)
        refuse_unknown("activation", self.activation, ACTIVATIONS)
        refuse_unknown("precision", self.precision, ("float32", "bfloat16"))
        for name in ("k", "tokens", "batch"):
            value = getattr(self, name)
            refuse(value < 1, f"{name} {value} must be 1 or more")
        refuse(self.n_features < 0, f"features {self.n_features} is negative: 0 is eight per dimension")
        refuse_outside("lr", self.lr, 0, open=True)
        for name in ("warmup", "decay", "inactive"):
            refuse_outside(name, getattr(self, name), 0, 1)
        refuse_seed(self.seed)
        refuse(0 < self.n_features < self.k, f"k {self.k} is more than the {self.n_features} features")


@dataclass(eq=False)
class Trainer:
    """A dictionary in training, on centred and scaled activations, with all that a resumed run needs."""

    plan: FeaturePlan
    dictionary: Dictionary
    scaling: dict[str, Tensor]  # mean_in, scale_in [D], mean_out, scale_out [O]
    tokens: int = 0  # that were learned from
    blocks: int = 0
    cutoff: float = 0.0  # of BatchTopK: the mean of the lowest activations that passed
    losses: list[float] = field(default_factory=list)  # mean squared error of each block, of the variance

    def __post_init__(self) -> None:
        device = self.dictionary.W_enc.device
        self.idle = torch.zeros(self.dictionary.n_features, device=device)  # tokens since each was active
        self.optimizer = torch.optim.Adam(self.dictionary.parameters(), lr=self.plan.lr)

    @classmethod
    def begin(
        cls, plan: FeaturePlan, reads: tuple[str, ...], writes: tuple[str, ...], x: Tensor, y: Tensor
    ) -> "Trainer":
        """Begin with the statistics of a block, [n, D] and [n, O]."""
        scaling: dict[str, Tensor] = {}
        for name, value, taps in (("in", x, reads), ("out", y, writes)):
            mean = value.double().mean(0)
            parts = (value.double() - mean).square().mean(0).view(len(taps), -1).mean(1).sqrt()
            scale = parts.clamp(min=1e-6).repeat_interleave(value.shape[1] // len(taps))
            scaling |= {f"mean_{name}": mean.float(), f"scale_{name}": scale.float()}
        n, d_in, d_out = plan.n_features or 8 * x.shape[1], x.shape[1], y.shape[1]
        refuse(plan.k > n, f"k {plan.k} is more than the {n} features")
        dictionary = Dictionary(plan.kind, reads, writes, d_in, d_out, n, jump=plan.activation == "jumprelu")
        generator = torch.Generator().manual_seed(plan.seed)
        with torch.no_grad():
            unit = torch.nn.functional.normalize(torch.randn(n, d_in, generator=generator), dim=1)
            dictionary.W_enc.copy_(unit.T)
            dictionary.W_dec.copy_(unit) if reads == writes else None
            if dictionary.threshold is not None:
                dictionary.threshold.fill_(1.0)
        trainer = cls(plan, dictionary.to(x.device), scaling)
        if (
            reads != writes
        ):  # a direction that is written: the mean of what is there when the feature is active
            with torch.no_grad():
                x, y = trainer.scaled(x, y)
                a = trainer.sparse(dictionary.pre(x))[0]
                noise = torch.randn(n, d_out, generator=generator).to(x.device)
                dictionary.W_dec.copy_(a.T @ y + 1e-3 * noise)
                trainer.renorm()
        return trainer

    def scaled(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return activations centred and scaled."""
        s = self.scaling
        same = x is y
        x = (x - s["mean_in"]) / s["scale_in"]
        return x, x if same else (y - s["mean_out"]) / s["scale_out"]

    def sparse(self, pre: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features [B, N], and how many are active per token, with gradients for JumpReLU."""
        plan, threshold = self.plan, self.dictionary.threshold
        if threshold is not None:
            gate = (pre > threshold).to(pre.dtype)
            near = ((pre - threshold).abs() < BANDWIDTH / 2).to(pre.dtype) / BANDWIDTH
            moved = threshold - threshold.detach()  # zero, with the threshold's gradient
            active = (gate - near.detach() * moved).sum(-1).mean()
            return pre * gate - (near * threshold).detach() * moved, active
        if plan.activation == "topk":
            lowest = pre.detach().topk(plan.k, dim=-1).values[:, -1:]
        else:
            count = min(plan.k * len(pre), pre.numel())
            lowest = _kth_largest(pre.detach().flatten().float(), count)
        gate = (pre >= lowest) & (pre > 0)
        if plan.activation == "batchtopk" and torch.is_grad_enabled():
            first = self.cutoff == 0
            self.cutoff += (1 if first else EMA) * (max(float(lowest), 0.0) - self.cutoff)
        return pre * gate, gate.sum(-1, dtype=torch.float32).mean()

    def step(self, x: Tensor, y: Tensor) -> float:
        """Learn from a batch of scaled activations; return the mean squared error."""
        plan, d = self.plan, self.dictionary
        done = self.tokens / plan.tokens
        rise, fall = min(1.0, (done + 1e-3) / plan.warmup), min(1.0, (1 - done) / plan.decay)
        for group in self.optimizer.param_groups:
            group["lr"] = plan.lr * max(min(rise, fall), 1e-3)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=plan.precision == "bfloat16"):
            pre = x @ d.W_enc + d.b_enc
            a, active = self.sparse(pre)
            written = a @ d.W_dec + d.b_dec
            if d.W_skip is not None:
                written = written + x @ d.W_skip.T
            left = (y - written).float()
            error = left.square().mean()
            loss = error
            if d.threshold is not None:
                loss = loss + SPARSITY * rise * (active / plan.k - 1).square()
            asleep = self.idle > plan.inactive * plan.tokens
            if asleep.any():
                loss = loss + AUX * self._helped(pre, asleep, left.detach())
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            grad = d.W_dec.grad
            assert grad is not None
            grad -= (grad * d.W_dec).sum(1, keepdim=True) * d.W_dec  # what would change a norm
            self.optimizer.step()
            self.renorm()
            if d.threshold is not None:
                d.threshold.clamp_(min=0)
            self.idle = torch.where((a > 0).any(0), 0.0, self.idle + len(x))
        self.tokens += len(x)
        return float(error.detach())

    def _helped(self, pre: Tensor, asleep: Tensor, left: Tensor) -> Tensor:
        """Return how badly the strongest inactive features reconstruct what the others leave over."""
        count = min(max(1, self.dictionary.d_in // 2), int(asleep.sum()))
        best = pre.masked_fill(~asleep, -math.inf).topk(count, dim=-1)
        a = torch.zeros_like(pre).scatter(-1, best.indices, best.values.relu())
        return (left - a @ self.dictionary.W_dec).square().mean() / left.square().mean()

    def renorm(self) -> None:
        """Give every direction that is written unit norm."""
        self.dictionary.W_dec.div_(self.dictionary.W_dec.norm(dim=1, keepdim=True).clamp(min=1e-8))

    def run(self, blocks: Blocks, state: Path | None = None, on_progress: OnProgress | None = None) -> None:
        """Learn from blocks until the plan's tokens are used; write the state once a minute."""
        saved = time.perf_counter()
        while self.tokens < self.plan.tokens:
            x, y = self.scaled(*blocks(self.blocks))
            errors = []
            for at in range(0, len(x), self.plan.batch):
                if self.tokens < self.plan.tokens:
                    rows = slice(at, at + min(self.plan.batch, self.plan.tokens - self.tokens))
                    errors.append(self.step(x[rows], y[rows]))
                if on_progress is not None:
                    on_progress("training features", min(self.tokens, self.plan.tokens), self.plan.tokens)
            self.losses.append(sum(errors) / len(errors))
            self.blocks += 1
            if state is not None and time.perf_counter() - saved >= SAVE_EVERY:
                self.save(state)
                saved = time.perf_counter()

    @torch.no_grad()
    def folded(self) -> Dictionary:
        """Return the dictionary of raw activations, with its directions of unit norm."""
        d, s = self.dictionary, self.scaling
        unit = float(s["scale_out"].double().mean())  # features are in the unit of what is written
        k = self.plan.k if self.plan.activation == "topk" else None
        jump = self.plan.activation != "topk"
        raw = Dictionary(d.kind, d.reads, d.writes, d.d_in, d.d_out, d.n_features, k=k, jump=jump)
        raw.to(d.W_enc.device)
        weight = d.W_enc.double() / s["scale_in"].double()[:, None]
        raw.W_enc.copy_(weight * unit)
        raw.b_enc.copy_((d.b_enc.double() - s["mean_in"].double() @ weight) * unit)
        raw.W_dec.copy_(d.W_dec * s["scale_out"] / unit)
        bias = d.b_dec.double() * s["scale_out"].double() + s["mean_out"].double()
        if raw.W_skip is not None and d.W_skip is not None:
            skip = d.W_skip.double() * s["scale_out"].double()[:, None] / s["scale_in"].double()
            raw.W_skip.copy_(skip)
            bias = bias - skip @ s["mean_in"].double()
        raw.b_dec.copy_(bias)
        if raw.threshold is not None:
            cutoff = torch.full_like(d.b_enc, self.cutoff) if d.threshold is None else d.threshold
            raw.threshold.copy_(cutoff * unit)
        return raw.eval().requires_grad_(False)

    # A run that goes on -------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write all that a resumed run needs, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        values = {name: getattr(self, name) for name in ("tokens", "blocks", "cutoff", "losses", "idle")}
        state = {
            **values,
            "plan": asdict(self.plan),
            "taps": [list(self.dictionary.reads), list(self.dictionary.writes)],
            "scaling": self.scaling,
            "weights": self.dictionary.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        part = path.with_suffix(".part")
        torch.save(state, part)
        part.replace(path)

    @classmethod
    def resume(cls, path: Path, plan: FeaturePlan, device: torch.device) -> "Trainer":
        """Return the trainer that wrote a state, if it had the same plan."""
        state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
        theirs, ours = state["plan"], asdict(replace(plan))
        other = [name for name in ours if ours[name] != theirs.get(name)]
        refuse(
            other,
            f"{path.parent} holds an unfinished run with other settings "
            f"({', '.join(f'{name} {theirs.get(name)}, not {ours[name]}' for name in other)}): "
            "repeat those to go on, or choose another folder",
        )
        (reads, writes), weights = state["taps"], state["weights"]
        shape = (*weights["W_enc"].shape, weights["W_dec"].shape[1])
        dictionary = Dictionary(
            plan.kind, reads, writes, shape[0], shape[2], shape[1], jump="threshold" in weights
        )
        dictionary.load_state_dict(weights)
        trainer = cls(plan, dictionary.to(device), state["scaling"])
        trainer.optimizer.load_state_dict(state["optimizer"])
        for name in ("tokens", "blocks", "cutoff", "losses", "idle"):
            setattr(trainer, name, state[name])
        return trainer


def _kth_largest(x: Tensor, k: int) -> Tensor:
    """Return the k-th largest of [n] numbers."""
    if x.is_cuda:  # kthvalue would search one long row with one block of threads
        return x.topk(k, sorted=False).values.min()
    return x.kthvalue(len(x) - k + 1).values


def fit(
    blocks: Blocks,
    plan: FeaturePlan,
    reads: tuple[str, ...] = ("x",),
    writes: tuple[str, ...] | None = None,
    folder: Path | None = None,
    on_progress: OnProgress | None = None,
) -> tuple[Dictionary, Trainer]:
    """Train a dictionary on blocks of activations; a run that was stopped in `folder` goes on from there."""
    state = None if folder is None else folder / STATE
    x, y = blocks(0)
    if state is not None and state.is_file():
        trainer = Trainer.resume(state, plan, x.device)
    else:
        trainer = Trainer.begin(plan, reads, writes or reads, x, y)
    trainer.run(blocks, state, on_progress)
    return trainer.folded(), trainer


# Features of a model ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TrainedFeatures(Result):
    """A dictionary that was trained, and what it is worth on held-out text."""

    json_names = (
        "kind", "reads", "writes", "n_features", "tokens", "tokens_per_second", "report", "saved", "notes",
    )  # fmt: skip

    dictionary: Dictionary
    report: FeatureReport
    losses: tuple[float, ...]  # mean squared error by block, as a share of the variance
    tokens: int
    tokens_per_second: float  # of this session, streaming and learning together
    folder: Path | None
    notes: tuple[str, ...]

    kind = property(lambda self: self.dictionary.kind)
    reads = property(lambda self: self.dictionary.reads)
    writes = property(lambda self: self.dictionary.writes)
    n_features = property(lambda self: self.dictionary.n_features)
    saved = property(lambda self: self.folder and str(self.folder))


def train_features(
    m: AnyModel,
    data: Data,
    at: str,
    *,
    to: str | None = None,
    folder: str | Path | None = None,
    overwrite: bool = False,
    validation: Data | None = None,
    length: int | None = None,
    on_progress: OnProgress | None = None,
    **plan: Any,
) -> TrainedFeatures:
    """Train a sparse dictionary on the activations of a model.

    Args:
        m: the model, on the device where training is to be.
        data: files or folders, or texts; (source, target) pairs for a model with two stacks.
        at: an activation, or a part such as "blocks.3.feedforward": an autoencoder reads and writes its
            output, a transcoder reads its input. Of a crosscoder, a pattern such as "blocks.*.resid_post".
        to: what a transcoder writes, where that is not the output of the part.
        folder: where the dictionary is saved; a run that was stopped goes on from there, with the same bits.
        overwrite: replace a finished dictionary in that folder.
        validation: data to measure on; None: a twentieth of the rows is held out.
        length: tokens of a row; None: 128, or as many as the model reads.
        on_progress: told (stage, done, total).
        plan: fields of `FeaturePlan`: kind, activation, n_features, k, tokens, batch, lr, precision, seed...
    """
    m, folder = as_model(m), None if folder is None else Path(folder)
    known = [item.name for item in fields(FeaturePlan) if item.name != "data"]
    for name in plan:
        refuse_unknown("option of training features", name, known)
    stated = FeaturePlan(**plan)
    reads, writes = find_taps(m.config, at, stated.kind, to)
    unfinished = folder is not None and (folder / STATE).is_file()
    refuse(
        folder is not None and (folder / CONFIG).exists() and not unfinished and not overwrite,
        f"{folder} holds a dictionary already: choose another folder, or overwrite",
    )
    refuse_outside("length", 2 if length is None else length, 2, m.max_length)
    length = min(LENGTH, m.max_length) if length is None else length
    rows = read_rows(m, data, length)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(stated.seed)).tolist()
    held = 0 if validation is not None else max(1, min(len(rows) // 20, HELD_OUT // length))
    refuse(held >= len(rows), "the data has one row: give more, or validation data of its own")
    test = [rows[row] for row in order[:held]] or read_rows(m, validation or (), length)
    stream = Stream(m, [rows[row] for row in sorted(order[held:])], reads, writes, stated.seed)
    own = (stream.rows, reads, writes, length)
    stated = replace(stated, data=hashlib.sha256(repr(own).encode()).hexdigest()[:16])
    begun, start = time.perf_counter(), 0
    if unfinished and folder is not None:
        start = int(torch.load(folder / STATE, weights_only=True)["tokens"])
    dictionary, trainer = fit(stream.block, stated, reads, writes, folder, on_progress)
    seconds = time.perf_counter() - begun
    report = measure(m, dictionary, test)
    epochs = trainer.tokens / max(1, sum(len(row[stream.side]) - stream.first for row in stream.rows))
    notes = [
        *([f"went on from {start:,} tokens"] if start else []),
        f"{epochs:.1f} epochs of {len(stream.rows):,} rows; {len(test):,} rows held out",
        *(["the first token of every row is left out: attention rests there"] if stream.first else []),
    ]
    trained = TrainedFeatures(
        dictionary, report, tuple(trainer.losses), trainer.tokens, (trainer.tokens - start) / seconds, folder,
        tuple(notes),
    )  # fmt: skip
    if folder is not None:
        own_notes = {"plan": asdict(stated), "report": report.to_dict(), "losses": list(trained.losses)}
        dictionary.metadata = {
            "model_name": m.folder and m.folder.name,
            "context_size": length,
            "clearhead": own_notes,
        }
        dictionary.save(folder)
        (folder / STATE).unlink(missing_ok=True)
    return trained
