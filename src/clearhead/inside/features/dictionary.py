"""A sparse dictionary: activations as a sum of a few of many features, each a direction.

    dictionary = load("features/")
    a = dictionary.encode(x)                             # [..., n_features], almost all zero
    y = dictionary(x)                                    # decode(a), and x through the skip, where it has one
    with ch.edit(m, dictionary.steer(17, 4.0)):          # also .ablate(17, 98), .clamp({17: 0.0})
        m.generate("Once upon")

    autoencoder       reads an activation and writes the same one
    transcoder        reads the input of a feed-forward and writes its output
    skip transcoder   a transcoder with a linear map from input to output next to the features
    crosscoder        reads and writes the activations of several layers, joined, with the same features

Weights act on raw activations: what training subtracted and divided by is folded into them. On disk they are
SAELens's cfg.json and sae_weights.safetensors.

Shapes: N features, D of what is read (all taps joined), O of what is written.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from clearhead.core.config import ModelConfig
from clearhead.core.dtypes import precise
from clearhead.errors import CheckpointError, InputError, refuse, refuse_unknown
from clearhead.variants.contexts import matching, tap_names

Kind = Literal["autoencoder", "transcoder", "skip-transcoder", "crosscoder"]
KINDS = get_args(Kind)
CONFIG, WEIGHTS = "cfg.json", "sae_weights.safetensors"
SAELENS = "6.0.0"  # from this version on, its cfg.json has this layout
# The tail of a tap's name, and what TransformerLens calls it, which SAELens's metadata names.
HOOKS = {
    "resid_pre": "hook_resid_pre",
    "resid_mid": "hook_resid_mid",
    "resid_post": "hook_resid_post",
    "attention.out": "hook_attn_out",
    "feedforward.in": "mlp.hook_in",
    "feedforward.post": "mlp.hook_post",
    "feedforward.out": "hook_mlp_out",
}
WHOLE = ("embedding", "hidden", "feedforward.pre", "cross.out", *HOOKS)  # taps [B, T, D] of every token
Name = int | str  # of a feature: 17, "17", or as a graph names it, "3.17" and "feature 3.17@5"
Changes = dict[str, Callable[[Tensor], Tensor | None]]  # what `ch.edit` takes


def find_taps(
    config: ModelConfig, at: str, kind: Kind = "autoencoder", out: str | None = None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the activations that a dictionary reads, and those that it writes.

    `at` is an activation, or a part such as "blocks.3.feedforward"; of a crosscoder, a pattern such as
    "blocks.*.resid_post". `out` is for a transcoder that does not write what its part does.
    """
    refuse_unknown("kind", kind, KINDS)
    coder, names = kind.endswith("transcoder"), tap_names(config)
    refuse(out is not None and not coder, f"out is for transcoders: {'an' if kind[0] == 'a' else 'a'} {kind} "
           "writes what it reads")  # fmt: skip
    part = f"{at}.out" in names or ("*" in at and not at.endswith(WHOLE))
    reads = matching(config, f"{at}.{'in' if coder else 'out'}" if part else at)
    end = out or (f"{at.removesuffix('.in')}.out" if coder and (part or at.endswith(".in")) else at)
    refuse(coder and end == at, f'a transcoder reads one activation and writes another: "{at}" needs `out`, '
           "or name a part, such as blocks.3.feedforward")  # fmt: skip
    writes = matching(config, end) if coder else reads
    for tap in (*reads, *writes):
        fits = tap.endswith(WHOLE) and ".experts." not in tap
        refuse(not fits, f"a dictionary cannot be of {tap}: it needs one vector for every token: "
               f"{', '.join(WHOLE)}")  # fmt: skip
    several = max(len(reads), len(writes)) > 1
    refuse(kind == "crosscoder" and not several, f'"{at}" is one activation, and a crosscoder is of several: '
           "ask for blocks.*.resid_post, or for an autoencoder")  # fmt: skip
    refuse(kind != "crosscoder" and several, f'"{at}" is {len(reads)} activations, and one {kind} is of one: '
           "name one, or ask for a crosscoder")  # fmt: skip
    return tuple(reads), tuple(writes)


class Dictionary(nn.Module):
    """Features of one or more activations of a model; see the module's docstring."""

    W_enc: nn.Parameter  # D N
    b_enc: nn.Parameter  # N
    W_dec: nn.Parameter  # N O
    b_dec: nn.Parameter  # O
    W_skip: nn.Parameter | None  # O D
    threshold: nn.Parameter | None  # N; JumpReLU: a smaller activation is zero

    def __init__(
        self,
        kind: Kind,
        reads: Sequence[str],
        writes: Sequence[str],
        d_in: int,
        d_out: int,
        n_features: int,
        *,
        k: int | None = None,
        jump: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Make a dictionary of zeros: TopK with `k`, JumpReLU with `jump`, else ReLU."""
        super().__init__()
        self.kind, self.reads, self.writes, self.k = kind, tuple(reads), tuple(writes), k
        self.d_in, self.d_out, self.n_features = d_in, d_out, n_features
        self.metadata: dict[str, Any] = {}  # what else cfg.json says
        zeros = partial(torch.zeros, dtype=dtype)
        self.W_enc, self.b_enc = nn.Parameter(zeros(d_in, n_features)), nn.Parameter(zeros(n_features))
        self.W_dec, self.b_dec = nn.Parameter(zeros(n_features, d_out)), nn.Parameter(zeros(d_out))
        self.W_skip = nn.Parameter(zeros(d_out, d_in)) if kind == "skip-transcoder" else None
        self.threshold = nn.Parameter(zeros(n_features)) if jump else None

    @property
    def at(self) -> str:
        """The activation that it reads; of a crosscoder, the first."""
        return self.reads[0]

    @property
    def out(self) -> str:
        """The activation that it writes: of an autoencoder, the one that it reads."""
        return self.writes[0]

    @property
    def activation(self) -> Literal["topk", "jumprelu", "relu"]:
        """How features become sparse."""
        return "topk" if self.k is not None else "relu" if self.threshold is None else "jumprelu"

    # Forward ------------------------------------------------------------------------------------------------

    def pre(self, x: Tensor) -> Tensor:
        """Return the features before the activation function: [..., D] -> [..., N]."""
        refuse(
            x.shape[-1] != self.d_in,
            f"the dictionary of {self.at} reads {self.d_in} dimensions, and this model gives {x.shape[-1]}: "
            "it was trained on another model",
        )
        return x.to(self.W_enc.dtype) @ self.W_enc + self.b_enc

    def encode(self, x: Tensor) -> Tensor:
        """Return the features of raw activations: [..., D] -> [..., N]."""
        pre = self.pre(x)
        a = pre.relu()
        if self.k is not None:
            best = a.topk(min(self.k, self.n_features), dim=-1)
            return torch.zeros_like(a).scatter(-1, best.indices, best.values)
        return a if self.threshold is None else a * (pre > self.threshold)

    def decode(self, a: Tensor) -> Tensor:
        """Return the sum of the features' directions, and the bias: [..., N] -> [..., O]."""
        return a @ self.W_dec + self.b_dec

    def forward(self, x: Tensor) -> Tensor:
        """Return the reconstruction: [..., D] -> [..., O]."""
        y = self.decode(self.encode(x))
        return y if self.W_skip is None else y + x.to(y.dtype) @ self.W_skip.T

    def error(self, x: Tensor, y: Tensor) -> Tensor:
        """Return what the reconstruction of y leaves over, in float64: added to it there, it gives y."""
        return precise(y) - precise(self(x))

    # In a model ---------------------------------------------------------------------------------------------

    def joined(self, seen: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return what it reads and what it is to write of a recording, with all taps joined."""
        x = torch.cat([seen[tap] for tap in self.reads], -1)
        return x, x if self.writes == self.reads else torch.cat([seen[tap] for tap in self.writes], -1)

    def parts(self, y: Tensor) -> dict[str, Tensor]:
        """Split something of the size that it writes by activation: [..., O]."""
        return dict(zip(self.writes, torch.split(y, self.d_out // len(self.writes), -1)))

    def steer(self, feature: Name, strength: float) -> Changes:
        """Return an edit that adds `strength` times a feature's direction at every token."""
        added = self.parts(strength * self.W_dec[self._find(feature)].detach())
        return {tap: partial(_add, delta=delta) for tap, delta in added.items()}

    def ablate(self, *features: Name) -> Changes:
        """Return an edit that takes features out, where they are active."""
        return self.clamp({self._find(feature): 0.0 for feature in features})

    def clamp(self, values: Mapping[int, float] | Mapping[str, float]) -> Changes:
        """Return an edit that sets features to a value at every token; what is no feature stays as it was."""
        chosen = [self._find(feature) for feature in values]
        wanted = torch.tensor(list(values.values()))

        def change(a: Tensor) -> Tensor:
            """Return the change of the chosen features."""
            return wanted.to(a) - a[..., chosen]

        return self.changing(change, chosen)

    def changing(self, change: Callable[[Tensor], Tensor], features: Sequence[int]) -> Changes:
        """Return an edit that adds to features what `change` says of all: [B, T, N] -> [B, T, features].

        The reconstruction is not put in the place of the activation: only its change is added. So the error
        is kept, and an activation whose features do not change stays as it is, to the bit.
        """
        refuse(
            len(self.reads) > 1,
            "a crosscoder knows its features only after the last of its layers: it can steer, "
            "but not ablate or clamp within one pass",
        )
        read: list[Tensor] = []

        def take(x: Tensor) -> None:
            read[:] = [x]

        def put(y: Tensor) -> Tensor:
            with torch.no_grad():
                a = self.encode(read[0] if self.at != self.out else y)
                return _add(y, change(a) @ self.W_dec[list(features)])

        return {self.out: put} if self.at == self.out else {self.at: take, self.out: put}

    def _find(self, feature: Name) -> int:
        """Return the number of a feature, by its number or a name, if there is one."""
        layer, _, number = str(feature).removeprefix("feature ").partition("@")[0].rpartition(".")
        layers = {tap.replace("blocks.", "").removesuffix(".out").rpartition(".")[0] for tap in self.writes}
        known = number.isdecimal() and int(number) < self.n_features and layer in {"", *layers}
        refuse(not known, f"there is no feature {feature}: they are 0 to {self.n_features - 1} of {self.out}")
        return int(number)

    # On disk ------------------------------------------------------------------------------------------------

    @property
    def architecture(self) -> str:
        """What SAELens calls it; of TopK, SAELens has no transcoder, and the name is clearhead's own."""
        if self.kind in ("autoencoder", "crosscoder"):
            return {"relu": "standard"}.get(self.activation, self.activation)
        skip = "skip_" if self.W_skip is not None else ""
        return f"{'' if self.activation == 'relu' else self.activation + '_'}{skip}transcoder"

    def save(self, folder: str | Path) -> None:
        """Write SAELens's cfg.json and sae_weights.safetensors."""
        from safetensors.torch import save_file

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config: dict[str, Any] = {
            "architecture": self.architecture,
            "d_in": self.d_in,
            "d_sae": self.n_features,
            "dtype": str(self.W_enc.dtype).removeprefix("torch."),
            "device": "cpu",
            "apply_b_dec_to_input": False,
            "normalize_activations": "none",
            "reshape_activations": "none",
        }
        if self.k is not None:
            config |= {"k": self.k, "rescale_acts_by_decoder_norm": False}
        if self.kind.endswith("transcoder"):
            config["d_out"] = self.d_out
        taps = {"kind": self.kind, "reads": self.reads, "writes": self.writes}
        config["metadata"] = {
            "sae_lens_version": SAELENS,
            **self.metadata,
            "hook_name": _hook(self.at),
            **({"hook_name_out": _hook(self.out)} if self.at != self.out else {}),
            "clearhead": {**self.metadata.get("clearhead", {}), **taps},
        }
        tensors = {name: weight.detach().cpu().contiguous() for name, weight in self.state_dict().items()}
        save_file(tensors, folder / WEIGHTS)
        (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def load(folder: str | Path, device: str | torch.device = "cpu") -> Dictionary:
    """Return the dictionary of a folder that clearhead or SAELens wrote."""
    from safetensors.torch import load_file

    folder = Path(folder)
    refuse(
        not (folder / CONFIG).is_file() or not (folder / WEIGHTS).is_file(),
        f"{folder} holds no dictionary: it needs {CONFIG} and {WEIGHTS}; clearhead features train makes one",
    )
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(folder / WEIGHTS, device=str(device))
        return _built(config, tensors)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, InputError):
            raise
        raise CheckpointError(f"{folder} cannot be read as a dictionary: {error}") from None


def _built(config: dict[str, Any], tensors: dict[str, Tensor]) -> Dictionary:
    """Return a dictionary from SAELens's config and weights, with its options folded into the weights."""
    architecture, metadata = config["architecture"], dict(config.get("metadata") or {})
    own = metadata.get("clearhead", {})
    norm, shape = config.get("normalize_activations", "none"), config.get("reshape_activations", "none")
    refuse(norm != "none", f"its normalize_activations is {norm}, which depends on each input: "
           "fold it into the weights with SAELens first", CheckpointError)  # fmt: skip
    refuse(shape != "none", f"its reshape_activations is {shape}: dictionaries of heads are not read",
           CheckpointError)  # fmt: skip
    base = architecture.replace("skip_transcoder", "transcoder")
    sparse = {"standard": "relu", "transcoder": "relu"}.get(base, base.removesuffix("_transcoder"))
    refuse_unknown("architecture", sparse, ("relu", "topk", "jumprelu"))
    kind: Kind = own.get("kind") or (
        "autoencoder" if base == sparse or base == "standard"
        else "skip-transcoder" if base != architecture else "transcoder"
    )  # fmt: skip
    reads = own.get("reads") or [_tap(metadata.get("hook_name"))]
    writes = own.get("writes") or ([_tap(metadata.get("hook_name_out"))] if "coder" in base else reads)
    n, d_in, d_out = config["d_sae"], config["d_in"], config.get("d_out", config["d_in"])
    tensors = dict(tensors)
    if config.get("rescale_acts_by_decoder_norm"):
        norms = tensors["W_dec"].norm(dim=-1)
        tensors |= {"W_dec": tensors["W_dec"] / norms[:, None], "W_enc": tensors["W_enc"] * norms}
        tensors["b_enc"] = tensors["b_enc"] * norms
    if config.get("apply_b_dec_to_input"):
        tensors["b_enc"] = tensors["b_enc"] - tensors["b_dec"] @ tensors["W_enc"]
    dictionary = Dictionary(
        kind, reads, writes, d_in, d_out, n, k=config["k"] if sparse == "topk" else None,
        jump=sparse == "jumprelu", dtype=tensors["W_enc"].dtype,
    ).to(tensors["W_enc"].device)  # fmt: skip
    dictionary.load_state_dict(tensors)
    dictionary.metadata = metadata
    return dictionary.eval().requires_grad_(False)


def _hook(tap: str) -> str:
    """Return TransformerLens's name of an activation, else ours."""
    block, _, tail = tap.removeprefix("blocks.").partition(".")
    return f"blocks.{block}.{HOOKS[tail]}" if tap.startswith("blocks.") and tail in HOOKS else tap


def _tap(hook: str | None) -> str:
    """Return our name of an activation from TransformerLens's, or the name as it is."""
    number, _, tail = (hook or "").removeprefix("blocks.").partition(".")
    ours = {name: tap for tap, name in HOOKS.items()}
    return f"blocks.{number}.{ours[tail]}" if tail in ours else hook or ""


def _add(x: Tensor, delta: Tensor) -> Tensor:
    return x + delta.to(x)
