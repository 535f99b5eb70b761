"""One harness per kind of part. A name added to a registry is tested here without another line."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as nnf
from torch import nn

import clearhead as ch
from clearhead.core.attention import KERNELS, eager
from clearhead.core.embedding import FRONTS
from clearhead.core.feedforward import ACTIVATIONS, FeedForward
from clearhead.core.heads import HEADS
from clearhead.core.norms import NORMS
from clearhead.core.positions import POSITIONS
from clearhead.variants.routing import Experts
from tests.harness import (
    V,
    build,
    config,
    differing,
    every_dtype_kept,
    scramble,
    some_ids,
    through_bytes,
    worst,
)

TOLERANCE = 1e-5


def gradcheck(module: nn.Module, run, *inputs: torch.Tensor) -> None:
    """Analytic against numeric gradients in float64, of the inputs and of every parameter."""
    module.double().eval()
    names = [name for name, _ in module.named_parameters()]
    values = [x.detach().clone().requires_grad_() for _, x in module.named_parameters()]
    given = [x.double().requires_grad_() for x in inputs]

    def call(*tensors):
        xs, weights = tensors[: len(given)], dict(zip(names, tensors[len(given) :]))
        with torch.nn.utils.stateless._reparametrize_module(module, weights, tie_weights=True):
            return run(*xs)

    assert torch.autograd.gradcheck(call, (*given, *values), fast_mode=True, atol=1e-6)


def compiled_equals(model: nn.Module, *inputs, **given) -> None:
    """The model through torch.compile says what it says without."""
    torch._dynamo.reset()
    with torch.no_grad():
        ours, theirs = model(*inputs, **given), torch.compile(model, backend="aot_eager")(*inputs, **given)
    if isinstance(ours, ch.Output):
        ours, theirs = ours.logits, theirs.logits
    assert worst(theirs, ours) <= TOLERANCE


# Norms ------------------------------------------------------------------------------------------------------

NORM_REFERENCES = {
    "layernorm": lambda x: (
        (x - x.mean(-1, keepdim=True)) / x.var(-1, keepdim=True, unbiased=False).add(1e-5).sqrt()
    )
}
NORM_REFERENCES["rmsnorm"] = lambda x: x / x.square().mean(-1, keepdim=True).add(1e-5).sqrt()


@pytest.mark.ledger("D2")
@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("name", list(NORMS))
def test_norm(name, unit_offset):
    def make() -> nn.Module:
        return scramble(NORMS[name](12, 1e-5, name == "layernorm", unit_offset))

    norm, x = make(), torch.randn(3, 5, 12) * 4 + 1
    expected = NORM_REFERENCES[name](x.double()) * (norm.weight.double() + unit_offset)
    expected = expected + norm.bias.double() if getattr(norm, "bias", None) is not None else expected
    assert worst(norm(x).double(), expected) <= TOLERANCE
    fresh = NORMS[name](12, 1e-5, name == "layernorm", unit_offset)
    # A new norm scales by one.
    assert worst(fresh(x).double(), NORM_REFERENCES[name](x.double())) <= TOLERANCE
    module = make()
    gradcheck(module, module, x[:1, :2])
    every_dtype_kept(norm, norm, x)
    assert torch.equal(
        through_bytes(make(), NORMS[name](12, 1e-5, name == "layernorm", unit_offset))(x), make()(x)
    )
    compiled_equals(make(), x)


@pytest.mark.ledger("D2")
@pytest.mark.parametrize("name", list(NORMS))
@pytest.mark.cpu
def test_norm_statistics_are_float32_in_bfloat16(name):
    """Where bfloat16 sums are off by several per cent, the answer is float64's, rounded once or twice."""
    norm = NORMS[name](4096, 1e-5, name == "layernorm", False).bfloat16()
    x = (torch.randn(4, 4096) + 3).bfloat16()
    expected = NORM_REFERENCES[name](x.double())
    assert ((norm(x).double() - expected).abs() <= 2**-8 * expected.abs() + 1e-6).all()
    with torch.autocast("cpu", torch.bfloat16):
        wide = NORMS[name](4096, 1e-5, name == "layernorm", False)(x)
    assert ((wide.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-6).all()


# Positions --------------------------------------------------------------------------------------------------


@pytest.mark.ledger("B2", "B3", "B4", "B5", "B6", "B7")
@pytest.mark.parametrize(
    ("name", "family"),
    [
        (name, family)
        for name in POSITIONS
        for family in ("decoder", "encoder", "encoder-decoder")
        if name != "axes"
        and (name != "disentangled" or family == "encoder")  # the others are refused by name
    ],
)
def test_positions(name, family):
    shape = {"family": family, "positions": name, "d_model": 8, "n_heads": 2, "d_ff": 8, "n_layers": 1}
    shape |= {"tie_embeddings": False, "share_embeddings": False}  # gradcheck moves one tensor at a time
    model, ids = build(**shape), some_ids(2, 8)
    given = {"source": some_ids(2, 5)} if family == "encoder-decoder" else {}
    assert model(ids, **given).logits.shape == (2, 8, V)
    assert not differing(model, ids, **given)
    if family == "decoder":
        compiled_equals(model, ids)
    for dtype in (torch.bfloat16, torch.float64):
        assert model.to(dtype)(ids, **given).logits.dtype == dtype
    gradcheck(model, lambda: model(ids[:1, :4], **{key: x[:1] for key, x in given.items()}).logits)


# Activations ------------------------------------------------------------------------------------------------

ACTIVATION_REFERENCES = {
    "relu": lambda x: x.clamp(min=0),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5)),
    "gelu_tanh": lambda x: x * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + (-x).exp()),
    "quick_gelu": lambda x: x / (1 + (-1.702 * x).exp()),
    "relu2": lambda x: x.clamp(min=0) ** 2,
}


@pytest.mark.ledger("D1")
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_activation(name, gated):
    shape = config(activation=name, gated=gated, d_model=8)
    part, x = scramble(FeedForward(shape.replace(d_ff=10).main)), torch.randn(2, 3, 8)
    up, down = part.up, part.down
    bent = ACTIVATION_REFERENCES[name]((part.gate if gated else up)(x))
    assert worst(part(x), down(bent * up(x) if gated else bent)) <= 1e-6
    gradcheck(scramble(module := FeedForward(shape.replace(d_ff=10).main)), module, x)
    every_dtype_kept(part, part, x)
    assert not differing(build(activation=name, gated=gated, n_layers=1), some_ids())
    compiled_equals(scramble(FeedForward(shape.replace(d_ff=10).main)), x)


# Kernels ----------------------------------------------------------------------------------------------------


@pytest.mark.ledger("C1", "C5")
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("name", list(KERNELS))
def test_kernel(name, kv_heads):
    attend = KERNELS[name]
    q, k, v = torch.randn(2, 4, 3, 4), torch.randn(2, kv_heads, 5, 4), torch.randn(2, kv_heads, 5, 6)
    mask = torch.rand(2, 1, 3, 5) > 0.3
    mask[1, 0, 1] = False
    assert attend(q, k, v, mask).shape == (2, 4, 3, 6)
    given = [x.double().requires_grad_() for x in (q, k, v, torch.randn(1, 4, 3, 5))]
    for choices in ({"causal": True}, {"mask": mask, "scale": 0.3}, {"mask": mask, "softcap": 1.5}):
        call = lambda q, k, v, b, choices=choices: attend(q, k, v, bias=b, **choices)  # noqa: E731
        assert torch.autograd.gradcheck(call, given, fast_mode=True)
    assert attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), mask).dtype == torch.bfloat16
    torch._dynamo.reset()
    assert worst(torch.compile(attend, backend="aot_eager")(q, k, v, mask), attend(q, k, v, mask)) <= 1e-6
    model, ids = build(n_kv_heads=kv_heads), some_ids()
    with ch.attending(model, name):
        assert differing(model, ids).keys() <= {"saved"}  # whose copy attends by the usual kernel


@pytest.mark.ledger("C5")
def test_kernels_by_name():
    model = build()
    with (
        pytest.raises(ch.InputError, match='"flash": choose from eager, fused'),
        ch.attending(model, "flash"),
    ):
        pass
    with pytest.raises(ch.InputError), ch.attending(model, "eager"):  # put back even when the forward fails
        model(torch.full((1, 1), V))
    assert {block.attention.kernel for block in model.decoder.blocks} == {"fused"}


# Heads ------------------------------------------------------------------------------------------------------

HEAD_SHAPES = {"lm": (2, 8, V), "mlm": (2, 8, V), "tagger": (2, 8, 5), "span": (2, 8, 2)}
HEAD_SHAPES |= {"classifier": (2, 5), "embedding": (2, 16), "none": (2, 8, 16)}


@pytest.mark.ledger("E1", "E2")
@pytest.mark.parametrize("family", ["encoder", "decoder"])
@pytest.mark.parametrize("name", list(HEADS))
def test_head(name, family):
    if name == "mlm" and family == "decoder":
        with pytest.raises(ch.ConfigError, match="head mlm"):
            config(family=family, head=name)
        return
    shape = {"family": family, "head": name, "n_classes": 5, "n_layers": 1}
    model, ids = build(**shape), some_ids()
    said = model(ids).logits
    assert said.shape == HEAD_SHAPES.get(name, said.shape)
    assert not differing(model, ids, cached=said.ndim == 3)
    head, hidden = build(**shape).head, torch.randn(1, 3, 16)
    real = torch.tensor([[True, True, False]])
    compiled_equals(head, hidden, real)
    gradcheck(head, lambda x: head(x, real), hidden)
    every_dtype_kept(lambda x: head(x, real), head, hidden)


# Fronts -----------------------------------------------------------------------------------------------------

INPUTS = {
    "tokens": some_ids(),
    "patches": torch.randn(2, 3, 8, 12),
    "vectors": torch.randn(2, 8, 5),
    "frames": torch.randn(2, 9, 5),
}
LENGTHS = {"tokens": 8, "patches": 6, "vectors": 8, "frames": 5}


@pytest.mark.ledger("E4", "E6")
@pytest.mark.parametrize("head", ["classifier", "tagger"])
@pytest.mark.parametrize("name", list(FRONTS))
@pytest.mark.cpu
def test_front(name, head):
    shape = {"family": "encoder", "n_layers": 1, "input": name, "head": head, "n_classes": 5}
    shape |= {"image_size": (8, 12), "patch_size": 4, "d_input": 5}
    model, x = build(**shape), INPUTS[name]
    with torch.no_grad():
        said = model(x).logits
        assert said.shape == ((2, 5) if head == "classifier" else (2, LENGTHS[name], 5))
        assert torch.equal(through_bytes(model, ch.Transformer(model.config))(x).logits, said)
    front = build(**shape).encoder.embedding.front
    if head == "tagger":
        compiled_equals(front, x)
    if x.is_floating_point():
        gradcheck(front, front, x[:1])
        every_dtype_kept(front, front, x)
    else:
        gradcheck(front, lambda: front(x))
        assert front.bfloat16()(x).dtype == torch.bfloat16
    if name != "patches":
        mask = torch.ones(x.shape[:2], dtype=torch.bool)
        noise = some_ids(2, 3, seed=6) if name == "tokens" else torch.randn(2, 3, 5)
        padded, mask = torch.cat([x, noise], 1), torch.cat([mask, torch.zeros(2, 3, dtype=torch.bool)], 1)
        again = model(padded, mask=mask).logits
        assert worst(again if head == "classifier" else again[:, : LENGTHS[name]], said) <= TOLERANCE


# Experts ----------------------------------------------------------------------------------------------------


def experts_by_loops(part: Experts, x: torch.Tensor, order: str, renormalise: bool) -> torch.Tensor:
    """One token at a time."""
    out = torch.zeros_like(x)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            logits = part.router(x[b, t])
            best = sorted(range(len(part.experts)), key=lambda e: -logits[e].item())[: part.n_active]
            weights = logits[best].softmax(0) if order == "topk_softmax" else logits.softmax(0)[best]
            if order == "softmax_topk" and renormalise:
                weights = weights / weights.sum()
            for weight, expert in zip(weights, best):
                out[b, t] += weight * part.experts[expert](x[b, t])
    return out


@pytest.mark.ledger("D5")
@pytest.mark.parametrize("active", [1, 2, 5])
@pytest.mark.parametrize(
    ("order", "renormalise"), [("topk_softmax", True), ("softmax_topk", True), ("softmax_topk", False)]
)
def test_experts_equal_a_loop_over_tokens(order, renormalise, active):
    shape = config(
        n_experts=5, n_active_experts=active, router_order=order, router_renormalise=renormalise, gated=True
    )
    part, x = scramble(Experts(shape.replace(d_ff=8).main)).eval(), torch.randn(2, 7, 16)
    with torch.no_grad():
        assert worst(part(x), experts_by_loops(part, x, order, renormalise)) <= 1e-6
    module = scramble(Experts(shape.replace(d_model=4, n_heads=2, d_ff=5).main))
    gradcheck(module, module, torch.randn(1, 4, 4))
    every_dtype_kept(part, part, x)


@pytest.mark.ledger("D5")
def test_no_token_is_dropped_when_all_want_one_expert():
    part, x = (
        scramble(Experts(config(n_experts=4, n_active_experts=1, d_ff=8).main)),
        torch.rand(3, 50, 16) + 0.1,
    )
    part.router.weight.data.zero_()
    part.router.weight.data[2] = 1.0
    assert worst(part(x), part.experts[2](x)) <= 1e-6
    grads = torch.autograd.grad(part(x).sum(), list(part.experts.parameters()))
    assert all(gradient.isfinite().all() for gradient in grads)  # experts that got no token too


# Compiled for real ------------------------------------------------------------------------------------------


@pytest.mark.ledger("G2")
def test_a_compiled_step_with_a_fixed_cache():
    """Compile the step of generation: same buffers, same answers, no compilation after the first steps."""
    model, ids = build(positions="rope", n_kv_heads=2), some_ids(2, 8)
    cache = ch.FixedCache(model.config, 2, 8)
    torch._dynamo.reset()
    step = torch.compile(lambda token: model(token, cache=cache).logits, backend="aot_eager")
    with torch.no_grad():
        whole = model(ids).logits
        said = [step(ids[:, t : t + 1]) for t in range(3)]
        with torch.compiler.set_stance("fail_on_recompile"):
            said += [step(ids[:, t : t + 1]) for t in range(3, 8)]
    assert worst(torch.cat(said, dim=1), whole) <= TOLERANCE


@pytest.mark.ledger("K1")
def test_taps_work_in_a_compiled_model():
    model, ids = build(positions="rope", n_layers=1), some_ids()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(ids)
        with ch.record(model, "blocks.0.attention.pattern") as seen:
            compiled(ids)
        with ch.record(model, "blocks.0.attention.pattern") as expected:
            model(ids)
        with ch.edit(model, {"blocks.0.attention.z": torch.zeros_like}):
            assert worst(compiled(ids).logits, model(ids).logits) <= TOLERANCE
    assert worst(seen["blocks.0.attention.pattern"], expected["blocks.0.attention.pattern"]) <= TOLERANCE


def test_gradients_survive_compilation():
    model, ids = build(positions="rope", gated=True, norm="rmsnorm"), some_ids()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    ours = torch.autograd.grad(
        nnf.cross_entropy(model(ids).logits.flatten(0, 1), ids.flatten()), list(model.parameters())
    )
    theirs = torch.autograd.grad(
        nnf.cross_entropy(compiled(ids).logits.flatten(0, 1), ids.flatten()), list(model.parameters())
    )
    assert max(map(worst, ours, theirs)) <= TOLERANCE


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("how", ["all", "mask", "causal"])
def test_rows_that_share_keys_attend_alike_in_both_kernels(queries, how):
    """Six rows of queries, two of keys: as if each row had a copy of its keys."""
    q, (k, v) = torch.randn(6, 4, queries, 8), torch.randn(2, 2, 2, queries + 2, 8)
    mask = torch.rand(2, 1, queries, queries + 2) < 0.6 if how == "mask" else None
    copies = [None if x is None else x.repeat_interleave(3, 0) for x in (k, v, mask)]
    expected = eager(q, *copies, causal=how == "causal")
    for kernel in KERNELS.values():
        assert torch.allclose(kernel(q, k, v, mask, causal=how == "causal"), expected, atol=1e-6)
