"""The gated delta rule against its recurrence in float64; its layer against transformers; its stated cost."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from clearhead.core.taps import Tap
from clearhead.errors import ConfigError, InputError
from clearhead.variants.gated_delta import GatedDelta, gated_delta, gated_delta_steps
from clearhead.variants.recurrent import RecurrentState
from clearhead.variants.steps import Pass
from tests.harness import scramble, worst

B, K, H, T, E, VALUE, D = 2, 2, 4, 13, 5, 3, 16


def inputs(length: int = T, seed: int = 0) -> list[Tensor]:
    """Queries, keys, values, log decays, strengths."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (B, K, length, E), (B, K, length, E), (B, H, length, VALUE), (B, H, length), (B, H, length)
    q, k, v, g, beta = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    k = torch.nn.functional.normalize(k, dim=-1)
    return [q, k, v, -g.exp(), beta.sigmoid()]


def by_loop(q, k, v, g, beta, state=None, starts=None) -> tuple[Tensor, Tensor]:
    """One token at a time."""
    q, k = (x.repeat_interleave(H // K, dim=1) for x in (q, k))
    state = v.new_zeros(B, H, E, VALUE) if state is None else state
    said = []
    for t in range(q.shape[2]):
        if starts is not None:
            state = state * ~starts[:, t, None, None, None]
        state = state * g[:, :, t, None, None].exp()
        held = (state * k[:, :, t, :, None]).sum(-2)
        delta = (v[:, :, t] - held) * beta[:, :, t, None]
        state = state + k[:, :, t, :, None] * delta[..., None, :]
        said.append((state * q[:, :, t, :, None]).sum(-2) * E**-0.5)
    return torch.stack(said, dim=2), state


STARTS = torch.zeros(B, T, dtype=torch.bool)
STARTS[0, [0, 3, 4, 9]] = True
STARTS[1, [7, 12]] = True


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("entered", [False, True])
@pytest.mark.parametrize(("chunk", "group"), [(1, None), (4, None), (64, None), (1, 3), (2, 4), (4, 4)])
def test_chunks_equal_the_recurrence_with_gradients(packed, entered, chunk, group):
    found, right = [[x.requires_grad_() for x in inputs()] for _ in range(2)]
    memory = torch.randn(B, H, E, VALUE, dtype=torch.float64)
    states = [memory.clone().requires_grad_() if entered else None for _ in range(2)]
    starts = STARTS if packed else None
    probe, last = torch.randn(B, H, T, VALUE, dtype=torch.float64), torch.randn(B, H, E, VALUE).double()
    expected, after = by_loop(*right, states[1], starts)
    ((expected * probe).sum() + (after * last).sum()).backward()
    out, state = gated_delta(*found, states[0], starts=starts, chunk=chunk, group=group)
    ((out * probe).sum() + (state * last).sum()).backward()
    assert max(worst(out, expected), worst(state, after)) <= 1e-10
    pairs = [*zip(found, right), *([states] if entered else [])]
    assert max(worst(x.grad, y.grad) for x, y in pairs) <= 1e-9
    short = [x.detach().float() for x in found]
    out, _ = gated_delta(*short, memory.float() if entered else None, starts=starts, chunk=chunk, group=group)
    assert worst(out.double(), expected) <= 1e-5


def test_a_strong_decay_does_not_round_what_follows():
    """After one that forgets everything, weak decays still count to the last digit."""
    q, k, v, g, beta = inputs(64)
    g = torch.where(torch.rand(g.shape) < 0.3, -500.0, g * 0.01)
    right, _ = by_loop(q, k, v, g, beta)
    out, _ = gated_delta(*(x.float() for x in (q, k, v, g, beta)))
    assert worst(out.double(), right) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_off_by_the_rounding_of_its_inputs_and_output(dtype):
    given = [x.to(dtype) for x in inputs(300, seed=2)]
    right, _ = by_loop(*(x.double() for x in given))
    out, state = gated_delta(*given)
    assert (out.dtype, state.dtype) == (dtype, torch.float32)
    assert worst(out.double(), right) <= torch.finfo(dtype).eps * right.abs().max()
    with torch.autocast("cpu", torch.bfloat16):
        cast, _ = gated_delta(*(x.float() for x in given))
    assert worst(cast.double(), right) <= 1e-5


def layer(kernel: int = 4, seed: int = 0) -> GatedDelta:
    return scramble(GatedDelta(D, K, H, E, VALUE, kernel), seed, spread=0.5).eval()


PADDINGS = {
    "left": [[0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], [1] * 13],
    "right": [[1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0], [1] * 12 + [0]],
    "gaps": [[1, 0, 0, 1, 1, 0, 1, 1, 0, 0, 1, 1, 1], [0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 0, 0]],
    "empty": [[0] * 13, [1] * 13],
}
PACKED = torch.tensor([[7] * 3 + [2] + [5] * 5 + [9] * 4, [1] * 7 + [4] * 5 + [8]])


def vectors() -> Tensor:
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(5))


def test_gradients_of_a_layer_are_those_of_finite_differences():
    model = layer(kernel=3).double()
    x = vectors().double()[:, :6].requires_grad_()
    real = torch.tensor([[1, 1, 0, 1, 1, 1], [0, 1, 1, 1, 1, 0]], dtype=torch.bool)
    documents = torch.tensor([[1, 1, 1, 1, 2, 2], [3, 3, 3, 4, 4, 4]])
    assert torch.autograd.gradcheck(lambda x: model(x, real, documents)[real], (x,), fast_mode=True)


def test_a_layer_shows_its_steps():
    seen: dict[str, tuple[int, ...]] = {}

    class Shown(Tap):
        def __call__(self, name: str, x: Tensor) -> Tensor:
            return self.step(name, x)

        def step(self, name: str, x: Tensor) -> Tensor:
            seen[name] = tuple(x.shape)
            return x

    layer()(vectors(), tap=Shown())
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
    model, x, state = layer(), vectors(), RecurrentState()
    model(x[:, :3], state=state)
    with pytest.raises(InputError, match="from its first call on"):
        model(x[:, 3:], None, PACKED[:, 3:], state)


@pytest.mark.slow
def test_a_compiled_layer_is_one_graph_with_the_same_gradients():
    model, real = layer(), torch.tensor(PADDINGS["gaps"], dtype=torch.bool)
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
