"""The fast copy computes what the model computes, and leaves the model alone."""

import dataclasses
import functools

import pytest
import torch
from torch import nn

import clearhead as ch
from clearhead.core.stack import Block, Residual
from clearhead.run.kernels import library
from clearhead.run.kernels.parts import Direct, can_pack, is_known
from clearhead.run.kernels.prepare import StepBlock, prepared
from clearhead.run.quant.apply import plan_of, rounded
from clearhead.run.quant.layers import QuantizedLinear
from tests.fast.test_native import drawn
from tests.harness import GROUPED_EXPERTS, LATENT

DECODER = ch.preset("micro-decoder")
GATED = DECODER.replace(n_kv_heads=1, positions="rope", norm="rmsnorm", gated=True, bias=False)


CLAMPED = {"gated_clamp": 0.3, "gated_shift": 1.0, "activation": "quick_gelu"}
COPIED = {
    "decoder": DECODER,
    "grouped, gated": GATED,
    "experts": DECODER.replace(n_experts=4, gated=True),
    "latent": DECODER.replace(**{**LATENT, **GROUPED_EXPERTS, "attention": "latent(36, query_rank=40)"}),
    "clamped": DECODER.replace(norm="rmsnorm", gated=True, **CLAMPED),
    "gated heads": DECODER.replace(attention_gate=True, norm="rmsnorm", gated=True),
    "encoder-decoder": ch.preset("micro-encoder-decoder"),
    "encoder": ch.preset("micro-encoder"),
}


@pytest.mark.parametrize("name", COPIED)
def test_the_copy_equals_the_model_and_leaves_it_alone(name):
    """One row and several, one token and several: each is another product, packed or not."""
    torch.manual_seed(0)
    model = ch.Transformer(COPIED[name].replace(d_model=48, n_heads=4)).eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    both = model.encoder is not None and model.decoder is not None
    for rows, length in ((1, 1), (1, 9), (2, 1), (5, 1), (8, 11)):
        ids, source = (torch.randint(model.config.vocab_size, (rows, size)) for size in (length, 6))
        more, fast = {"source": source} if both else {}, prepared(model)
        with torch.inference_mode():
            assert (fast(ids, **more).logits - model(ids, **more).logits).abs().max() <= 1e-5
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_compiler_sees_plain_products_in_place_of_packed_ones():
    """Inductor fails on a packed weight: a compiled step of several rows ran uncompiled on a CPU."""
    model = ch.Transformer(DECODER).eval()
    fast, seen = prepared(model), []

    def collect(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    ids = torch.randint(model.config.vocab_size, (4, 1))
    with torch.inference_mode():
        fast(ids)  # packs
        logits = torch.compile(lambda ids: fast(ids).logits, backend=collect, fullgraph=True)(ids)
        assert (logits - model(ids).logits).abs().max() <= 1e-5
    assert seen and not any("_linear_pointwise" in target for target in seen)


@pytest.mark.parametrize("option", [{"gated_clamp": 0.3}, {"gated_shift": 1.0}, {"attention_gate": True}])
def test_clamped_and_shifted_gates_are_not_for_the_kernels(option):
    config = GATED.replace(activation="silu", n_layers=1)
    for shape, suits in ((config, True), (config.replace(**option), False)):
        fast = prepared(ch.Transformer(shape).eval(), kernels=True)
        assert isinstance(fast.decoder.blocks[0], StepBlock) == suits


def test_the_copy_runs_none_of_the_models_hooks():
    model = ch.Transformer(DECODER).eval()
    for part in model.modules():
        part.register_forward_hook(lambda *given: pytest.fail("a hook of the model ran"))
    ids = torch.zeros(1, 3, dtype=torch.long)
    assert prepared(model)(ids).logits.isfinite().all()
    with pytest.raises(pytest.fail.Exception, match="a hook of the model ran"):
        model(ids)


def test_whoever_asks_first_does_not_decide_whether_weights_are_packed():
    """Under autocast the question failed, and the answer was kept for the process; asking drew numbers."""
    state = torch.get_rng_state()
    wanted = can_pack.__wrapped__()
    with torch.autocast("cpu", torch.bfloat16):
        assert can_pack.__wrapped__() == wanted
    assert torch.equal(torch.get_rng_state(), state)


# The contract of fast paths --------------------------------------------------------------------------------


CONFIG = ch.preset("micro-decoder").replace(
    n_layers=2, n_kv_heads=1, positions="rope", norm="rmsnorm", gated=True, activation="silu", vocab_size=29
)
# A part of each class that a fast path stands for.
PARTS = {
    "Transformer": "",
    "Stack": "decoder",
    "Block": "decoder.blocks.0",
    "Residual": "decoder.blocks.0.attention_residual",
    "RMSNorm": "decoder.blocks.0.attention_residual.before",
    "Attention": "decoder.blocks.0.attention",
    "FeedForward": "decoder.blocks.0.feedforward",
    "Linear": "decoder.blocks.0.attention.k",
    "Linear, not joined": "decoder.blocks.0.feedforward.down",
    "Linear of the head": "head.out",
    "QuantizedLinear": "decoder.blocks.0.attention.k",
}
BACKENDS = {"native": {}, "kernels": {"kernels": True}, "packed": {"native": False}}
ADDED = {
    "an option": lambda: 0.5,
    "a parameter": lambda: nn.Parameter(torch.tensor(0.5)),
    "a submodule": lambda: nn.ParameterList([torch.tensor(0.5)]),
}


def teach(kind: type[nn.Module], monkeypatch) -> None:
    """Let the arithmetic of a class depend on `added`, where an instance has that."""
    method = "add" if kind is Residual else "forward"
    right = getattr(kind, method)

    @functools.wraps(right)
    def taught(self, *inputs, **named):
        y, added = right(self, *inputs, **named), getattr(self, "added", 0.0)
        factor = 1 + float(added[0] if isinstance(added, nn.ParameterList) else added)
        return y * factor if isinstance(y, torch.Tensor) else dataclasses.replace(y, logits=y.logits * factor)

    monkeypatch.setattr(kind, method, taught)


def steps(model: ch.Transformer, ids: torch.Tensor, fixed: bool) -> torch.Tensor:
    """Logits of two tokens together and then of one at a time, as fast paths take them."""
    cache = ch.FixedCache(model.config, *ids.shape) if fixed else ch.Cache()
    return torch.cat([model(part, cache=cache).logits for part in ids.split([2, 1, 1, 1, 1], 1)], 1)


# Packed weights are no fast path of a quantized model.
CASES = [(n, b) for n in PARTS for b in BACKENDS if (n, b) != ("QuantizedLinear", "packed")]


@pytest.mark.cpu
@pytest.mark.parametrize(("name", "backend"), CASES)
@pytest.mark.parametrize("added", ADDED)
def test_a_part_with_more_than_is_known_is_computed_by_itself(name, added, backend, monkeypatch):
    if backend == "native" and library.library() is None:
        pytest.skip("no C compiler")
    model, options = drawn(CONFIG), BACKENDS[backend]
    model = rounded(model, plan_of("int8" if name.startswith("Quantized") else None))
    usual, part = prepared(model, **options), model.get_submodule(PARTS[name])
    assert isinstance(part, QuantizedLinear) == name.startswith("Quantized")
    assert any(isinstance(copy, Direct) for copy in usual.modules())  # there is a fast path to leave
    teach(type(part), monkeypatch)
    ids = torch.randint(29, (2, 6), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        plain = steps(model, ids, backend == "kernels")
        part.added = ADDED[added]()
        wanted, fast = steps(model, ids, backend == "kernels"), prepared(model, **options)
        computed = steps(fast, ids, backend == "kernels")
    assert (wanted - plain).abs().max() > 1e-3  # it matters
    # Other quantized layers of the native copy round their inputs.
    rounds = name.startswith("Quantized") and backend == "native"
    assert (computed - wanted).abs().max() <= (0.2 if rounds else 1e-4) * wanted.abs().max()
    assert not is_known(part)
    assert type(fast.get_submodule(PARTS[name])) is type(part)
    if "blocks.0" in PARTS[name]:
        assert type(fast.decoder.blocks[0]) is Block
        assert type(fast.decoder.blocks[1]) is not Block or backend == "packed"
