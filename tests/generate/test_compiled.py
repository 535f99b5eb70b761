"""The compiled step gives what plain decoding gives, and a few of them serve prompts of every length."""

import functools
import threading
import warnings

import pytest
import torch

import clearhead as ch
from clearhead.core.attention import fused
from clearhead.core.norms import RMSNorm
from clearhead.core.positions import Rotary, rotate
from clearhead.run.generate.decode import decode, length_buckets
from clearhead.run.generate.request import Request
from clearhead.run.generate.sequence import Ends, Prompts
from clearhead.run.kernels.fixed_cache import HeadConfig, MatmulConfig
from clearhead.run.kernels.kernels import step_attend, step_linear
from clearhead.run.kernels.prepare import StepBlock, prepared
from clearhead.run.kernels.steps import Steps

DECODER = ch.preset("micro-decoder").replace(n_layers=2, n_heads=4)
BOTH = ch.preset("micro-encoder-decoder").replace(n_layers=2, n_heads=4)
LLAMA = DECODER.replace(
    n_kv_heads=2, positions="rope", norm="rmsnorm", gated=True, activation="silu", bias=False
)
SHAPES = {
    "gpt2": DECODER,
    "llama": LLAMA,
    "gemma2": LLAMA.replace(
        norm_position="sandwich", norm_unit_offset=True, attention_softcap=20.0, window=(4, None)
    ),
    "states": LLAMA.replace(attention="linear"),
    "t5": BOTH.replace(positions="relative", norm="rmsnorm", bias=False),
    "bart": BOTH.replace(norm_position="post", embedding_norm=True, final_norm=False),
}
DRAWN = {"temperature": 0.9}
BIASED = {"logit_bias": {3: 4.0, 9: -100.0}}


def built(config, kernels=None):
    torch.manual_seed(0)
    return prepared(ch.Transformer(config).eval(), kernels)


def prompts_of(config, lengths=(3, 9, 6), **more):
    """Prompts of unequal length, or, with an encoder, sources of unequal length."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(config.vocab_size, (len(lengths), max(lengths)), generator=generator)
    if config.family == "decoder":
        return Prompts([row[:length].tolist() for row, length in zip(ids, lengths)], **more)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return Prompts([[0] for _ in lengths], ids, mask, **more)


def asking(count, **options):
    """A request that wants the step compiled."""
    return Request(max_new_tokens=count, compile=True, **options)


def same(ours, plain):
    assert [row.ids for row in ours] == [row.ids for row in plain]
    assert [row.stop_reason for row in ours] == [row.stop_reason for row in plain]
    assert [row.steps for row in ours] == [row.steps for row in plain]
    for a, b in zip(ours, plain):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
        assert [[token for token, _ in best] for best in a.alternatives] == [
            [token for token, _ in best] for best in b.alternatives
        ]


@pytest.mark.ledger("G2", "G3")
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.slow
def test_the_compiled_step_gives_the_same_tokens(name):
    model, given = built(SHAPES[name]), prompts_of(SHAPES[name], seeds=[3, 4, 5])
    steps = Steps(model, backend="eager")
    for options in ({}, {**DRAWN, "logprobs": True, "alternatives": 2}, {"repetition_penalty": 1.3}, BIASED):
        request = asking(24, **options)
        plain = decode(model, request, given)
        # One row ends early, another later, perhaps one never.
        ends = Ends(frozenset([plain[0].ids[5], plain[1].ids[18]]))
        same(decode(model, request, given, ends, steps=steps), decode(model, request, given, ends))
    assert len(steps.made) == 1 and steps.unfit is None


@pytest.mark.parametrize("name", ["llama", "states", "t5"])
def test_prompts_of_like_length_are_read_together(name, monkeypatch):
    monkeypatch.setattr("clearhead.run.generate.decode.TOGETHER", 16)
    assert length_buckets([3, 9, 6, 2, 9, 1]) == [[1, 4], [0, 2, 3], [5]]
    model, given = built(SHAPES[name]), prompts_of(SHAPES[name], (3, 9, 6, 2, 9, 1), seeds=range(6))
    steps = Steps(model, backend="eager")
    for options in ({}, {**DRAWN, "logprobs": True}):
        same(
            decode(model, asking(9, **options), given, steps=steps),
            decode(model, asking(9, **options), given),
        )


@pytest.mark.parametrize(
    "config", [LLAMA, LLAMA.replace(gated=False, activation="relu", n_kv_heads=4, rope_fraction=0.5)]
)
@pytest.mark.slow
def test_blocks_made_of_kernels_give_the_same_tokens(config):
    plain, model = built(config), built(config, kernels=True)
    assert all(isinstance(block, StepBlock) for block in model.decoder.blocks)
    steps = Steps(model, backend="aot_eager")
    for lengths in ((5,), (3, 9, 6)):
        for options in ({}, DRAWN):
            request, given = asking(30, **options), prompts_of(config, lengths, seeds=range(len(lengths)))
            same(decode(model, request, given, steps=steps), decode(plain, request, given))
    assert len(steps.made) == 2


def test_the_formulas_of_the_kernels_are_those_of_the_model():
    torch.manual_seed(0)
    x, weight, added, norm = (
        torch.randn(3, 1, 24),
        torch.randn(40, 24),
        torch.randn(3, 1, 20),
        RMSNorm(24, 1e-5, False, True),
    )
    torch.nn.init.normal_(norm.weight)
    pre, up = (norm(x) @ weight.T).chunk(2, dim=-1)
    ours = step_linear(x, weight, MatmulConfig(None, norm.weight.detach(), 1e-5, True, "silu", added))
    torch.testing.assert_close(ours, torch.nn.functional.silu(pre) * up + added)

    keys, values, angles = torch.randn(3, 2, 16, 8), torch.randn(3, 2, 16, 8), torch.randn(3, 1, 1, 8)
    q, k, v = torch.randn(3, 4, 1, 8), torch.randn(3, 2, 1, 8), torch.randn(3, 2, 1, 8)
    mask = torch.arange(16) <= torch.tensor([[5], [5], [5]])
    mask[1, :3] = False
    turned = [rotate(part, Rotary(angles.cos(), angles.sin()), "half") for part in (q, k)]
    seen = torch.cat([keys[:, :, :5], turned[1]], 2), torch.cat([values[:, :, :5], v], 2)
    wanted = fused(turned[0], *seen, mask[:, None, None, :6])
    qkv = torch.cat([part.reshape(3, 1, -1) for part in (q, k, v)], -1)
    form = HeadConfig(angles.cos(), angles.sin(), "half", 4, 8**-0.5, None)
    ours = step_attend(qkv, keys, values, torch.tensor([5]), mask, form)
    torch.testing.assert_close(ours, wanted.reshape(3, 1, -1))
    torch.testing.assert_close(keys[:, :, 5], turned[1][:, :, 0])


@pytest.mark.slow
def test_twenty_lengths_need_three_steps_at_most():
    from torch._dynamo.utils import counters

    config = LLAMA.replace(n_layers=1, max_positions=2048)
    model = built(config)
    steps = Steps(model, backend="eager")
    counters.clear()
    for length in range(4, 1904, 95):
        request, given = asking(20), prompts_of(config, (length,))
        same(decode(model, request, given, steps=steps), decode(model, request, given))
    assert len(steps.made) <= 3
    assert counters["stats"]["unique_graphs"] <= 3


def test_rows_that_end_at_once_or_late_by_time():
    model, given = built(LLAMA), prompts_of(LLAMA)
    steps = Steps(model, backend="eager")
    first = decode(model, asking(1), given)
    ends = Ends(frozenset([first[0].ids[0], first[2].ids[0]]))
    for options in ({}, DRAWN):
        request = asking(12, **options)
        same(decode(model, request, given, ends, steps=steps), decode(model, request, given, ends))
    late = decode(model, asking(300), given, Ends(deadline=0.0), steps=steps)
    assert [(len(row.ids), row.stop_reason) for row in late] == [(1, "time")] * 3


def test_what_cannot_be_compiled_runs_as_it_is_with_a_warning():
    for config, backend in ((LLAMA, "no such compiler"), (DECODER.replace(n_experts=4), "eager")):
        model, given = built(config), prompts_of(config)
        steps = Steps(model, backend=backend)
        with pytest.warns(RuntimeWarning, match="runs uncompiled"):
            same(decode(model, asking(4), given, steps=steps), decode(model, asking(4), given))
        with pytest.warns(RuntimeWarning, match="runs uncompiled"):  # also where a cache is gone on with
            decode(model, asking(4), prompts_of(config, (3,)), cache=ch.Cache(), steps=steps)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # Nobody asked for compilation, so nothing is said.
            decode(model, Request(max_new_tokens=4), given, steps=steps)


@pytest.mark.cpu
@pytest.mark.slow
def test_many_models_are_compiled_in_one_process():
    """The compiler makes a few results of a function: each step counts by itself, then goes on uncompiled."""
    models = [built(DECODER.replace(n_layers=1, d_model=width)) for width in (16, 24)]
    given, all_steps = prompts_of(DECODER), [Steps(model, backend="eager") for model in models]

    def compare():
        for model, steps in zip(models, all_steps):
            same(decode(model, asking(4), given, steps=steps), decode(model, asking(4), given))

    with torch._dynamo.config.patch(recompile_limit=1), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        compare()
        assert [str(line.message) for line in said if "uncompiled" in str(line.message)] == []
        torch.use_deterministic_algorithms(True)  # the compiler begins again when a setting changes
        try:
            compare()
            compare()
        finally:
            torch.use_deterministic_algorithms(False)
        assert sum("uncompiled" in str(line.message) for line in said) == len(models)  # once for each


@pytest.mark.cpu
def test_generate_compiles_when_asked_and_follows_the_weights(monkeypatch):
    monkeypatch.setattr("clearhead.run.bundle.Steps", functools.partial(Steps, backend="eager"))
    torch.manual_seed(0)
    loaded = ch.Model(ch.Transformer(LLAMA.replace(n_layers=1)).eval())
    plain = loaded.generate([1, 2, 3], 8)
    assert loaded.engine.steps is None  # on a CPU only when asked
    assert loaded.generate([1, 2, 3], 8, compile=True).ids == plain.ids
    first = loaded.engine.steps
    assert first is not None and len(first.made) == 1
    loaded.generate([1, 2, 3, 4], 8, compile=True)
    assert loaded.engine.steps is first and len(first.made) == 1
    with torch.no_grad():
        loaded.model.main.norm.weight.mul_(torch.linspace(-1, 1, LLAMA.d_model))
    changed = loaded.generate([1, 2, 3], 8)
    assert changed.ids != plain.ids
    assert loaded.generate([1, 2, 3], 8, compile=True).ids == changed.ids
    assert loaded.engine.steps is first  # whose weights were brought up to date
    for prompts in ([[1, 2, 3]], [[1, 2, 3], [4, 5]]):  # of one row, and of several, whose weights are packed
        loaded.generate(prompts, 8, compile=True)
        for weight in loaded.model.parameters():
            weight.data.add_(torch.randn(weight.shape))
        said = [one.ids for one in decode(loaded.model, Request(max_new_tokens=8), Prompts(prompts))]
        assert [one.ids for one in loaded.generate(prompts, 8, compile=True)] == said


@pytest.mark.slow
def test_a_compiled_step_that_is_made_to_run_uncompiled():
    """As it is while another thread watches the model."""
    model, given = built(DECODER), prompts_of(DECODER, seeds=[3, 4, 5])
    steps = Steps(model, backend="eager")
    greedy, drawing = asking(40), asking(40, **DRAWN)
    decode(model, greedy, given, steps=steps)
    with torch.compiler.set_stance("force_eager"):
        found = decode(model, greedy, given, steps=steps)
        drawn = decode(model, drawing, given, steps=steps)
    same(found, decode(model, greedy, given))
    same(drawn, decode(model, drawing, given))


def test_threads_that_watch_at_once_leave_the_compiler_as_it_was():
    """The second begins before the first ends, and ends after it."""
    import torch._dynamo.eval_frame as frames

    model, ids = built(DECODER), torch.randint(50, (1, 5))
    begun, ended, before = threading.Event(), threading.Event(), frames._stance

    def first():
        with ch.record(model, "*"):
            begun.set()
            overlapping.wait(20)
        ended.set()

    overlapping = threading.Event()
    thread = threading.Thread(target=first)
    thread.start()
    assert begun.wait(20)
    with ch.record(model, "*"):
        overlapping.set()
        assert ended.wait(20)
        model(ids)
        assert frames._stance.stance == "force_eager"
    thread.join(20)
    assert frames._stance == before


def test_logits_that_are_not_numbers_end_a_compiled_run():
    config = LLAMA.replace(tie_embeddings=False)
    model = built(config)
    steps, prompts = Steps(model, backend="eager"), prompts_of(config, (3,))
    said = decode(model, asking(20), prompts, steps=steps)[0].ids[0]
    assert said not in prompts.ids[0]  # so that the prompt is read well, and the first token is not
    model.decoder.embedding.front.tokens.weight.data[said] = float("nan")
    with pytest.raises(ch.InputError, match="logits are not numbers"):
        decode(model, asking(20), prompts, steps=steps)
