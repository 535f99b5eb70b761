"""Taps: every activation by its frozen name, recorded or changed, and free when nobody listens."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest
import torch

import clearhead as ch
from clearhead.core import attention as attention_module
from clearhead.core.attention import KERNELS
from clearhead.core.taps import SILENT, LiveTap, tap_for
from tests.harness import build, config, in_pieces, some_ids, worst


def source_for(model: ch.Transformer) -> dict[str, torch.Tensor]:
    both = model.config.encoder is not None and model.config.decoder is not None
    return {"source": some_ids(2, 5, seed=2)} if both else {}


# The names below are public API: a change here is a breaking change.
DECODER = """
    embedding
    blocks.0.resid_pre
    blocks.0.attention.q blocks.0.attention.k blocks.0.attention.v
    blocks.0.attention.scores blocks.0.attention.pattern blocks.0.attention.z blocks.0.attention.out
    blocks.0.resid_mid
    blocks.0.feedforward.in blocks.0.feedforward.pre blocks.0.feedforward.post blocks.0.feedforward.out
    blocks.0.resid_post
    hidden logits
"""
PARALLEL = DECODER.replace("    blocks.0.resid_mid\n", "")
EXPERTS = DECODER.replace(
    " blocks.0.feedforward.pre blocks.0.feedforward.post blocks.0.feedforward.out\n",
    """
    blocks.0.feedforward.router
    blocks.0.feedforward.experts.0.pre blocks.0.feedforward.experts.0.post blocks.0.feedforward.experts.0.out
    blocks.0.feedforward.experts.1.pre blocks.0.feedforward.experts.1.post blocks.0.feedforward.experts.1.out
    blocks.0.feedforward.out
    """,
)
BOTH = """
    encoder.embedding
    encoder.blocks.0.resid_pre
    encoder.blocks.0.attention.q encoder.blocks.0.attention.k encoder.blocks.0.attention.v
    encoder.blocks.0.attention.scores encoder.blocks.0.attention.pattern
    encoder.blocks.0.attention.z encoder.blocks.0.attention.out
    encoder.blocks.0.resid_mid
    encoder.blocks.0.feedforward.in
    encoder.blocks.0.feedforward.pre encoder.blocks.0.feedforward.post encoder.blocks.0.feedforward.out
    encoder.blocks.0.resid_post
    encoder.hidden
    embedding
    blocks.0.resid_pre
    blocks.0.attention.q blocks.0.attention.k blocks.0.attention.v
    blocks.0.attention.scores blocks.0.attention.pattern blocks.0.attention.z blocks.0.attention.out
    blocks.0.cross.q blocks.0.cross.k blocks.0.cross.v
    blocks.0.cross.scores blocks.0.cross.pattern blocks.0.cross.z blocks.0.cross.out
    blocks.0.resid_mid
    blocks.0.feedforward.in blocks.0.feedforward.pre blocks.0.feedforward.post blocks.0.feedforward.out
    blocks.0.resid_post
    hidden logits
"""
FROZEN = {
    "decoder": ({"family": "decoder"}, DECODER),
    "encoder": ({"family": "encoder"}, DECODER),
    "encoder-decoder": ({"family": "encoder-decoder"}, BOTH),
    "parallel": ({"family": "decoder", "parallel": True}, PARALLEL),
    "experts": ({"family": "decoder", "n_experts": 2}, EXPERTS),
}


@pytest.mark.ledger("K1")
@pytest.mark.parametrize("name", list(FROZEN))
def test_names_are_frozen_and_all_are_seen_in_order(name):
    choices, names = FROZEN[name]
    model = build(n_layers=1, **choices)
    assert ch.tap_names(model.config) == names.split()
    with ch.record(model, "*") as seen, torch.no_grad():
        model(some_ids(), **source_for(model))
    assert list(seen) == names.split()  # each is seen, in the order of the forward pass
    assert all(len(seen.calls(tap)) == 1 for tap in seen)


@pytest.mark.ledger("K1")
@pytest.mark.parametrize("family", ["decoder", "encoder", "encoder-decoder"])
def test_what_is_recorded_is_what_the_names_say(family):
    """The residual stream adds up; z and out, pre and post, hidden and logits follow from each other."""
    model, ids = build(family=family, n_kv_heads=2), some_ids()
    with ch.record(model, "*") as seen, torch.no_grad():
        model(ids, **source_for(model))
    for layer in range(2):
        at, block = f"blocks.{layer}.", model.main.blocks[layer]
        cross = seen[at + "cross.out"] if family == "encoder-decoder" else 0
        assert (
            worst(seen[at + "resid_pre"] + seen[at + "attention.out"] + cross, seen[at + "resid_mid"]) <= 1e-6
        )
        assert worst(seen[at + "resid_mid"] + seen[at + "feedforward.out"], seen[at + "resid_post"]) <= 1e-6
        assert (
            worst(torch.nn.functional.gelu(seen[at + "feedforward.pre"]), seen[at + "feedforward.post"])
            <= 1e-6
        )
        assert (
            worst(
                block.attention.out(seen[at + "attention.z"].transpose(1, 2).flatten(2)),
                seen[at + "attention.out"],
            )
            <= 1e-6
        )
        keys = seen[at + "attention.k"].repeat_interleave(2, dim=1)
        values = seen[at + "attention.v"].repeat_interleave(2, dim=1)
        scores, pattern = (
            seen[at + "attention.q"] @ keys.transpose(-1, -2) / 2,
            seen[at + "attention.pattern"],
        )
        allowed = pattern > 0
        assert worst(scores[allowed], seen[at + "attention.scores"][allowed]) <= 1e-5
        assert pattern.shape == (2, 4, 8, 8)
        assert worst(pattern.sum(-1), torch.ones(2, 4, 8)) <= 1e-6
        assert worst(pattern @ values, seen[at + "attention.z"]) <= 1e-6
        if family != "encoder":
            assert not pattern.triu(1).any()
    assert worst(seen["blocks.0.resid_post"], seen["blocks.1.resid_pre"]) == 0
    assert worst(model.main.norm(seen["blocks.1.resid_post"]), seen["hidden"]) <= 1e-6
    assert worst(model.head(seen["hidden"], None), seen["logits"]) <= 1e-6


@pytest.mark.ledger("K1", "C5")
@pytest.mark.parametrize("family", ["decoder", "encoder", "encoder-decoder"])
def test_recording_changes_no_output(family):
    model, ids = build(family=family), some_ids()
    given = source_for(model)
    silent = model(ids, **given).logits
    quiet = [name for name in ch.tap_names(model.config) if not name.endswith(("scores", "pattern"))]
    with ch.record(model, *quiet):
        assert torch.equal(model(ids, **given).logits, silent)
    with ch.record(model, "*"):
        assert worst(model(ids, **given).logits, silent) <= 1e-5  # eager in place of fused
    with ch.edit(model, dict.fromkeys(quiet, lambda x: x)):
        assert torch.equal(model(ids, **given).logits, silent)


@pytest.mark.ledger("C5")
def test_a_listener_on_one_pattern_moves_that_layer_alone(monkeypatch):
    model, ids, calls = build(n_layers=4), some_ids(), []

    def counting(name):
        def attend(q, *given, tap, **more):
            calls.append((name, getattr(tap, "prefix", "")))
            return KERNELS[name](q, *given, tap=tap, **more)

        return attend

    monkeypatch.setattr(attention_module, "KERNELS", {name: counting(name) for name in KERNELS})
    with ch.record(model, "blocks.2.attention.pattern") as seen, torch.no_grad():
        model(ids)
    assert [name for name, _ in calls] == ["fused", "fused", "eager", "fused"]
    assert calls[2][1] == "blocks.2.attention."
    assert list(seen) == ["blocks.2.attention.pattern"]
    calls.clear()
    with torch.no_grad(), ch.edit(model, {"blocks.*.attention.scores": lambda x: x}):
        model(ids)
    assert [name for name, _ in calls] == ["eager"] * 4
    calls.clear()
    with torch.no_grad(), ch.record(model, "blocks.*.attention.z"):
        model(ids)
    assert [name for name, _ in calls] == ["fused"] * 4


@pytest.mark.ledger("K1")
@pytest.mark.parametrize("part", ["attention", "cross"])
def test_zeroing_z_equals_zeroing_columns_of_out(part):
    model, ids = build(family="encoder-decoder"), some_ids()
    given = source_for(model)

    def without_head_2(z):
        z = z.clone()
        z[:, 2] = 0
        return z

    with torch.no_grad():
        whole = model(ids, **given).logits
        with ch.edit(model, {f"blocks.1.{part}.z": without_head_2}):
            edited = model(ids, **given).logits
        getattr(model.decoder.blocks[1], part).out.weight[:, 8:12] = 0
        assert worst(edited, model(ids, **given).logits) <= 1e-6
    assert worst(edited, whole) > 1e-3


@pytest.mark.ledger("K1")
def test_editing_a_pattern_mixes_other_values():
    """Uniform attention over everything, put in by hand: z is the mean of the values."""
    model = build(family="encoder")
    uniform = {"blocks.0.attention.pattern": lambda p: torch.full_like(p, 1 / p.shape[-1])}
    with ch.edit(model, uniform), ch.record(model, "blocks.0.attention.*") as seen:
        model(some_ids())
    mean = seen["blocks.0.attention.v"].mean(2, keepdim=True).expand(2, 4, 8, 4)
    assert worst(seen["blocks.0.attention.z"], mean) <= 1e-6


@pytest.mark.ledger("K1")
def test_cached_steps_are_recorded_one_by_one():
    model, ids = build(), some_ids(2, 6)
    with torch.no_grad():
        with ch.record(model, "*.q", "*.pattern") as whole:
            model(ids)
        with ch.record(model, "*.q", "*.pattern") as steps:
            in_pieces(model, ids, [3, 1, 1, 1], ch.Cache())
    assert [q.shape[2] for q in steps.calls("blocks.1.attention.q")] == [3, 1, 1, 1]
    assert worst(torch.cat(steps.calls("blocks.1.attention.q"), 2), whole["blocks.1.attention.q"]) <= 1e-5
    for t, pattern in enumerate(steps.calls("blocks.1.attention.pattern")[1:], start=3):
        assert worst(pattern, whole["blocks.1.attention.pattern"][:, :, t : t + 1, : t + 1]) <= 1e-5
    assert torch.equal(steps["blocks.0.attention.q"], steps.calls("blocks.0.attention.q")[-1])


@pytest.mark.ledger("K1")
def test_an_edit_holds_in_cached_steps():
    model, ids = build(positions="rope"), some_ids()
    with torch.no_grad(), ch.edit(model, {"blocks.0.attention.z": lambda z: z * 0.5}):
        assert worst(in_pieces(model, ids, [3, 1, 4], ch.Cache()), model(ids).logits) <= 1e-5


@pytest.mark.ledger("K1")
def test_listeners_nest_in_the_order_they_came():
    model, ids = build(), some_ids()
    with torch.no_grad():
        with (
            ch.record(model, "hidden") as before,
            ch.edit(model, {"hidden": lambda x: x + 1}),
            ch.edit(model, {"hidden": lambda x: x * 2}),
            ch.record(model, "hidden") as after,
        ):
            out = model(ids)
        assert torch.equal(after["hidden"], (before["hidden"] + 1) * 2)
        assert torch.equal(out.hidden, after["hidden"])
        assert torch.equal(model(ids).hidden, before["hidden"])  # all is as it was afterwards


@pytest.mark.ledger("K1")
def test_recording_can_keep_the_graph():
    model, ids = build(), some_ids()
    with (
        ch.record(model, "blocks.0.resid_post") as cut,
        ch.record(model, "blocks.0.resid_post", detach=False) as kept,
    ):
        logits = model(ids).logits
    assert not cut["blocks.0.resid_post"].requires_grad
    assert torch.autograd.grad(logits.sum(), kept["blocks.0.resid_post"])[0].any()


@pytest.mark.ledger("K1")
def test_other_threads_and_other_models_do_not_notice():
    model, other, ids = build(seed=1), build(seed=2), some_ids()
    expected, found = model(ids).logits, []
    with ch.edit(model, {"logits": lambda x: x * 0}), ch.record(model, "logits") as seen:
        thread = threading.Thread(target=lambda: found.append(model(ids).logits))
        thread.start()
        thread.join()
        assert other(ids).logits.any()
        assert len(seen) == 0
        assert not model(ids).logits.any()
    assert torch.equal(found[0], expected)
    assert len(seen.calls("logits")) == 1


@pytest.mark.ledger("K1")
def test_mistakes_in_names_and_shapes():
    model, ids = build(), some_ids()
    with (
        pytest.raises(ch.InputError, match=r'did you mean "blocks.1.attention.pattern"'),
        ch.record(model, "blocks.1.attention.patern"),
    ):
        pass
    with (
        pytest.raises(ch.InputError, match="no activation is called"),
        ch.edit(model, {"blocks.7.*": lambda x: x}),
    ):
        pass
    with (
        pytest.raises(ch.InputError, match=r"edit of hidden gave .* shape"),
        ch.edit(model, {"hidden": lambda x: x[:, :1]}),
    ):
        model(ids)
    with (
        pytest.raises(ch.InputError, match="shape and dtype must stay"),
        ch.edit(model, {"hidden": lambda x: x.double()}),
    ):
        model(ids)
    assert tap_for(model) is SILENT  # the listener is gone although the forward failed
    with ch.record(model, "hidden") as seen:
        with pytest.raises(KeyError, match="nothing yet"):
            seen["hidden"]
        model(ids)
        with pytest.raises(KeyError, match='did you mean "hidden"'):
            seen.calls("hiden")


@pytest.mark.ledger("K1")
@pytest.mark.cpu  # a forward pass there is what the time is compared with
def test_silence_costs_at_most_one_per_cent():
    """Count what all silent taps of a forward pass cost against the pass; do not guess from noisy runs."""
    model = ch.Transformer(config(d_model=256, n_layers=4, n_heads=4, d_ff=1024, max_positions=64)).eval()
    ids, x = some_ids(1, 64), torch.zeros(1)
    calls = Counter()

    class Counting(LiveTap):
        def __call__(self, name, x):
            calls["call"] += 1
            return x

        def step(self, name, x):
            calls["step"] += 1
            return x

        def part(self, name):
            calls["part"] += 1
            return self

        def wants(self, *names):
            calls["wants"] += 1
            return False

    def fastest(action, repeats: int) -> float:
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            action()
            times.append(time.perf_counter() - start)
        return min(times)

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("clearhead.core.transformer.tap_for", lambda model: Counting(()))
        model(ids)
    # Scores and pattern stay inside the fused kernel.
    assert calls["call"] == len(ch.tap_names(model.config)) - 2 * 4
    with torch.no_grad():
        forward = fastest(lambda: model(ids), 30)

    def all_taps():
        for _ in range(calls["call"]):
            SILENT("q", x)
        for _ in range(calls["step"]):
            SILENT.step("q", x)
        for _ in range(calls["part"]):
            SILENT.part(f"blocks.{0}")
        for _ in range(calls["wants"]):
            SILENT.wants("scores", "pattern")
        tap_for(model)

    assert fastest(all_taps, 200) <= 0.01 * forward


def wrappers(m: ch.Model) -> dict[str, object]:
    """Everything that people hold in their hands when they mean the model."""
    compiled = torch.compile(m.model, backend="eager")
    return {
        "load's result": m,
        "the module": m.model,
        "compiled": compiled,
        "parallel": torch.nn.DataParallel(m.model),
        "both": torch.nn.DataParallel(compiled),
    }


@pytest.mark.parametrize("name", ["load's result", "the module", "compiled", "parallel", "both"])
def test_taps_take_a_model_in_any_wrapper(name):
    m = ch.Model(build())
    model, ids = wrappers(m)[name], some_ids()
    call = m.model if isinstance(model, ch.Model) else model
    with torch.no_grad():
        plain = call(ids).logits
        with ch.record(model, "blocks.0.resid_post") as seen, ch.edit(model, {"logits": lambda x: x * 2}):
            assert torch.equal(call(ids).logits, plain * 2)
        assert seen["blocks.0.resid_post"].shape[:2] == ids.shape
        with ch.attending(model, "eager"):
            assert {part.kernel for part in m.model.modules() if hasattr(part, "kernel")} == {"eager"}
    assert ch.Model(call).generate(ids[0, :4], 3).ids == m.generate(ids[0, :4], 3).ids


@pytest.mark.parametrize("other", [torch.nn.Linear(2, 2), {"a": 1}, "decoder", None])
def test_what_is_no_model_is_refused(other):
    for take in (lambda: ch.record(other, "logits"), lambda: ch.edit(other, {"logits": torch.relu})):
        with pytest.raises(ch.InputError, match=r"is not a model of clearhead: give what ch\.load returns"):
            take().__enter__()


def test_an_edit_that_returns_nothing_leaves_the_value():
    """As PyTorch's hooks do; what is changed in place stays changed."""
    model = build()
    ids, seen = some_ids(), []
    plain = model(ids).logits
    with ch.edit(model, {"blocks.*.resid_post": seen.append}):
        assert torch.equal(model(ids).logits, plain)
    assert len(seen) == model.config.n_layers
    with torch.no_grad(), ch.edit(model, {"blocks.0.resid_post": lambda x: setattr(x, "data", -x)}):
        assert not torch.allclose(model(ids).logits, plain)
    with (
        ch.edit(model, {"logits": lambda x: 3}),
        pytest.raises(ch.InputError, match="return a tensor, or None"),
    ):
        model(ids)
