"""State-space layers and short convolutions against their recurrence in float64, their caches and costs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import clearhead as ch
from clearhead.errors import ConfigError
from clearhead.hub.registry import ARCHITECTURES
from clearhead.variants.kinds import Mamba2Kind
from clearhead.variants.state_space import Mamba2, mamba2_steps, ssd
from clearhead.variants.steps import Pass
from tests.harness import scramble, worst

B, K, H, T, E, VALUE, D = 2, 2, 4, 13, 5, 3, 16
STARTS = torch.zeros(B, T, dtype=torch.bool)
STARTS[0, [0, 3, 4, 9]] = True
STARTS[1, [7, 12]] = True


def inputs(length: int = T, seed: int = 0) -> list[Tensor]:
    """Queries, keys, values, log decays, steps."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (B, K, length, E), (B, K, length, E), (B, H, length, VALUE), (B, H, length), (B, H, length)
    q, k, v, g, dt = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return [q, k, v, -g.exp(), dt.exp()]


def by_loop(q, k, v, g, dt, state=None, starts=None) -> tuple[Tensor, Tensor]:
    """One token at a time."""
    q, k = (x.repeat_interleave(H // K, dim=1) for x in (q, k))
    state = v.new_zeros(B, H, E, VALUE) if state is None else state
    found = []
    for t in range(q.shape[2]):
        if starts is not None:
            state = state * ~starts[:, t, None, None, None]
        write = k[:, :, t, :, None] * v[:, :, t, None] * dt[:, :, t, None, None]
        state = state * g[:, :, t, None, None].exp() + write
        found.append((state * q[:, :, t, :, None]).sum(-2))
    return torch.stack(found, dim=2), state


@pytest.mark.ledger("W3")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("entered", [False, True])
@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_chunks_equal_the_recurrence_with_gradients(packed, entered, chunk):
    found, right = [[x.requires_grad_() for x in inputs()] for _ in range(2)]
    memory = torch.randn(B, H, E, VALUE, dtype=torch.float64)
    states = [memory.clone().requires_grad_() if entered else None for _ in range(2)]
    starts = STARTS if packed else None
    probe, last = torch.randn(B, H, T, VALUE, dtype=torch.float64), torch.randn(B, H, E, VALUE).double()
    expected, after = by_loop(*right, states[1], starts)
    ((expected * probe).sum() + (after * last).sum()).backward()
    out, state = ssd(*found, states[0], starts=starts, chunk=chunk)
    ((out * probe).sum() + (state * last).sum()).backward()
    assert max(worst(out, expected), worst(state, after)) <= 1e-10
    pairs = [*zip(found, right), *([states] if entered else [])]
    assert max(worst(x.grad, y.grad) for x, y in pairs) <= 1e-9
    short = [x.detach().float() for x in found]
    out, _ = ssd(*short, memory.float() if entered else None, starts=starts, chunk=chunk)
    assert worst(out.double(), expected) <= 1e-5 * max(1.0, float(expected.abs().max()))


def test_a_strong_decay_does_not_round_what_follows():
    """After one that forgets everything, weak decays still count to the last digit."""
    q, k, v, g, dt = inputs(150)
    g, dt = torch.where(torch.rand(g.shape) < 0.3, -500.0, g * 0.01), dt * 0.1
    right, _ = by_loop(q, k, v, g, dt)
    out, _ = ssd(*(x.float() for x in (q, k, v, g, dt)))
    assert worst(out.double(), right) <= 1e-5 * float(right.abs().max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_off_by_the_rounding_of_its_inputs_and_output(dtype):
    given = [x.to(dtype) for x in inputs(100, seed=2)]
    right, _ = by_loop(*(x.double() for x in given))
    out, state = ssd(*given)
    assert (out.dtype, state.dtype) == (dtype, torch.float32)
    assert worst(out.double(), right) <= torch.finfo(dtype).eps * right.abs().max()


KINDS = {
    "groups": Mamba2Kind(groups=2, d_state=E, norm="groups", dt_min=0.02, dt_max=1.5),
    "one group, biases": Mamba2Kind(d_state=E, kernel=3, bias=True),
    "no bias": Mamba2Kind(d_state=E, kernel=2, conv_bias=False),
}


def mixer(kind: Mamba2Kind, seed: int = 0) -> Mamba2:
    return scramble(Mamba2(D, kind, H, VALUE), seed, spread=0.5).eval()


def vectors(length: int = T) -> Tensor:
    return torch.randn(B, length, D, generator=torch.Generator().manual_seed(5))


def test_gradients_of_a_mixer_are_those_of_finite_differences():
    model = mixer(KINDS["groups"]).double()
    x = vectors().double()[:, :6].requires_grad_()
    real = torch.tensor([[1, 1, 0, 1, 1, 1], [0, 1, 1, 1, 1, 0]], dtype=torch.bool)
    documents = torch.tensor([[1, 1, 1, 1, 2, 2], [3, 3, 3, 4, 4, 4]])
    assert torch.autograd.gradcheck(lambda x: model(x, real, documents)[real], (x,), fast_mode=True)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("length", [1, 13, 64, 150])
def test_the_stated_cost_is_what_torch_counts(name, length):
    model, kind = mixer(KINDS[name]), KINDS[name]
    steps = list(mamba2_steps(Pass(B, 4), "m", length, D, kind, H, VALUE))
    assert sum(step.parameters for step in steps) == sum(weight.numel() for weight in model.parameters())
    x = vectors(length).requires_grad_()
    with FlopCounterMode(display=False) as forward:
        y = model(x)
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    assert sum(step.forward for step in steps) == forward.get_total_flops()
    assert sum(step.backward for step in steps) == backward.get_total_flops()


def test_time_grows_with_the_length_alone():
    """FLOPs a token are the same at 1,024 and 65,536 tokens, where those of attention grow 40-fold."""
    sizes = {"vocab_size": 64, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_positions": 65536}
    kinds = {"mamba2(d_state=16)": (0.999, 1.001), "conv(3)": (0.999, 1.001), "full": (20, 70)}
    for attention, (low, high) in kinds.items():
        config = ch.ModelConfig(attention=attention, positions="none", **sizes)
        short, long = (ch.cost(config, length) for length in (1024, 65536))
        growth = long.flops.forward_per_token / short.flops.forward_per_token
        assert low <= growth <= high
        assert attention == "full" or short.memory.kv_cache == long.memory.kv_cache


PUBLISHED = {
    "mamba2": (
        2_702_599_680,  # state-spaces/mamba2-2.7b
        dict(vocab_size=50288, hidden_size=2560, num_hidden_layers=64, num_heads=80, n_groups=1)
        | dict(tie_word_embeddings=True),
    ),
    "lfm2": (
        1_170_340_608,  # LFM2-1.2B
        dict(vocab_size=65536, hidden_size=2048, num_hidden_layers=16, full_attn_idxs=[2, 5, 8, 10, 12, 14]),
    ),
    "nemotron_h": (
        8_100_852_736,  # Nemotron-H-8B
        dict(hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_size(name):
    size, theirs = PUBLISHED[name]
    assert ch.cost(ARCHITECTURES[name].read(theirs), 16).parameters.total == size


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"attention": "mamba2(3, groups=2)"}, "3 heads, no multiple of its 2 groups"),
        ({"attention": "mamba2(dt_min=2, dt_max=1)"}, "raise dt_max"),
        ({"attention": "mamba2(dt_min=few)"}, "dt_min few: it must be a number"),
        ({"attention": "mamba2(bias=yes)"}, 'bias "yes": choose from False, True'),
        ({"attention": "mamba2", "family": "encoder"}, "it is for decoders"),
        ({"attention": "none", "feedforward_skips": (1,)}, 'layer 1 has attention "none" and is in'),
        ({"feedforward_skips": (3,)}, "names layer 3, and there are layers 0 to 2"),
        ({"feedforward_skips": (1,), "norm_position": "post"}, "leave norm_position post out"),
        ({"attention": "none", "parallel": True}, "leave parallel out"),
        ({"feedforward_skips": (1,), "layer_groups": 1}, "share weights by layer_groups"),
    ],
)
def test_what_no_layer_can_be_is_refused(fields, says):
    with pytest.raises(ConfigError, match=says):
        ch.ModelConfig(vocab_size=9, d_model=16, n_heads=4, n_layers=3, **fields)
