"""The fast copy computes what the model computes, and leaves the model alone."""

import pytest
import torch

import clearhead as ch
from clearhead.run.generate.decode import greedy
from clearhead.run.kernels.parts import can_pack
from clearhead.run.kernels.prepare import StepBlock, prepared

CONFIGS = {
    "decoder": ch.preset("micro-decoder"),
    "grouped, gated": ch.preset("micro-decoder").replace(
        n_kv_heads=1, positions="rope", norm="rmsnorm", gated=True, bias=False
    ),
    "experts": ch.preset("micro-decoder").replace(n_experts=4, gated=True),
    "clamped": ch.preset("micro-decoder").replace(
        norm="rmsnorm", gated=True, gated_clamp=0.3, gated_shift=1.0, activation="quick_gelu"
    ),
    "gated heads": ch.preset("micro-decoder").replace(attention_gate=True, norm="rmsnorm", gated=True),
    "encoder-decoder": ch.preset("micro-encoder-decoder"),
    "encoder": ch.preset("micro-encoder"),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("rows", "length"), [(1, 1), (1, 9), (2, 1), (5, 1), (8, 11)])
def test_the_copy_equals_the_model(name, rows, length):
    torch.manual_seed(0)
    model = ch.Transformer(CONFIGS[name].replace(d_model=48, n_heads=4)).eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    fast = prepared(model)
    ids = torch.randint(model.config.vocab_size, (rows, length))
    more = (
        {"source": torch.randint(model.config.vocab_size, (rows, 6))}
        if model.encoder is not None and model.decoder is not None
        else {}
    )
    with torch.inference_mode():
        assert (fast(ids, **more).logits - model(ids, **more).logits).abs().max() <= 1e-5
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_the_copy_generates_the_same_tokens():
    torch.manual_seed(0)
    model = ch.Transformer(CONFIGS["grouped, gated"]).eval()
    ids = torch.randint(model.config.vocab_size, (4, 5))
    assert torch.equal(greedy(prepared(model), ids, 20), greedy(model, ids, 20))


def test_an_option_that_the_kernels_do_not_know_is_not_lost():
    """A block with one more weight takes its own forward; the copy has that weight, whatever its name."""
    config = CONFIGS["grouped, gated"].replace(activation="silu", n_layers=2)
    model = ch.Transformer(config).eval()
    attention = model.decoder.blocks[0].attention
    attention.added = torch.nn.Parameter(torch.zeros(config.n_heads))
    fast = prepared(model, kernels=True)
    assert [isinstance(block, StepBlock) for block in fast.decoder.blocks] == [False, True]
    assert fast.decoder.blocks[0].attention.added is attention.added


def test_a_compiler_sees_plain_products_in_place_of_packed_ones():
    """Inductor fails on a packed weight: a compiled step of several rows ran uncompiled on a CPU."""
    model = ch.Transformer(CONFIGS["decoder"]).eval()
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
    config = CONFIGS["grouped, gated"].replace(activation="silu", n_layers=1)
    for shape, suits in ((config, True), (config.replace(**option), False)):
        fast = prepared(ch.Transformer(shape).eval(), kernels=True)
        assert isinstance(fast.decoder.blocks[0], StepBlock) == suits


def test_the_copy_runs_none_of_the_models_hooks():
    model = ch.Transformer(CONFIGS["decoder"]).eval()
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
