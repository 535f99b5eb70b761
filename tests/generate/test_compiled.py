"""The compiled step gives what plain decoding gives, and a few of them serve prompts of every length."""

import functools
import threading
import warnings

import pytest
import torch

import clearhead as ch
from clearhead.fast.kernels import step_attend, step_linear
from clearhead.fast.prepare import StepBlock, prepared
from clearhead.generate.compiled import Steps, decode_compiled, rows_bucket, slots_bucket
from clearhead.generate.decode import decode
from clearhead.model.attend import fused
from clearhead.model.norms import RMSNorm
from clearhead.model.rope import Rotary, rotate

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
    "t5": BOTH.replace(positions="relative", norm="rmsnorm", bias=False),
    "bart": BOTH.replace(norm_position="post", embedding_norm=True, final_norm=False),
}
DRAWN = ch.Sampling(temperature=0.9)


def built(config, kernels=None):
    torch.manual_seed(0)
    return prepared(ch.Transformer(config).eval(), kernels)


def request(config, lengths=(3, 9, 6)):
    """Prompts of unequal length, or, with an encoder, sources of unequal length."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(config.vocab_size, (len(lengths), max(lengths)), generator=generator)
    if config.family == "decoder":
        return {"prompts": [row[:length].tolist() for row, length in zip(ids, lengths)]}
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return {"prompts": [[0] for _ in lengths], "source": ids, "source_mask": mask}


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
def test_the_compiled_step_gives_the_same_tokens(name):
    model, given = built(SHAPES[name]), request(SHAPES[name])
    steps = Steps(model, backend="eager")
    for sampling, more in (
        (ch.Sampling(), {}),
        (DRAWN, {"logprobs": True, "alternatives": 2}),
        (ch.Sampling(repetition_penalty=1.3), {}),
    ):
        asked = {**given, "max_new_tokens": 24, "sampling": sampling, "seeds": [3, 4, 5], **more}
        plain = decode(model, **asked)
        asked["stop_ids"] = {
            plain[0].ids[5],
            plain[1].ids[18],
        }  # one row ends early, another later, perhaps one never
        same(decode_compiled(model, **asked, steps=steps, asked=True), decode(model, **asked))
    assert len(steps.made) == 1 and steps.unfit is None


@pytest.mark.parametrize(
    "config", [LLAMA, LLAMA.replace(gated=False, activation="relu", n_kv_heads=4, rope_fraction=0.5)]
)
def test_blocks_made_of_kernels_give_the_same_tokens(config):
    plain, model = built(config), built(config, kernels=True)
    assert all(isinstance(block, StepBlock) for block in model.decoder.blocks)
    steps = Steps(model, backend="aot_eager")
    for lengths in ((5,), (3, 9, 6)):
        for sampling in (ch.Sampling(), DRAWN):
            given = {
                **request(config, lengths),
                "max_new_tokens": 30,
                "sampling": sampling,
                "seeds": list(range(len(lengths))),
            }
            same(decode_compiled(model, **given, steps=steps, asked=True), decode(plain, **given))
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
    ours = step_linear(x, weight, None, norm.weight.detach(), 1e-5, True, "silu", added)
    torch.testing.assert_close(ours, torch.nn.functional.silu(pre) * up + added)

    keys, values, angles = torch.randn(3, 2, 16, 8), torch.randn(3, 2, 16, 8), torch.randn(3, 1, 1, 8)
    q, k, v = torch.randn(3, 4, 1, 8), torch.randn(3, 2, 1, 8), torch.randn(3, 2, 1, 8)
    mask = torch.arange(16) <= torch.tensor([[5], [5], [5]])
    mask[1, :3] = False
    turned = [rotate(part, Rotary(angles.cos(), angles.sin()), "half") for part in (q, k)]
    seen = torch.cat([keys[:, :, :5], turned[1]], 2), torch.cat([values[:, :, :5], v], 2)
    wanted = fused(turned[0], *seen, mask[:, None, None, :6])
    qkv = torch.cat([part.reshape(3, 1, -1) for part in (q, k, v)], -1)
    ours = step_attend(
        qkv, keys, values, torch.tensor([5]), mask, angles.cos(), angles.sin(), "half", 4, 8**-0.5, None
    )
    torch.testing.assert_close(ours, wanted.reshape(3, 1, -1))
    torch.testing.assert_close(keys[:, :, 5], turned[1][:, :, 0])


def test_twenty_lengths_need_three_steps_at_most():
    from torch._dynamo.utils import counters

    config = LLAMA.replace(n_layers=1, max_positions=2048)
    model = built(config)
    steps = Steps(model, backend="eager")
    counters.clear()
    for length in range(4, 1904, 95):
        given = {**request(config, (length,)), "max_new_tokens": 20}
        same(decode_compiled(model, **given, steps=steps, asked=True), decode(model, **given))
    assert len(steps.made) <= 3
    assert counters["stats"]["unique_graphs"] <= 3


def test_sizes_go_by_buckets():
    assert [rows_bucket(rows) for rows in (1, 2, 3, 5, 8, 9, 31, 33)] == [1, 2, 4, 8, 8, 16, 32, 40]
    assert [slots_bucket(slots) for slots in (1, 512, 513, 3000)] == [512, 512, 1024, 4096]


def test_rows_that_end_at_once_or_late_by_time():
    model, given = built(LLAMA), request(LLAMA)
    steps = Steps(model, backend="eager")
    first = decode(model, **given, max_new_tokens=1)
    stops = [first[0].ids[0], first[2].ids[0]]
    for sampling in (ch.Sampling(), DRAWN):
        more = {**given, "max_new_tokens": 12, "stop_ids": stops, "sampling": sampling}
        same(decode_compiled(model, **more, steps=steps, asked=True), decode(model, **more))
    late = decode_compiled(model, **given, max_new_tokens=300, deadline=0.0, steps=steps, asked=True)
    assert [(len(row.ids), row.stop_reason) for row in late] == [(1, "time")] * 3


def test_what_cannot_be_compiled_runs_as_it_is_with_a_warning():
    for config, backend in ((LLAMA, "no such compiler"), (DECODER.replace(n_experts=4), "eager")):
        model, given = built(config), {**request(config), "max_new_tokens": 4}
        steps = Steps(model, backend=backend)
        with pytest.warns(RuntimeWarning, match="runs uncompiled"):
            same(decode_compiled(model, **given, steps=steps, asked=True), decode(model, **given))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            decode_compiled(model, **given, steps=steps)  # nobody asked, so nothing is said


def test_generate_compiles_when_asked_and_again_when_weights_change(monkeypatch):
    monkeypatch.setattr("clearhead.bundle.Steps", functools.partial(Steps, backend="eager"))
    torch.manual_seed(0)
    loaded = ch.Model(ch.Transformer(LLAMA.replace(n_layers=1)).eval())
    plain = loaded.generate([1, 2, 3], 8)
    assert loaded._steps is None  # on a CPU only when asked
    assert loaded.generate([1, 2, 3], 8, compile=True).ids == plain.ids
    first = loaded._steps
    assert first is not None and len(first.made) == 1
    loaded.generate([1, 2, 3, 4], 8, compile=True)
    assert loaded._steps is first and len(first.made) == 1
    with torch.no_grad():
        loaded.model.main.norm.weight.mul_(torch.linspace(-1, 1, LLAMA.d_model))
    changed = loaded.generate([1, 2, 3], 8)
    assert changed.ids != plain.ids
    assert loaded.generate([1, 2, 3], 8, compile=True).ids == changed.ids
    assert loaded._steps is not first


def test_a_compiled_step_that_is_made_to_run_uncompiled():
    """As it is while another thread watches the model."""
    model, given = built(DECODER), request(DECODER)
    steps = Steps(model, backend="eager")
    asked = {**given, "max_new_tokens": 40}
    decode_compiled(model, **asked, steps=steps, asked=True)
    with torch.compiler.set_stance("force_eager"):
        found = decode_compiled(model, **asked, steps=steps, asked=True)
        drawn = decode_compiled(model, **asked, sampling=DRAWN, seeds=[3, 4, 5], steps=steps, asked=True)
    same(found, decode(model, **asked))
    same(drawn, decode(model, **asked, sampling=DRAWN, seeds=[3, 4, 5]))


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
