"""The step compiled from C computes what the model computes, for every option that it knows."""

import gc

import pytest
import torch

import clearhead as ch
from clearhead.core.cache import Cache
from clearhead.core.stack import Stack
from clearhead.run.generate.beam import beam_search
from clearhead.run.generate.decode import cache_for, greedy
from clearhead.run.generate.request import Request
from clearhead.run.generate.sequence import Prompts
from clearhead.run.kernels import library, native
from clearhead.run.kernels.native import NativeBlock, NativeLinear
from clearhead.run.kernels.native_model import NativeModel
from clearhead.run.kernels.prepare import prepared
from clearhead.run.kernels.training import suit_narrow
from clearhead.variants.caches import WindowCache

pytestmark = pytest.mark.skipif(
    library.library() is None, reason="no C compiler, or other threads than GNU's"
)

DECODER = ch.preset("micro-decoder").replace(d_model=48, n_heads=4, n_layers=2, vocab_size=61)
BOTH = ch.preset("micro-encoder-decoder").replace(d_model=48, n_heads=4, n_layers=2, vocab_size=61)
LLAMA = {"norm": "rmsnorm", "gated": True, "positions": "rope", "bias": False, "activation": "silu"}
CONFIGS = {
    "GPT-2": DECODER,
    "Llama, grouped": DECODER.replace(**LLAMA, n_kv_heads=2),
    "one key head, pairs beside each other, partly turned": DECODER.replace(
        **LLAMA, n_kv_heads=1, rope_layout="interleaved", rope_fraction=0.5
    ),
    "normed heads": DECODER.replace(**LLAMA, qk_norm="head"),
    "normed queries": DECODER.replace(**LLAMA, qk_norm="full", n_kv_heads=2),
    "sandwich, soft-capped, offset": DECODER.replace(
        **LLAMA, norm_position="sandwich", attention_softcap=0.7, norm_unit_offset=True
    ),
    "post": DECODER.replace(norm_position="post"),
    "output": DECODER.replace(norm_position="output"),
    "parallel": DECODER.replace(parallel=True),
    "parallel, two norms": DECODER.replace(parallel=True, parallel_norms=2),
    "ALiBi": DECODER.replace(positions="alibi"),
    "relative": BOTH.replace(positions="relative", norm="rmsnorm", bias=False),
    "sinks": DECODER.replace(attention_sink=True, n_kv_heads=2),
    "window": DECODER.replace(attention="window(size=3)"),
    "window and full": DECODER.replace(**LLAMA, attention=("window(size=4)", "full")),
    "scaled residuals": DECODER.replace(residual_scale=0.3, attention_scale=0.2),
    "encoder-decoder": BOTH,
    "encoder-decoder, pre": BOTH.replace(norm_position="pre", norm="rmsnorm", gated=True),
    "odd widths": DECODER.replace(d_model=36, d_head=7, n_heads=3, d_ff=53, n_kv_heads=3),
    **{
        name: DECODER.replace(activation=name)
        for name in ("relu", "gelu", "gelu_tanh", "quick_gelu", "relu2")
    },
}


def drawn(config):
    """Return a model none of whose parameters is zero or one."""
    torch.manual_seed(3)
    model = ch.Transformer(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.15)
    return model


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_step_equals_the_models(name, rows):
    """Rows of unequal length, in caches that grow and that are rings."""
    model = drawn(CONFIGS[name])
    fast, config = prepared(model), model.config
    assert all(isinstance(block, NativeBlock) for block in fast.main.blocks)
    ids = torch.randint(config.vocab_size, (rows, 12))
    mask = torch.ones(rows, 6, dtype=torch.bool)
    mask[-1, : rows - 1] = False  # padded on the left
    more = (
        {"source": torch.randint(config.vocab_size, (rows, 5))} if config.family == "encoder-decoder" else {}
    )
    for make in (Cache, lambda: Cache(32), WindowCache):
        caches = make(), make()
        with torch.inference_mode():
            answers = [
                one(ids[:, :6], mask, **more, cache=cache).logits[:, -1]
                for one, cache in zip((model, fast), caches)
            ]
            for place in range(6, 12):
                assert (answers[0] - answers[1]).abs().max() <= 1e-5
                token = ids[:, place, None]
                answers = [one(token, cache=cache).logits[:, -1] for one, cache in zip((model, fast), caches)]


OF_PLAIN_STEPS = [name for name in CONFIGS if name not in ("ALiBi", "relative", "window", "window and full")]


@pytest.mark.parametrize("name", CONFIGS)
def test_steps_of_rows_without_padding_keep_their_description(name, monkeypatch):
    """One for all steps of a cache, until its keys lie elsewhere; it goes with the cache."""
    gc.freeze()  # so that what is sought for below is quickly looked through
    model, described = drawn(CONFIGS[name]), []
    fast, config, right = prepared(model), model.config, NativeModel._described
    monkeypatch.setattr(NativeModel, "_described", lambda *of: described.append(found := right(*of)) or found)
    ids, caches = torch.randint(config.vocab_size, (3, 16)), [Cache(12), Cache(12)]
    more = {"source": torch.randint(config.vocab_size, (3, 5))} if config.family == "encoder-decoder" else {}
    with torch.inference_mode():
        for one, cache in zip((model, fast), caches):
            one(ids[:, :4], **more, cache=cache)
        for place in range(4, 16):  # past the room of the caches
            if place == 7:
                ids = ids[[2, 0, 0]]
                for cache in caches:
                    cache.reorder(torch.tensor([2, 0, 0]))
            if place == 9:
                for cache in caches:
                    cache.crop(8)
            token = ids[:, place, None]
            expected, found = (one(token, cache=cache).logits for one, cache in zip((model, fast), caches))
            assert (expected - found).abs().max() <= 1e-5
    assert len([step for step in described if step]) == (3 if name in OF_PLAIN_STEPS else 0)
    assert len(fast.kept) == (name in OF_PLAIN_STEPS)
    del caches, cache
    gc.collect()
    assert not fast.kept


def test_the_compiled_step_is_the_one_that_runs(monkeypatch):
    """A planted fault in it is seen: each step but those that make room goes through it."""
    model, calls = drawn(CONFIGS["GPT-2"]), []
    real = library.library()

    class Counted:
        clearhead_linear, clearhead_any_rows = real.clearhead_linear, real.clearhead_any_rows

        def clearhead_blocks(self, *given):
            calls.append(given)
            return real.clearhead_blocks(*given)

    monkeypatch.setattr(native, "library", lambda: Counted())
    fast = prepared(model)
    greedy(fast, torch.randint(61, (2, 4)), 9)
    assert [count for _, count, _ in calls] == [len(fast.main.blocks)] * 8


def test_beams_share_the_keys_of_one_source():
    model, source = drawn(BOTH), torch.randint(61, (2, 7))
    mask = torch.tensor([[True] * 7, [False] * 3 + [True] * 4])
    prompts, request = Prompts([[1], [1]], source, mask), Request(num_beams=3, num_return=3, max_new_tokens=6)
    found, expected = (beam_search(one, request, prompts) for one in (prepared(model), model))
    for rows, others in zip(found, expected, strict=True):
        assert [row.ids for row in rows] == [row.ids for row in others]
        assert all(abs(row.score - other.score) <= 1e-5 for row, other in zip(rows, others))


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("positions", ["learned", "rope", "relative"])
def test_sources_of_like_length_are_read_together(positions, left, monkeypatch):
    """Padding of a source is left out of the encoder's work where it stands at the end of the rows."""
    model, calls = drawn(BOTH.replace(positions=positions)), []
    lengths = torch.randint(2, 30, (24,))
    slots = torch.arange(30)[None]
    mask = slots >= 30 - lengths[:, None] if left else slots < lengths[:, None]
    source, ids = torch.randint(61, (24, 30)), torch.full((24, 1), 3)
    right = Stack.forward

    def counted(self, inputs, *given, **named):
        calls.append(inputs.ids.shape)
        return right(self, inputs, *given, **named)

    monkeypatch.setattr(Stack, "forward", counted)
    with torch.inference_mode():
        expected = model(ids, source=source, source_mask=mask)
        calls.clear()
        found = prepared(model)(ids, source=source, source_mask=mask)
    assert (found.logits - expected.logits).abs().max() <= 1e-5
    assert (found.memory - expected.memory)[mask].abs().max() <= 1e-5
    read = sum(rows * length for rows, length in calls) - len(ids)  # the decoder reads one token of each
    assert read == mask.numel() if left else read <= 0.9 * mask.numel()


@pytest.mark.parametrize(("width", "out"), [(16, 64), (7, 65), (129, 70), (513, 76), (1030, 132)])
def test_a_product_of_many_rows(width, out):
    """Panels of one and of two vectors, tiles of four and of eight rows, what is left over: all equal."""
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(width, out).double(), torch.randn(301, width, dtype=torch.float64)
    fast = NativeLinear(layer.float())
    fast.most_rows = len(x)  # on any processor
    with torch.inference_mode():
        expected = layer.double()(x)
        for rows in (64, 65, 130, 301):
            found = fast(x[:rows].float())
            assert (found.double() - expected[:rows]).abs().max() <= 2e-6 * width**0.5


def test_weights_that_change_are_read_as_they_are():
    """Nothing is copied, so that nothing can be stale, whatever way a weight was changed."""
    model = drawn(CONFIGS["Llama, grouped"])
    bundle_ids = torch.randint(61, (1, 5))
    fast = prepared(model)
    greedy(fast, bundle_ids, 3)
    model.decoder.blocks[0].attention.q.weight.data.mul_(1.7)
    model.decoder.blocks[1].feedforward.down.weight.data[:] = 0.1
    with torch.inference_mode():
        assert (fast(bundle_ids).logits - model(bundle_ids).logits).abs().max() <= 1e-5
    assert torch.equal(greedy(fast, bundle_ids, 8), greedy(model, bundle_ids, 8))


@pytest.mark.parametrize(
    "option", [{"gated": True, "gated_clamp": 0.3}, {"attention_gate": True}, {"n_experts": 4}]
)
def test_what_it_does_not_know_keeps_its_own_forward(option):
    fast = prepared(drawn(DECODER.replace(**option)))
    assert not any(isinstance(block, NativeBlock) for block in fast.main.blocks)


def test_not_a_number_is_not_hidden():
    model = drawn(CONFIGS["GPT-2"])
    model.decoder.blocks[0].attention.k.weight.data[0, 0] = float("nan")
    fast, cache = prepared(model), cache_for(model, 8)
    with torch.inference_mode():
        fast(torch.ones(1, 3, dtype=torch.long), cache=cache)
        assert fast(torch.ones(1, 1, dtype=torch.long), cache=cache).logits.isnan().all()


def test_it_can_be_switched_off(monkeypatch):
    monkeypatch.setenv("CLEARHEAD_NATIVE", "0")
    assert library.library.__wrapped__() is None


@pytest.mark.parametrize("fault", ["no compiler", "no cache", "a compiler that fails", "wrong numbers"])
def test_without_it_the_copy_computes_as_before(fault, monkeypatch, tmp_path):
    """A machine that cannot compile or keep the library loses speed alone."""
    (tmp_path / "file").touch()
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ("file" if fault == "no cache" else "cache")))
    if fault == "wrong numbers":
        source = tmp_path / "step.c"
        source.write_text(library.SOURCE.read_text().replace("sum + (bias ? bias[r] : 0)", "sum"))
        monkeypatch.setattr(library, "SOURCE", source)
    else:
        monkeypatch.setenv("CC", {"no compiler": "none-such"}.get(fault, str(broken)))
    assert library.library.__wrapped__() is None
    monkeypatch.setattr(library, "library", lambda: None)
    model, ids = drawn(CONFIGS["Llama, grouped"]), torch.randint(61, (3, 5))
    assert not any(isinstance(part, NativeBlock | NativeLinear) for part in prepared(model).modules())
    assert torch.equal(greedy(prepared(model), ids, 6), greedy(model, ids, 6))


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu"])
def test_a_model_that_was_just_trained(activation):
    """Training on narrow vectors leaves other linear layers and activations in place: the copy takes them."""
    model = drawn(DECODER.replace(activation=activation))
    ids = torch.randint(61, (2, 4))
    expected = greedy(model, ids, 8)
    suit_narrow(model)
    fast = prepared(model)
    assert all(isinstance(block, NativeBlock) for block in fast.main.blocks)
    assert torch.equal(greedy(fast, ids, 8), expected)
