"""The equality matrix: every way to put the parts together, held against every way to run them.

family x positions x norm x norm position x key/value heads x feed-forward x window. One test per family,
positions and norm position; the table at the end of the run shows the largest difference that each check saw
in it. Each takes a quarter of the other choices, another one in each test, with every pair of them in it;
`CLEARHEAD_MATRIX=whole` takes them all, in about five minutes.
"""

from __future__ import annotations

import copy
import itertools
import os

import pytest
import torch

import clearhead as ch
from clearhead.inside.checks.rows import TOLERANCE
from tests.harness import T, V, build, chunks, gradients, in_pieces, pad, some_ids, through_bytes

POSITIONS = {
    "learned": {"positions": "learned"},
    "sinusoidal": {"positions": "sinusoidal"},
    "rope half": {"positions": "rope", "rope_layout": "half"},
    "rope interleaved": {"positions": "rope", "rope_layout": "interleaved"},
    "alibi": {"positions": "alibi"},
    "relative": {"positions": "relative", "relative_buckets": 8, "relative_max_distance": 6},
    "none": {"positions": "none"},
}
PLACES = {
    "pre": {"norm_position": "pre"},
    "post": {"norm_position": "post"},
    "sandwich": {"norm_position": "sandwich"},
    "parallel": {"norm_position": "pre", "parallel": True},
}
INNER = [
    {"norm": norm, "n_kv_heads": kv_heads, "gated": gated, "window": window}
    for norm, kv_heads, gated, window in itertools.product(
        ("layernorm", "rmsnorm"), (4, 2, 1), (False, True), (None, 3)
    )
]
WHOLE = os.environ.get("CLEARHEAD_MATRIX") == "whole"
GROUPS = [
    (family, positions, place)
    for family, positions, place in itertools.product(
        ("encoder", "decoder", "encoder-decoder"), POSITIONS, PLACES
    )
    if not (family == "encoder-decoder" and place == "parallel")  # no place for cross-attention
]
SOURCE = 6


@pytest.fixture(autouse=True)
def _products_that_users_get():
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(True)
    yield
    torch._C._set_mkldnn_enabled(before)


def quarter(family: str, positions: str, place: str) -> list[dict]:
    """The inner choices of one group: every pair of them; the other quarters are in its neighbours."""
    families = ("encoder", "decoder", "encoder-decoder")
    turn = families.index(family) + [*POSITIONS].index(positions) + [*PLACES].index(place)
    chosen = []
    for inner in INNER:
        norm, single, double = inner["norm"] == "rmsnorm", inner["n_kv_heads"] == 1, inner["n_kv_heads"] == 2
        gated = norm ^ double ^ bool(turn & 1)
        windowed = norm ^ single ^ bool(turn & 2)
        if (inner["gated"], inner["window"] is not None) == (gated, windowed):
            chosen.append(inner)
    return chosen


def test_the_quarters_have_every_pair_and_together_everything():
    """Every pair of inner choices in a group; every inner choice with each family, scheme and place."""
    everything, met = [tuple(inner.values()) for inner in INNER], set()
    for group in GROUPS:
        found = [tuple(inner.values()) for inner in quarter(*group)]
        for one, other in itertools.combinations(range(4), 2):
            pairs = {(inner[one], inner[other]) for inner in everything}
            assert {(inner[one], inner[other]) for inner in found} == pairs
        met |= {(outer, inner) for outer in group for inner in found}
    assert met == {(outer, inner) for group in GROUPS for outer in group for inner in everything}


class Case:
    """One configuration, its model and inputs, and the logits everything else is held against."""

    def __init__(self, differences, number: int, **choices) -> None:
        self.differences = differences
        if choices["family"] == "encoder-decoder":
            choices["n_encoder_layers"] = 1  # deeper encoders are tested as such
        self.model = build(seed=number, **choices)
        self.causal = self.model.config.decoder is not None
        self.both = self.causal and self.model.config.encoder is not None
        self.ids = some_ids(2, T, seed=number)
        self.source = {"source": some_ids(2, SOURCE, seed=number + 1)} if self.both else {}
        with torch.no_grad():
            self.logits = self.model(self.ids, **self.source).logits
        self.of_logits, self.of_gradients = self.rounded() if self.half else (0.0, 0.0)

    @property
    def half(self) -> bool:
        return self.logits.dtype.itemsize == 2

    def rounded(self) -> tuple[float, float]:
        """How far half precision itself takes logits and gradients from those of float32."""
        precise = copy.deepcopy(self.model).float()
        logits, learned = precise(self.ids, **self.source).logits, self.learn(precise)
        of_logits, of_gradients = [], []
        for kernel in ("eager", "fused"):
            with ch.attending(self.model, kernel):
                of_logits.append(self.model(self.ids, **self.source).logits.float() - logits)
                found = self.learn(self.model)
                of_gradients += [found[name].float() - learned[name] for name in learned]
        gaps = [max(float(gap.detach().abs().max()) for gap in some) for some in (of_logits, of_gradients)]
        return gaps[0], gaps[1]

    def equal(self, check: str, a: torch.Tensor, b: torch.Tensor) -> None:
        difference = self.differences.see(check, a, b)
        # In half precision a rounding is relative to the value, and norms of small values make it larger.
        largest = max(1.0, float(b.detach().abs().max())) if self.half else 1.0
        rounding = self.of_gradients if check == "gradients" else self.of_logits
        allowed = max(TOLERANCE[a.dtype] * largest, 3 * rounding)
        assert difference <= allowed, f"{check} differs by {difference:.1e} in {self.model.config.to_json()}"

    def backward(self) -> None:
        """Every parameter learns, on both kernels alike."""
        found = {}
        for kernel in ("eager", "fused"):
            with ch.attending(self.model, kernel):
                found[kernel] = self.learn(self.model)
                with torch.no_grad():
                    self.equal("fused=eager", self.model(self.ids, **self.source).logits, self.logits)
        for name, gradient in found["eager"].items():
            assert gradient is not None, f"{name} gets no gradient"
            assert gradient.isfinite().all(), f"the gradient of {name} is not finite"
            if not name.endswith("k.bias"):  # the softmax does not notice what is added to every key
                assert gradient.any(), f"the gradient of {name} is zero"
            self.equal("gradients", gradient, found["fused"][name])

    def learn(self, model: ch.Transformer) -> dict[str, torch.Tensor]:
        """The gradients of a loss as steep as a mean cross-entropy."""
        generator = torch.Generator().manual_seed(3)
        weights = torch.randn(2, T, V, generator=generator) / (2 * T * V**0.5)
        return gradients(model, (model(self.ids, **self.source).logits * weights).sum())

    def cached(self) -> None:
        """At every split point and in pieces of 1, 3 and 7, with every form of cache."""
        cache, kinds = ch.Cache(), self.model.main.spec.kinds
        self.equal("cached", self.model(self.ids, cache=cache, **self.source).logits, self.logits)
        for split in reversed(range(1, T)):
            if not any(kind.stateful for kind in kinds):
                cache.crop(split)
            else:  # a state does not step back
                cache = ch.Cache()
                self.model(self.ids[:, :split], cache=cache, **self.source)
            self.equal("cached", self.model(self.ids[:, split:], cache=cache).logits, self.logits[:, split:])
        for size in (1, 3, 7):
            self.through("cached", chunks(T, size), ch.Cache(reserve=T))
        if any(kind.reach is not None for kind in kinds):  # else it is the same as a growing cache
            for size in (1, 3, 7):
                self.through("windowed", chunks(T, size), ch.WindowCache())
        self.through("fixed", chunks(T, 3), ch.FixedCache(self.model.config, 2, T + 2))

    def through(self, check: str, sizes: list[int], cache: ch.Cache) -> None:
        self.equal(check, in_pieces(self.model, self.ids, sizes, cache, **self.source), self.logits)

    def padded(self) -> None:
        """Padding of random ids, before, after and between, in the source too."""
        for where in ("left", "right", "gaps"):
            ids, mask = pad(self.ids, where)
            given = dict(self.source)
            if self.both:
                given["source"], given["source_mask"] = pad(self.source["source"], where, seed=8)
            logits = self.model(ids, mask=mask, **given).logits
            self.equal("padded", logits[mask].view_as(self.logits), self.logits)

    def future(self) -> None:
        """No logit changes, bit for bit, when a later token does."""
        changed = self.ids.clone()
        changed[:, 5:] = (changed[:, 5:] + 1) % V
        logits = self.model(changed, **self.source).logits
        assert torch.equal(logits[:, :5], self.logits[:, :5])
        assert not torch.equal(logits[:, 5:], self.logits[:, 5:])

    def saved(self) -> None:
        """A model read back from its bytes says the same, bit for bit."""
        again = through_bytes(
            self.model, ch.Transformer(ch.ModelConfig.from_json(self.model.config.to_json()))
        )
        assert torch.equal(again(self.ids, **self.source).logits, self.logits)


@pytest.mark.ledger(
    "A4", "B2", "B3", "B4", "B5", "B6", "B7", "C2", "C4", "C5", "D1", "D2", "D3", "E1", "E2", "E3", "G2"
)
@pytest.mark.parametrize(
    ("family", "positions", "place"), GROUPS, ids=["-".join(group).replace(" ", "_") for group in GROUPS]
)
def test_matrix(family, positions, place, differences):
    chosen = INNER if WHOLE else quarter(family, positions, place)
    saved = GROUPS.index((family, positions, place)) % len(chosen)  # of each group one, each time another
    for number, inner in enumerate(chosen):
        case = Case(differences, number, family=family, **POSITIONS[positions], **PLACES[place], **inner)
        case.backward()
        with torch.no_grad():
            case.padded()
            if number == saved or WHOLE:
                case.saved()
            if case.causal:
                case.cached()
                case.future()


def test_the_matrix_can_fail():
    """Weights are so large that a forgotten mask or a wrong position is far outside the tolerance."""
    for family in ("encoder", "decoder"):
        model = build(family=family, positions="rope")
        ids, mask = pad(some_ids(), "left")
        with torch.no_grad():
            right, wrong = model(ids, mask=mask).logits[mask], model(ids).logits[mask]
            shifted = model(ids, mask=mask, positions=torch.arange(T + 3)[None] * 2).logits[mask]
        assert (right - wrong).abs().max() > 0.1
        assert (right - shifted).abs().max() > 0.1
