"""The equality suite: what must come out equal, on the user's own model and machine.

Each check computes one thing in two ways that must agree and reports the largest difference. Inputs are random but
seeded. A model in half precision is held to what its dtype can tell apart.

Shapes: B batch, T length.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.errors import InputError, MissingExtraError
from clearhead.generate.decode import greedy
from clearhead.loaded import Loaded, load
from clearhead.model.cache import Cache, FixedCache
from clearhead.model.norms import precise
from clearhead.model.transformer import Transformer, attending, evaluating
from clearhead.model.window_cache import WindowCache

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
REFERENCE_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Check:
    """One row of the suite."""

    name: str
    compared: str  # what with what, in words
    difference: float  # the largest, relative to the largest value where that is above 1
    tolerance: float
    seconds: float

    @property
    def passed(self) -> bool:
        """Is the difference within the tolerance? NaN is not."""
        return self.difference <= self.tolerance

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "passed": self.passed}


class Inputs:
    """Random inputs that fit a model: `rows` of them, up to `length` tokens long."""

    def __init__(self, model: Transformer, rows: int = 3, length: int = 12, seed: int = 0) -> None:
        self.model, self.rows, config = model, rows, model.config
        self.device = next(model.parameters()).device
        generator = torch.Generator().manual_seed(seed)
        table = config.max_positions if config.positions == "learned" else length
        self.length = min(length, table)

        def draw(kind: str, vocab: int, size: int) -> Tensor:
            if kind == "tokens":
                return torch.randint(vocab, (rows, size), generator=generator).to(self.device)
            dtype = next(model.parameters()).dtype
            shape = (rows, config.n_channels, *(config.image_size or ())) if kind == "patches" else (rows, size, config.d_input)
            return torch.randn(shape, generator=generator).to(self.device, dtype)

        plan = model.main.plan
        self.kind = plan.input
        self.main = draw(plan.input, plan.vocab_size, self.length)
        self.other = draw(plan.input, plan.vocab_size, self.length)  # for padding and for perturbing
        self.source: Tensor | None = None
        if model.encoder is not None and model.decoder is not None:
            self.source = draw(model.encoder.plan.input, model.encoder.plan.vocab_size, max(self.length - 2, 1))

    def run(self, main: Tensor | None = None, rows: slice = slice(None), **options: Any) -> Tensor:
        """The model's logits."""
        if self.source is not None:
            options.setdefault("source", self.source[rows])
        return self.model((self.main if main is None else main)[rows], **options).logits  # type: ignore[no-any-return]


def checks_for(model: Transformer) -> Iterator[tuple[str, str, Callable[[], float]]]:
    """Name, what is compared, and the comparison, for every check that fits this model."""
    inputs = Inputs(model)
    plan = model.main.plan
    per_token = model.config.head in ("lm", "mlm", "tagger", "span", "none")
    yield "fused = eager", "the fused attention kernel with the formula spelled out", lambda: _fused(inputs)
    yield "batched = alone", "each row of a batch with the row by itself", lambda: _batched(inputs)
    yield "repeated = once", "the same input twice: no dropout, nothing random", lambda: _gap(inputs.run(), inputs.run())
    if inputs.kind in ("tokens", "vectors"):
        for side in ("left", "right", "gaps"):
            yield (
                f"padded = unpadded ({side})",
                "real tokens with padding of random content among them",
                partial(_padded, inputs, side, per_token),
            )
    if plan.causal:
        yield "past = whole", "logits of the past when the future is another one", lambda: _causal(inputs, per_token)
        forms: dict[str, Callable[[], Cache]] = {
            "growing": Cache,
            "windowed": WindowCache,
            "fixed": lambda: FixedCache(model.config, inputs.rows, inputs.length, *_kind(model)),
        }
        if inputs.kind == "tokens" and model.config.head == "lm":
            for name, form in forms.items():
                for chunk in (1, 3):
                    what = f"{chunk} token{'s' * (chunk > 1)} at a time through the cache with one pass over all"
                    yield f"cached = recomputed ({name}, {chunk})", what, partial(_cached, inputs, form, chunk)
    yield "saved = loaded", "a copy written to disk and read back", lambda: _saved(inputs)


def check(m: Loaded | Transformer, reference: bool = False) -> list[Check]:
    """Run the suite. `reference` adds rows that compare with transformers, for a model loaded from its directory."""
    model = m.model if isinstance(m, Loaded) else m
    dtype = next(model.parameters()).dtype
    if dtype not in TOLERANCE:
        raise InputError(f"the suite has no tolerance for {dtype}: check the model in {', '.join(map(str, TOLERANCE))}")
    rows = []
    with torch.no_grad(), evaluating(model):
        for name, compared, run in checks_for(model):
            start = time.perf_counter()
            rows.append(Check(name, compared, run(), TOLERANCE[dtype], time.perf_counter() - start))
        if reference:
            rows += _reference(m)
    return rows


def _gap(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference; relative where values are above 1."""
    scale = max(1.0, float(theirs.abs().max()))
    return float((precise(ours) - precise(theirs)).abs().max()) / scale


def _kind(model: Transformer) -> tuple[torch.dtype, torch.device]:
    weight = next(model.parameters())
    return weight.dtype, weight.device


def _fused(inputs: Inputs) -> float:
    fused = inputs.run()
    with attending(inputs.model, "eager"):
        return _gap(fused, inputs.run())


def _batched(inputs: Inputs) -> float:
    together = inputs.run()
    return max(_gap(together[row : row + 1], inputs.run(rows=slice(row, row + 1))) for row in range(inputs.rows))


def _padded(inputs: Inputs, side: str, per_token: bool) -> float:
    plain = inputs.run()
    length, pad = inputs.length, 3
    slots = {
        "left": torch.arange(length) + pad,
        "right": torch.arange(length),
        "gaps": torch.arange(length) + torch.arange(length) * pad // length,
    }[side]
    mask = torch.zeros(inputs.rows, length + pad, dtype=torch.bool, device=inputs.device)
    mask[:, slots] = True
    padded = torch.cat([inputs.other, inputs.other[:, :pad]], dim=1)
    padded = torch.cat([padded, padded], dim=1)[:, : length + pad]
    padded[:, slots] = inputs.main
    out = inputs.run(padded, mask=mask)
    return _gap(out[:, slots] if per_token else out, plain)


def _causal(inputs: Inputs, per_token: bool) -> float:
    if not per_token or inputs.length < 2:
        return 0.0
    cut = inputs.length // 2
    changed = torch.cat([inputs.main[:, :cut], inputs.other[:, cut:]], dim=1)
    return _gap(inputs.run(changed)[:, :cut], inputs.run()[:, :cut])


def _cached(inputs: Inputs, form: Callable[[], Cache], chunk: int) -> float:
    cache = form()
    pieces = [inputs.run(piece, cache=cache) for piece in torch.split(inputs.main, chunk, dim=1)]
    return _gap(torch.cat(pieces, dim=1), inputs.run())


def _saved(inputs: Inputs) -> float:
    with tempfile.TemporaryDirectory() as folder:
        Loaded(inputs.model).save(Path(folder) / "copy")
        copy = load(Path(folder) / "copy").model.to(inputs.device)
        again = Inputs(copy, inputs.rows, inputs.length)
        return _gap(again.run(), inputs.run())


# Against transformers -------------------------------------------------------------------------------------------------


def _reference(m: Loaded | Transformer) -> list[Check]:
    """Logits and greedy tokens of the directory opened by transformers."""
    if not isinstance(m, Loaded) or m.folder is None:
        raise InputError("a comparison with transformers needs the directory: pass what ch.load gave, not a bare model")
    try:
        import transformers
    except ImportError:
        raise MissingExtraError("a comparison with transformers needs it: pip install transformers") from None
    assert m.description is not None
    names = m.description.theirs.get("architectures") or [None]
    kind = getattr(transformers, str(names[0]), None)
    if kind is None:
        raise InputError(f"transformers has no class {names[0]} to compare with: this model is clearhead's own")
    transformers.logging.set_verbosity_error()
    peer = kind.from_pretrained(m.folder, attn_implementation="eager", dtype=torch.float32).eval()
    model = load(m.folder, dtype=torch.float32).model
    inputs = Inputs(model, length=40)
    start = time.perf_counter()
    if inputs.source is not None:
        theirs = peer(input_ids=inputs.source, decoder_input_ids=inputs.main)
    elif inputs.kind == "patches":
        theirs = peer(pixel_values=inputs.main)
    else:
        theirs = peer(input_ids=inputs.main)
    out = model(inputs.main, source=inputs.source) if inputs.source is not None else model(inputs.main)
    if "logits" in theirs:
        what, gap = "largest difference of a logit", float((out.logits - theirs.logits).abs().max())
    elif "start_logits" in theirs:
        both = torch.stack([theirs.start_logits, theirs.end_logits], dim=-1)
        what, gap = "largest difference of a logit", float((out.logits - both).abs().max())
    else:
        what, gap = "largest difference of a hidden state", float((out.hidden - theirs.last_hidden_state).abs().max())
    rows = [Check("clearhead = transformers", what, gap, REFERENCE_TOLERANCE, time.perf_counter() - start)]
    if model.config.head == "lm":
        rows.append(_greedy_agreement(model, peer, inputs))
    return rows


def _greedy_agreement(model: Transformer, peer: Any, inputs: Inputs, tokens: int = 50) -> Check:
    start = time.perf_counter()
    room = model.config.max_positions - 4 if model.config.positions == "learned" else tokens
    tokens = max(1, min(tokens, room))
    options = {"max_new_tokens": tokens, "do_sample": False, "num_beams": 1, "eos_token_id": None, "pad_token_id": 0}
    if inputs.source is not None:
        begin = inputs.main[:1, :1]
        options |= {"forced_bos_token_id": None, "forced_eos_token_id": None}
        said = peer.generate(input_ids=inputs.source[:1], decoder_input_ids=begin, **options)[:, 1:]
        ours = greedy(model, begin, tokens, source=inputs.source[:1])
    else:
        prompt = inputs.main[:1, :4]
        said = peer.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **options)[:, 4:]
        ours = greedy(model, prompt, tokens)
    wrong = int((ours[:, : said.shape[1]] != said).sum())
    return Check(
        "greedy tokens = transformers", f"of {said.shape[1]} greedy tokens, how many differ", float(wrong), 0.0, time.perf_counter() - start
    )
