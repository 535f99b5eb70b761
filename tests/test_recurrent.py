"""Recurrent layers: each rule against its recurrence in float64, its caches, its stated cost, transformers'.

State-space layers (Mamba-2), the gated delta rule and short convolutions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import clearhead as ch
from clearhead.core.taps import Tap
from clearhead.errors import ConfigError, InputError
from clearhead.hub.registry import ARCHITECTURES
from clearhead.variants.gated_delta import GatedDelta, gated_delta, gated_delta_steps
from clearhead.variants.kinds import Mamba2Kind
from clearhead.variants.recurrent import RecurrentState
from clearhead.variants.state_space import Mamba2, mamba2_steps, ssd
from clearhead.variants.steps import Pass
from tests.harness import scramble, worst

B, K, H, T, E, VALUE, D = 2, 2, 4, 13, 5, 3, 16
STARTS = torch.zeros(B, T, dtype=torch.bool)
STARTS[0, [0, 3, 4, 9]] = True
STARTS[1, [7, 12]] = True


class Rule(NamedTuple):
    """A rule of states: its function, one token of it, and what its inputs must be."""

    run: Callable[..., tuple[Tensor, Tensor]]
    token: Callable[..., tuple[Tensor, Tensor]]  # state, q, k, v, decay, strength -> state, answer
    strength: Callable[[Tensor], Tensor]  # of what is written
    key: Callable[[Tensor], Tensor]
    lengths: tuple[int, int]  # of rows with strong decays, of rows in half precision
    written: float = 1.0  # how much of its strength a rule without a limit is given with strong decays


def mamba_token(state, q, k, v, decay, dt):
    state = state * decay + k[..., None] * v[..., None, :] * dt
    return state, (state * q[..., None]).sum(-2)


def delta_token(state, q, k, v, decay, beta):
    state = state * decay
    delta = (v - (state * k[..., None]).sum(-2)) * beta[..., 0]
    state = state + k[..., None] * delta[..., None, :]
    return state, (state * q[..., None]).sum(-2) * E**-0.5


NORMAL = partial(torch.nn.functional.normalize, dim=-1)
RULES = {
    "mamba2": Rule(ssd, mamba_token, torch.exp, lambda k: k, (150, 100), 0.1),
    "gated delta": Rule(gated_delta, delta_token, torch.sigmoid, NORMAL, (64, 300)),
}
CHUNKS: list[tuple[str, dict[str, Any]]] = [
    *(("mamba2", {"chunk": chunk}) for chunk in (1, 4, 64)),
    *(("gated delta", {"chunk": chunk}) for chunk in (1, 4, 64)),
    *(("gated delta", {"chunk": chunk, "group": group}) for chunk, group in ((1, 3), (2, 4), (4, 4))),
]


def inputs(rule: Rule, length: int = T, seed: int = 0) -> list[Tensor]:
    """Queries, keys, values, log decays, strengths."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (B, K, length, E), (B, K, length, E), (B, H, length, VALUE), (B, H, length), (B, H, length)
    q, k, v, g, s = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [q, rule.key(k), v, -g.exp(), rule.strength(s)]


def by_loop(rule: Rule, q, k, v, g, strength, state=None, starts=None) -> tuple[Tensor, Tensor]:
    """One token at a time."""
    q, k = (x.repeat_interleave(H // K, dim=1) for x in (q, k))
    state = v.new_zeros(B, H, E, VALUE) if state is None else state
    answers = []
    for t in range(q.shape[2]):
        if starts is not None:
            state = state * ~starts[:, t, None, None, None]
        decay, write = (x[:, :, t, None, None] for x in (g.exp(), strength))
        state, answer = rule.token(state, q[:, :, t], k[:, :, t], v[:, :, t], decay, write)
        answers.append(answer)
    return torch.stack(answers, dim=2), state


@pytest.mark.ledger("W3")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("entered", [False, True])
@pytest.mark.parametrize(("name", "chunks"), CHUNKS, ids=str)
def test_chunks_equal_the_recurrence_with_gradients(name, chunks, packed, entered):
    rule = RULES[name]
    found, right = [[x.requires_grad_() for x in inputs(rule)] for _ in range(2)]
    memory = torch.randn(B, H, E, VALUE, dtype=torch.float64)
    states = [memory.clone().requires_grad_() if entered else None for _ in range(2)]
    starts = STARTS if packed else None
    probe, last = torch.randn(B, H, T, VALUE, dtype=torch.float64), torch.randn(B, H, E, VALUE).double()
    expected, after = by_loop(rule, *right, states[1], starts)
    ((expected * probe).sum() + (after * last).sum()).backward()
    out, state = rule.run(*found, states[0], starts=starts, **chunks)
    ((out * probe).sum() + (state * last).sum()).backward()
    assert max(worst(out, expected), worst(state, after)) <= 1e-10
    pairs = [*zip(found, right), *([states] if entered else [])]
    assert max(worst(x.grad, y.grad) for x, y in pairs) <= 1e-9
    short = [x.detach().float() for x in found]
    out, _ = rule.run(*short, memory.float() if entered else None, starts=starts, **chunks)
    assert worst(out.double(), expected) <= 1e-5 * max(1.0, float(expected.detach().abs().max()))


@pytest.mark.parametrize("name", RULES)
def test_a_strong_decay_does_not_round_what_follows(name):
    """After one that forgets everything, weak decays still count to the last digit."""
    rule = RULES[name]
    q, k, v, g, strength = inputs(rule, rule.lengths[0])
    g, strength = torch.where(torch.rand(g.shape) < 0.3, -500.0, g * 0.01), strength * rule.written
    right, _ = by_loop(rule, q, k, v, g, strength)
    out, _ = rule.run(*(x.float() for x in (q, k, v, g, strength)))
    assert worst(out.double(), right) <= 1e-5 * max(1.0, float(right.abs().max()))


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_off_by_the_rounding_of_its_inputs_and_output(name, dtype):
    rule = RULES[name]
    given = [x.to(dtype) for x in inputs(rule, rule.lengths[1], seed=2)]
    right, _ = by_loop(rule, *(x.double() for x in given))
    out, state = rule.run(*given)
    assert (out.dtype, state.dtype) == (dtype, torch.float32)
    assert worst(out.double(), right) <= torch.finfo(dtype).eps * right.abs().max()
    with torch.autocast("cpu", torch.bfloat16):
        cast, _ = rule.run(*(x.float() for x in given))
    assert worst(cast.double(), right) <= 1e-5 * max(1.0, float(right.abs().max()))


KINDS = {
    "groups": Mamba2Kind(groups=2, d_state=E, norm="groups", dt_min=0.02, dt_max=1.5),
    "one group, biases": Mamba2Kind(d_state=E, kernel=3, bias=True),
    "no bias": Mamba2Kind(d_state=E, kernel=2, conv_bias=False),
}


def mixer(kind: Mamba2Kind) -> Mamba2:
    return scramble(Mamba2(D, kind, H, VALUE), 0, spread=0.5).eval()


def delta(kernel: int = 4) -> GatedDelta:
    return scramble(GatedDelta(D, K, H, E, VALUE, kernel), 0, spread=0.5).eval()


def vectors(length: int = T) -> Tensor:
    return torch.randn(B, length, D, generator=torch.Generator().manual_seed(5))


GAPS = torch.tensor([[1, 0, 0, 1, 1, 0, 1, 1, 0, 0, 1, 1, 1], [0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 0, 0]]).bool()
PACKED = torch.tensor([[7] * 3 + [2] + [5] * 5 + [9] * 4, [1] * 7 + [4] * 5 + [8]])


@pytest.mark.parametrize("make", [partial(mixer, KINDS["groups"]), partial(delta, 3)], ids=RULES)
def test_gradients_of_a_layer_are_those_of_finite_differences(make):
    model = make().double()
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


# The gated delta rule ---------------------------------------------------------------------------------------


def test_a_layer_shows_its_steps():
    seen: dict[str, tuple[int, ...]] = {}

    class Shown(Tap):
        def __call__(self, name: str, x: Tensor) -> Tensor:
            return self.step(name, x)

        def step(self, name: str, x: Tensor) -> Tensor:
            seen[name] = tuple(x.shape)
            return x

    delta()(vectors(), tap=Shown())
    assert seen == {
        "q_projected": (B, T, K * E),
        "k_projected": (B, T, K * E),
        "v_projected": (B, T, H * VALUE),
        "q": (B, K, T, E),
        "k": (B, K, T, E),
        "v": (B, H, T, VALUE),
        "conv": (B, T, 2 * K * E + H * VALUE),
        "beta": (B, H, T),
        "decay": (B, H, T),
        "z": (B, H, T, VALUE),
        "gate": (B, T, H * VALUE),
        "concat": (B, T, H * VALUE),
        "out": (B, T, D),
    }


def theirs_and_ours():
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    config = transformers.Qwen3NextConfig(
        hidden_size=D,
        num_hidden_layers=2,
        linear_num_key_heads=K,
        linear_num_value_heads=H,
        linear_key_head_dim=E,
        linear_value_head_dim=VALUE,
        linear_conv_kernel_dim=4,
        layer_types=["linear_attention", "full_attention"],
    )
    theirs = scramble(Qwen3NextGatedDeltaNet(config, 0)).eval()
    ours = GatedDelta(D, K, H, E, VALUE, 4, config.rms_norm_eps)
    mixed = theirs.in_proj_qkvz.weight.view(K, -1, D).split([E, E, H // K * VALUE, H // K * VALUE], dim=1)
    gates = theirs.in_proj_ba.weight.view(K, -1, D).split([H // K, H // K], dim=1)
    weights = dict(zip(("q", "k", "v", "gate", "beta", "decay"), (*mixed, *gates)))
    weights = {f"{name}.weight": weight.reshape(-1, D) for name, weight in weights.items()}
    weights |= {"conv": theirs.conv1d.weight, "decay_bias": theirs.dt_bias, "log_rate": theirs.A_log}
    weights |= {"norm.weight": theirs.norm.weight, "out.weight": theirs.out_proj.weight}
    ours.load_state_dict(weights)
    return theirs, ours.eval(), transformers.DynamicCache(config=config)


def test_equals_transformers_whole_and_in_pieces():
    theirs, ours, cache = theirs_and_ours()
    x = torch.randn(B, 150, D, generator=torch.Generator().manual_seed(1))
    a, b = (x.clone().requires_grad_() for _ in range(2))
    right, found = theirs(a), ours(b)
    assert worst(found, right) <= 1e-5
    probe = torch.randn_like(right)
    (right * probe).sum().backward()
    (found * probe).sum().backward()
    pairs = [(b, a), (ours.out.weight, theirs.out_proj.weight), (ours.conv, theirs.conv1d.weight)]
    for mine, other in (*pairs, (ours.log_rate, theirs.A_log), (ours.decay_bias, theirs.dt_bias)):
        # Sums over tokens in float32, in another order: three roundings of the largest gradient.
        assert worst(mine.grad, other.grad) <= 3e-5 * max(1, other.grad.abs().max())

    state, start = RecurrentState(), 0
    with torch.no_grad():
        for size in (70, 1, 1, 5, 1):
            piece = x[:, start : start + size]
            assert worst(ours(piece, state=state), theirs(piece, cache_params=cache)) <= 1e-5
            start += size


def test_a_state_without_documents_takes_none_later():
    model, x, state = delta(), vectors(), RecurrentState()
    model(x[:, :3], state=state)
    with pytest.raises(InputError, match="from its first call on"):
        model(x[:, 3:], None, PACKED[:, 3:], state)


@pytest.mark.slow
def test_a_compiled_layer_is_one_graph_with_the_same_gradients():
    model, real = delta(), GAPS
    whole = torch.compile(lambda x: model(x, real, PACKED), backend="aot_eager", fullgraph=True)
    found, right = (vectors().requires_grad_() for _ in range(2))
    out, expected = whole(found), model(right, real, PACKED)
    out.square().sum().backward()
    expected.square().sum().backward()
    assert max(worst(out, expected), worst(found.grad, right.grad)) <= 1e-5


def test_heads_that_cannot_be_shared_are_refused():
    with pytest.raises(ConfigError, match="5 value heads cannot share 2 key heads"):
        GatedDelta(D, 2, 5, E, VALUE)


SIZES = [(D, 2, 4, 5, 3), (D, 2, 2, 5, 3), (D, 1, 4, 8, 8, 3)]


@pytest.mark.ledger("I1")
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("length", [1, 11, 64, 150])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:mkldnn")
def test_steps_state_the_cost(sizes, length, dtype):
    model, x = GatedDelta(*sizes).to(dtype), torch.randn(B, length, D, dtype=dtype, requires_grad=True)
    steps = list(gated_delta_steps(Pass(B, dtype.itemsize), "layer", length, *sizes))
    assert len({step.name for step in steps}) == len(steps)
    owned = dict(model.named_parameters())
    for step in steps:
        part = step.name.removeprefix("layer.")
        assert step.parameters == sum(
            owned[name].numel() for name in (part, f"{part}.weight") if name in owned
        )
    assert sum(step.parameters for step in steps) == sum(p.numel() for p in model.parameters())

    own = {p.untyped_storage().data_ptr() for p in (x, *model.parameters())}
    kept: dict[int, Tensor] = {}

    def pack(saved: Tensor) -> Tensor:
        if saved.untyped_storage().data_ptr() not in own:
            kept[saved.untyped_storage().data_ptr()] = saved
        return saved

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved),
        FlopCounterMode(display=False) as forward,
    ):
        out = model(x)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    solve = next(step for step in steps if step.name == "layer.solved").forward  # which torch does not count
    assert sum(step.forward for step in steps) - solve == forward.get_total_flops()
    assert sum(step.backward for step in steps) - solve == backward.get_total_flops()
    stated = sum(step.kept for step in steps)
    assert stated == pytest.approx(sum(x.untyped_storage().nbytes() for x in kept.values()), rel=0.01)
