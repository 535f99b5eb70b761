"""Linear attention held against its definition in float64, one query and one key at a time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as nnf
from torch import Tensor

from clearhead.errors import InputError
from clearhead.variants.linear import (
    FEATURES,
    Features,
    attend_linear,
    favor,
    matmul,
    orthogonal_features,
)
from tests.harness import worst

B, H, K, T, E, VALUE = 2, 4, 2, 11, 6, 3
PROJECTION = orthogonal_features(16, E, seed=3)


def inputs(length: int = T, keys: int | None = None, seed: int = 0, size: float = 1.0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (B, H, length, E), (B, K, keys or length, E), (B, K, keys or length, VALUE)
    return tuple(size * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


def features(name: str, q: Tensor, k: Tensor) -> tuple[Features, Features]:
    return FEATURES[name](q, PROJECTION), FEATURES[name](k, PROJECTION)


def run(name: str, q: Tensor, k: Tensor, v: Tensor, **given) -> tuple[Tensor, object]:
    fq, fk = features(name, q, k)
    return attend_linear(fq.values, fk.values, v, log_scale=fk.log_scale, **given)


def kernel(name: str, q: Tensor, k: Tensor) -> Tensor:
    """The weight of each pair, in float64 and without any stabiliser: [B, H, T, S]."""
    q, k = q.double(), k.double().repeat_interleave(H // K, dim=1)

    def features_of(x: Tensor) -> Tensor:
        if name == "elu":
            return nnf.elu(x) + 1
        if name == "relu":
            return x.relu() + 1e-3
        x = x * E**-0.25
        return torch.exp(x @ PROJECTION.double().T - x.square().sum(-1, keepdim=True) / 2)

    return features_of(q) @ features_of(k).transpose(-1, -2)


def by_loops(name: str, q: Tensor, k: Tensor, v: Tensor, causal: bool, real=None, documents=None) -> Tensor:
    """Add up one key for one query at a time, in every row and head at once."""
    weights, v = kernel(name, q, k), v.double().repeat_interleave(H // K, dim=1)
    answers = []
    for i in range(q.shape[2]):
        total, norm = torch.zeros(B, H, VALUE, dtype=torch.float64), torch.zeros(B, H, 1, dtype=torch.float64)
        for j in range(i + 1 if causal else k.shape[2]):
            sees = torch.ones(B, dtype=torch.bool) if real is None else real[:, j]
            if documents is not None:
                sees = sees & (documents[0][:, i] == documents[1][:, j])
            weight = weights[:, :, i, j, None] * sees[:, None, None]
            total, norm = total + weight * v[:, :, j], norm + weight
        answers.append(total / torch.where(norm > 0, norm, 1.0))
    return torch.stack(answers, dim=2)


PADDINGS = {
    "none": None,
    "left": [[0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1], [1] * 11],
    "right": [[1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0], [1] * 10 + [0]],
    "gaps": [[1, 0, 0, 1, 1, 0, 1, 1, 0, 0, 1], [0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0]],
    "empty": [[0] * 11, [1] * 11],
}
PACKED = torch.tensor([[7, 7, 7, 2, 5, 5, 5, 5, 5, 9, 9], [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 4]])


def padding(where: str) -> Tensor | None:
    return None if PADDINGS[where] is None else torch.tensor(PADDINGS[where], dtype=torch.bool)


@pytest.mark.ledger("J2")
@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("where", PADDINGS)
@pytest.mark.parametrize("packed", [False, True])
def test_equals_loops_with_gradients(name, causal, where, packed):
    given = dict(causal=causal, real=padding(where), documents=(PACKED, PACKED) if packed else None)
    found, right = [[x.requires_grad_() for x in inputs()] for _ in range(2)]
    probe = torch.randn(B, H, T, VALUE, dtype=torch.float64)
    expected = by_loops(name, *right, **given)
    (expected * probe).sum().backward()
    for chunk in (1, 4, 64):
        out, _ = run(name, *found, **given, chunk=chunk)
        assert worst(out, expected) <= 1e-9
        for x in found:
            x.grad = None
        (out * probe).sum().backward()
        assert max(worst(x.grad, y.grad) for x, y in zip(found, right)) <= 1e-8
    out32, _ = run(name, *(x.detach().float() for x in found), **given, chunk=4)
    assert out32.dtype == torch.float32
    assert worst(out32.double(), expected) <= 1e-5


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("packed", [False, True])
def test_queries_of_another_length_see_all_keys(name, packed):
    q, k, v = inputs(5, 9)
    documents = torch.tensor([[1, 1, 2, 2, 3]] * B), torch.tensor([[1, 1, 1, 1, 2, 4, 4, 5, 5]] * B)
    given = {"causal": False, "documents": documents if packed else None}
    assert worst(run(name, q, k, v, **given)[0], by_loops(name, q, k, v, **given)) <= 1e-9
    if not packed:  # and a state of some keys stands for them
        _, state = run(name, q, k[:, :, :4], v[:, :, :4], causal=False)
        rest, after = run(name, q, k[:, :, 4:], v[:, :, 4:], causal=False, state=state)
        again, _ = run(name, q, k[:, :, :0], v[:, :, :0], causal=False, state=after)
        assert max(worst(rest, run(name, q, k, v, **given)[0]), worst(again, rest)) <= 1e-9


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_off_by_the_rounding_of_its_inputs_and_output(name, dtype):
    q, k, v = (x.to(dtype) for x in inputs(512, seed=4))
    whole, _ = run(name, *(x.double() for x in (q, k, v)), causal=True)
    out, state = run(name, q, k, v, causal=True)
    assert out.dtype == dtype
    assert state.sums.dtype == torch.float32
    assert worst(out.double(), whole) <= torch.finfo(dtype).eps * whole.abs().max()
    with torch.autocast("cpu", torch.bfloat16):  # whose products would round the sums
        cast, _ = run(name, *(x.float() for x in (q, k, v)), causal=True)
    assert worst(cast.double(), whole) <= 1e-5


@pytest.mark.parametrize("size", [1e-3, 5.0, 30.0, 300.0])
def test_favor_neither_overflows_nor_vanishes(size):
    """Any maximum over all keys would hide the early keys; no maximum at all would overflow."""
    q, k, v = (x.float() for x in inputs(40, seed=5))
    rising = torch.linspace(0.01, size, 40)[:, None]
    q, k = (q * size).requires_grad_(), (k * rising).requires_grad_()
    out, _ = run("favor", q, k, v, causal=True, chunk=8)
    out.sum().backward()
    assert all(x.isfinite().all() for x in (out, q.grad, k.grad))
    assert worst(out[:, :, 0], v[:, :, 0].repeat_interleave(H // K, dim=1)) <= 1e-5  # one key: its value
    assert out.abs().max() <= v.abs().max() + 1e-4  # a mean of values
    earlier, _ = run("favor", q[:, :, :20], k[:, :, :20], v[:, :, :20], causal=True, chunk=8)
    assert worst(earlier, out[:, :, :20]) <= 1e-5  # whatever comes later


@pytest.mark.parametrize("name", FEATURES)
def test_a_long_row_equals_the_square_of_weights(name):
    q, k, v = inputs(700, seed=6)
    weights = kernel(name, q, k).tril()
    right = weights @ v.repeat_interleave(H // K, dim=1) / weights.sum(-1, keepdim=True)
    assert worst(run(name, q.float(), k.float(), v.float(), causal=True)[0].double(), right) <= 1e-5


@pytest.mark.slow
def test_a_compiled_pass_is_one_graph_with_the_same_gradients():
    given = {"causal": True, "real": padding("gaps"), "chunk": 4, "documents": (PACKED, PACKED)}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return run("favor", q, k, v, **given)[0]

    whole = torch.compile(attend, backend="aot_eager", fullgraph=True)
    found, right = [[x.float().requires_grad_() for x in inputs()] for _ in range(2)]
    out, expected = whole(*found), attend(*right)
    out.square().sum().backward()
    expected.square().sum().backward()
    assert worst(out, expected) <= 1e-5
    assert max(worst(x.grad, y.grad) for x, y in zip(found, right)) <= 1e-5


def test_products_have_the_gradients_of_products():
    a, b = (
        torch.randn(2, 3, 4, 5).double().requires_grad_(),
        torch.randn(2, 3, 6, 5).double().requires_grad_(),
    )
    assert torch.autograd.gradcheck(lambda a, b: matmul(a, b.mT), (a, b))
    assert torch.autograd.gradgradcheck(lambda a, b: matmul(a, b.mT), (a, b))


def test_the_scan_keeps_memory_that_grows_with_the_length():
    def kept(length: int) -> int:
        q, k, v = (x.float().requires_grad_() for x in inputs(length))
        saved: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out, _ = run("favor", q, k, v, causal=True)
            assert out.requires_grad
        return sum(saved.values())

    assert kept(2048) <= 2.1 * kept(1024)


def test_features_estimate_the_softmax_kernel():
    """Orthogonal rows err less than independent ones, positive features less than signed ones."""
    d_head, drawn = 16, 40
    q, k = torch.randn(2, 1, 64, d_head, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    q, k = q[None], k[None]
    exact = torch.softmax(q @ k.transpose(-1, -2) / d_head**0.5, dim=-1)

    def error(kind: str, independent: bool) -> float:
        errors = []
        for seed in range(drawn):
            w = orthogonal_features(64, d_head, seed, independent)
            fq, fk = favor(q, w, kind=kind), favor(k, w, kind=kind)
            weights = fq.values @ fk.values.transpose(-1, -2) * fk.log_scale.exp()[..., None, :]
            weights = weights * fq.log_scale.exp()[..., None]
            estimate = weights / weights.sum(-1, keepdim=True)
            errors.append((estimate - exact).square().mean().sqrt())
        return torch.stack(errors).median().item()

    assert error("positive", False) < error("positive", True) < error("trigonometric", True)
    assert error("positive", False) < error("trigonometric", False)
    w = orthogonal_features(4096, d_head, 1)
    fq, fk = favor(q / 2, w), favor(k / 2, w)
    scale = (fq.log_scale[..., None] + fk.log_scale[..., None, :]).exp()
    right = (q @ k.transpose(-1, -2) / 4 / d_head**0.5).exp()
    estimate = fq.values @ fk.values.transpose(-1, -2) * scale
    assert (estimate - right).abs().mean() <= 0.05 * right.mean()


def test_projections_are_drawn_by_seed():
    w = orthogonal_features(20, 8, 5)
    assert torch.equal(w, orthogonal_features(20, 8, 5))
    assert worst(w, orthogonal_features(20, 8, 6)) > 0.1
    block = nnf.normalize(w[:8], dim=1)
    assert worst(block @ block.T, torch.eye(8)) <= 1e-6
    assert abs(orthogonal_features(4096, 8, 0).square().sum(1).mean() - 8) < 0.3


def test_what_has_no_meaning_is_refused():
    q, k, v = inputs(5, 9)
    with pytest.raises(InputError, match="as many keys as queries"):
        run("elu", q, k, v, causal=True)
    _, state = run("elu", q, k, v, causal=False)
    with pytest.raises(InputError, match="packed"):
        run("elu", q, k, v, causal=False, state=state, documents=(PACKED[:, :5], PACKED[:, :9]))


def test_equals_performer_pytorch():
    theirs = pytest.importorskip("performer_pytorch.performer_pytorch", exc_type=ImportError)
    q, k, v = (x.float() for x in inputs(70, seed=7))
    k, v = (x.repeat_interleave(H // K, dim=1) for x in (k, v))
    matrix = theirs.gaussian_orthogonal_random_matrix(16, E)
    theirs_q = theirs.softmax_kernel(q, projection_matrix=matrix, is_query=True, eps=0)
    theirs_k = theirs.softmax_kernel(k, projection_matrix=matrix, is_query=False, eps=0)
    fq, fk = favor(q, matrix), favor(k, matrix)
    largest = (k * E**-0.25 @ matrix.T).amax((-1, -2), keepdim=True)
    assert worst(fk.values * (fk.log_scale[..., None] - largest).exp(), theirs_k) <= 1e-5
    for causal, attend in ((False, theirs.linear_attention), (True, theirs.causal_linear_attention_noncuda)):
        given = {"eps": 0} if causal else {}
        right = attend(theirs_q, theirs_k, v, **given)
        found, _ = attend_linear(fq.values, fk.values, v, log_scale=fk.log_scale, causal=causal)
        assert worst(found, right) <= 1e-5
    relu = theirs.generalized_kernel(q, projection_matrix=None, normalize_data=False)
    assert worst(FEATURES["relu"](q).values, relu) <= 1e-6


def test_equals_linear_attention_transformer():
    theirs = pytest.importorskip(
        "linear_attention_transformer.linear_attention_transformer", exc_type=ImportError
    )
    q, k, v = (x.float() for x in inputs(70, seed=8))
    k, v = k.repeat_interleave(H // K, dim=1), torch.randn(B, H, 70, E)
    found, _ = attend_linear(q.softmax(-1), k.exp(), v, causal=True)
    assert worst(found, theirs.causal_linear_attn(q, k, v, bucket_size=1)) <= 1e-5
    real = padding("gaps").repeat(1, 7)[:, :70]
    masked = k.masked_fill(~real[:, None, :, None], -torch.inf).softmax(-2)
    found, _ = attend_linear(q.softmax(-1), masked, v, causal=False, real=real)
    right = theirs.linear_attn(q, k.clone(), v.clone(), kv_mask=real)
    assert worst(found * E**-0.5, right) <= 1e-5
