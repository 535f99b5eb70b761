"""Positions: exact angles at any length and dtype, published tables, both RoPE layouts, every scaling."""

from __future__ import annotations

import math

import pytest
import torch
import transformers

import clearhead as ch
from clearhead.core.positions import (
    alibi_slopes,
    rope_frequencies,
    rotate,
    sinusoid,
)
from clearhead.variants.positions import relative_bucket
from tests.harness import build, config, some_ids, worst

FAR = torch.tensor([[0, 1, 17, 4_095, 65_536]])


def angles_in_python(position: int, width: int, base: float) -> tuple[list[float], list[float]]:
    """cos and sin of each pair, one number at a time."""
    angles = [position * base ** (-2 * i / width) for i in range(width // 2)]
    return [math.cos(a) for a in angles], [math.sin(a) for a in angles]


def rope_order(width: int, layout: str) -> torch.Tensor:
    """Return, for each column of `layout`, its number in the other layout: a permutation of `width`.

    `weight[rope_order(E, "half")]` turns the rows of an interleaved query or key projection into half-split
    ones, exactly; `weight[rope_order(E, "interleaved")]` turns them back.
    """
    half_split = torch.cat([torch.arange(0, width, 2), torch.arange(1, width, 2)])
    return half_split if layout == "half" else half_split.argsort()


@pytest.mark.ledger("B4")
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("how", ["float32", "bfloat16", "autocast", "compiled in bfloat16"])
def test_rope_angles_are_exact_far_out_in_any_dtype(layout, how):
    model = ch.Transformer(config(positions="rope", d_model=64, n_heads=2, rope_layout=layout))
    if "bfloat16" in how:
        model.bfloat16()
    scheme = model.decoder.positions
    ask = torch.compile(scheme.rotary, backend="aot_eager") if "compiled" in how else scheme.rotary
    with torch.autocast(FAR.device.type, torch.bfloat16, enabled=how == "autocast"):
        rotary = ask(FAR, None)
    assert rotary.cos.dtype == rotary.sin.dtype == torch.float32
    for number, position in enumerate(FAR[0].tolist()):
        cos, sin = angles_in_python(position, 32, 10_000.0)
        for table, expected in ((rotary.cos, cos), (rotary.sin, sin)):
            found = table[0, 0, number]
            pairs = found[::2] if layout == "interleaved" else found[:16]
            assert worst(pairs.double(), torch.tensor(expected, dtype=torch.float64)) <= 1e-6


@pytest.mark.ledger("B4")
def test_a_bfloat16_model_really_uses_those_angles():
    """Far out, q recorded from a bfloat16 forward pass is the float64 rotation of its projection."""
    model = build(positions="rope", n_layers=1).bfloat16()
    positions = torch.tensor([[4_095, 65_536]])
    with ch.record(model, "blocks.0.attention.q") as seen, torch.no_grad():
        model(some_ids(1, 2), positions=positions)
        near = ch.record(model, "blocks.0.attention.q")
        with near as plain:
            model(some_ids(1, 2), positions=torch.zeros_like(positions))
    for slot, position in enumerate(positions[0].tolist()):
        cos, sin = (torch.tensor(x, dtype=torch.float64) for x in angles_in_python(position, 4, 10_000.0))
        a, b = plain["blocks.0.attention.q"][0, :, slot].double().chunk(2, -1)
        expected = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        assert (
            worst(seen.calls("blocks.0.attention.q")[0][0, :, slot].double(), expected)
            <= 2**-8 * expected.abs().max().item()
        )


@pytest.mark.ledger("B4")
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_scores_depend_on_the_distance_alone(layout):
    model = build(positions="rope", rope_layout=layout).double()
    ids = some_ids(1, 6)
    with torch.no_grad(), ch.record(model, "blocks.0.attention.scores") as seen:
        near = model(ids).logits
        far = model(ids, positions=torch.arange(6)[None] + 50_000).logits
        stretched = model(ids, positions=torch.arange(6)[None] * 2).logits
    first, second, third = seen.calls("blocks.0.attention.scores")
    allowed = torch.ones(6, 6, dtype=torch.bool).tril()
    assert worst(first[..., allowed], second[..., allowed]) <= 1e-6
    assert worst(near, far) <= 1e-6
    assert worst(first[..., allowed], third[..., allowed]) > 1e-2
    assert worst(near, stretched) > 1e-3


@pytest.mark.ledger("B4")
@pytest.mark.cpu
def test_layouts_convert_into_each_other_exactly():
    for fraction, width in ((1.0, 8), (0.5, 4)):
        shape = {"positions": "rope", "d_head": 8, "rope_fraction": fraction, "qk_norm": "none"}
        interleaved, half = build(rope_layout="interleaved", **shape), build(rope_layout="half", **shape)
        assert torch.equal(rope_order(width, "half")[rope_order(width, "interleaved")], torch.arange(width))
        order = torch.cat([rope_order(width, "half"), torch.arange(width, 8)])
        for block in half.decoder.blocks:
            for part in (block.attention.q, block.attention.k):
                rows = torch.cat([order + 8 * head for head in range(4)])
                part.weight.data, part.bias.data = part.weight[rows].detach(), part.bias[rows].detach()
        ids = some_ids(2, 8)
        with torch.no_grad():
            assert worst(half(ids).logits, interleaved(ids).logits) <= 1e-6
    x = torch.randn(1, 2, 5, 8)
    turned = {}
    for layout, columns in (("interleaved", x), ("half", x[..., rope_order(8, "half")])):
        rotary = ch.Transformer(
            config(positions="rope", d_head=8, rope_layout=layout)
        ).decoder.positions.rotary(torch.arange(5)[None], None)
        turned[layout] = rotate(columns, rotary, layout)
    assert torch.equal(turned["half"], turned["interleaved"][..., rope_order(8, "half")])
    assert torch.equal(turned["half"][..., rope_order(8, "interleaved")], turned["interleaved"])


FACTORS = (tuple(1 + 0.1 * i for i in range(16)), tuple(1 + 0.5 * i for i in range(16)))
MSCALE = dict(mscale=1.0, mscale_all_dim=0.7, beta_fast=16.0, truncate=False)
SCALINGS = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 3.0},
    "llama3": dict(factor=8.0, original_positions=256, low_frequency_factor=1.0, high_frequency_factor=4.0),
    "yarn": {"factor": 4.0, "original_positions": 256},
    "yarn mscale": {"factor": 40.0, "original_positions": 256, **MSCALE},
    "yarn given": {"factor": 4.0, "original_positions": 256, "attention_factor": 1.3, "beta_slow": 2.0},
    "longrope": dict(original_positions=256, short_factor=FACTORS[0], long_factor=FACTORS[1]),
}
THEIRS = {"original_positions": "original_max_position_embeddings"} | {
    f"{end}_frequency_factor": f"{end}_freq_factor" for end in ("low", "high")
}


@pytest.mark.ledger("B4")
@pytest.mark.parametrize("length", [100, 256, 300, 2_000])
@pytest.mark.parametrize("name", list(SCALINGS))
@pytest.mark.cpu
def test_scaled_frequencies_equal_the_reference(name, length):
    kind = name.split()[0]
    ours = SCALINGS[name]
    theirs = {THEIRS.get(name, name): list(x) if type(x) is tuple else x for name, x in ours.items()}
    reference = transformers.LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": kind, "rope_theta": 10_000.0, **theirs},
    )
    expected, factor = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind](
        reference, torch.device("cpu"), seq_len=length
    )
    found, our_factor = rope_frequencies(
        32, 10_000.0, ch.RopeScaling(kind=kind, **ours), 1024, torch.arange(length)[None]
    )
    torch.testing.assert_close(found, expected.double(), rtol=1e-6, atol=0)
    assert our_factor == pytest.approx(factor, rel=1e-9)
    if kind == "dynamic" and length < 1024:
        plain, _ = rope_frequencies(32, 10_000.0, None, 1024, torch.arange(length)[None])
        assert torch.equal(found, plain)


@pytest.mark.ledger("B5")
@pytest.mark.parametrize("both_sides", [True, False])
@pytest.mark.parametrize(("buckets", "most"), [(32, 128), (8, 20), (64, 256)])
def test_relative_buckets_equal_the_reference(both_sides, buckets, most):
    distance = torch.arange(-600, 601)[None]
    expected = transformers.models.t5.modeling_t5.T5Attention._relative_position_bucket(
        distance, both_sides, buckets, most
    )
    found = relative_bucket(distance, both_sides, buckets, most)
    assert torch.equal(found, expected)
    assert found.unique().numel() >= buckets - 1


@pytest.mark.ledger("B6")
@pytest.mark.parametrize("n_heads", [1, 2, 3, 4, 6, 8, 12, 16, 20, 40])
@pytest.mark.cpu
def test_alibi_slopes_equal_the_reference(n_heads):
    bloom = transformers.models.bloom.modeling_bloom.build_alibi_tensor(
        torch.ones(1, 2), n_heads, torch.float32
    ).view(n_heads, 2)[:, 1]
    assert worst(alibi_slopes(n_heads).float(), bloom) <= 1e-7
    # The other reference orders the slopes of other head counts in its own way.
    if n_heads & (n_heads - 1) == 0:
        mpt = -transformers.models.mpt.modeling_mpt.build_mpt_alibi_tensor(n_heads, 2).view(n_heads, 2)[:, 0]
        assert worst(alibi_slopes(n_heads).float(), mpt) <= 1e-7


@pytest.mark.ledger("B2")
@pytest.mark.parametrize("width", [1, 4, 7, 16])
@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_sinusoid_equals_a_loop(width, layout):
    found = sinusoid(torch.arange(50), width, layout)
    for position in range(50):
        waves = [
            (math.sin, math.cos)[column % 2](position / 10_000 ** ((column - column % 2) / width))
            for column in range(width)
        ]
        if layout == "half":
            waves = waves[::2] + waves[1::2]
        assert worst(found[position], torch.tensor(waves, dtype=torch.float64)) <= 1e-12


@pytest.mark.ledger("E4")
@pytest.mark.parametrize("class_token", [False, True])
def test_images_have_two_dimensional_waves(class_token):
    choices = {
        "family": "encoder",
        "input": "patches",
        "image_size": (12, 8),
        "patch_size": 4,
        "n_classes": 3,
        "class_token": class_token,
    }
    scheme = build(positions="sinusoidal", **choices).encoder.positions
    length = 6 + class_token
    found = scheme.embed(torch.arange(length)[None], torch.float64)[0]
    if class_token:
        assert not found[0].any()
        found = found[1:]
    for patch in range(6):
        row, column = divmod(patch, 2)
        expected = torch.cat([sinusoid(torch.tensor(row), 8), sinusoid(torch.tensor(column), 8)])
        assert torch.equal(found[patch], expected)
