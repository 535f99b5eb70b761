"""Masks: prefix, documents, windows, gaps, and all of them at once; rows that may attend to nothing."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as nnf

import clearhead as ch
from clearhead.core import attention
from clearhead.core.attention import KERNELS
from clearhead.core.config.kinds import FULL, Windowed
from clearhead.core.masks import compose, tokens_from
from clearhead.variants import cuda_attention
from tests.harness import T, V, build, chunks, in_pieces, some_ids, worst

TOLERANCE = 1e-5
DOCUMENTS = torch.tensor([[0] * 3 + [1] * 4 + [2] * 2, [5] * 2 + [3] * 1 + [7] * 6])  # runs of any ids
EVERY_POSITION = ["learned", "sinusoidal", "rope", "alibi", "relative", "none"]
CPU = torch.device("cpu")


def runs(documents: torch.Tensor) -> list[slice]:
    """Where each document of one row stands."""
    edges = [0, *(i for i in range(1, len(documents)) if documents[i] != documents[i - 1]), len(documents)]
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


@pytest.mark.ledger("C2")
@pytest.mark.parametrize("seed", range(40))
def test_compose_equals_a_loop_over_pairs(seed):
    """Every predicate at once, against the definition written out pair by pair."""
    generator = torch.Generator().manual_seed(seed)
    flip = lambda: bool(torch.randint(2, (), generator=generator))  # noqa: E731
    mask = torch.rand(2, 7, generator=generator) > 0.3 if flip() else None
    documents = torch.randint(2, (2, 7), generator=generator).sort(1).values if flip() else None
    prefix = torch.randint(5, (2,), generator=generator) if flip() else None
    causal, window = flip() or prefix is not None, 3 if flip() else None
    tokens, kind = tokens_from(2, 7, CPU, mask, None, documents), FULL if window is None else Windowed(window)
    found, implied = compose(tokens, tokens, causal=causal, kind=kind, prefix=prefix)
    if implied:
        found = torch.ones(7, 7, dtype=torch.bool).tril()[None, None]
    found = torch.ones(2, 1, 7, 7, dtype=torch.bool) if found is None else found.expand(2, 1, 7, 7)
    for row in range(2):
        real = [True] * 7 if mask is None else mask[row].tolist()
        for q in range(7):
            for k in range(7):
                same = documents is None or documents[row, q] == documents[row, k]
                inside = [
                    i
                    for i in range(7)
                    if real[i] and (documents is None or documents[row, i] == documents[row, k])
                ]
                place = {slot: number for number, slot in enumerate(inside)}
                allowed = real[k] and same
                if allowed and real[q]:  # what padding sees is nobody's concern
                    allowed &= not causal or k <= q or (prefix is not None and place[k] < int(prefix[row]))
                    allowed &= window is None or abs(place[q] - place[k]) < window
                if real[q]:
                    assert bool(found[row, 0, q, k]) == allowed, (row, q, k)


@pytest.mark.ledger("C2", "G2")
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("positions", EVERY_POSITION)
@pytest.mark.parametrize("family", ["decoder", "encoder"])
def test_packed_documents_equal_each_alone(family, positions, window):
    """In one pass, and in pieces through every form of cache."""
    model, ids = build(family=family, positions=positions, window=window), some_ids(2, 9)
    with torch.no_grad():
        packed = model(ids, documents=DOCUMENTS).logits
        for row in range(2):
            for run in runs(DOCUMENTS[row]):
                assert worst(packed[row : row + 1, run], model(ids[row : row + 1, run]).logits) <= TOLERANCE
        for size in (1, 2, 4) if family == "decoder" else ():
            for cache in (ch.Cache(), ch.WindowCache(), ch.FixedCache(model.config, 2, 12)):
                pieces = in_pieces(model, ids, chunks(9, size), cache, documents=DOCUMENTS)
                assert worst(pieces, packed) <= TOLERANCE


@pytest.mark.ledger("C2")
def test_padding_after_a_document_of_full_length_needs_no_position():
    model = build(positions="learned", max_positions=8)
    ids, documents = some_ids(1, 13), torch.tensor([[0] * 3 + [1] * 10])
    mask = torch.tensor([[True] * 11 + [False] * 2])
    with torch.no_grad():
        packed, alone = model(ids, mask=mask, documents=documents).logits, model(ids[:, 3:11]).logits
    assert worst(packed[:, 3:11], alone) <= TOLERANCE


@pytest.mark.ledger("C2")
@pytest.mark.parametrize("positions", EVERY_POSITION)
@pytest.mark.parametrize("family", ["encoder", "decoder"])
def test_another_document_changes_nothing_bit_for_bit(family, positions):
    model, ids = build(family=family, positions=positions), some_ids(1, 9)
    documents, changed = DOCUMENTS[:1], ids.clone()
    changed[:, 3:7] = (ids[:, 3:7] + 1) % V  # the middle document
    with torch.no_grad():
        before, after = model(ids, documents=documents).logits, model(changed, documents=documents).logits
    others = [0, 1, 2, 7, 8]
    assert torch.equal(before[:, others], after[:, others])
    assert not torch.equal(before[:, 3:7], after[:, 3:7])


@pytest.mark.ledger("C2", "E3")
def test_packed_pairs_equal_each_alone():
    """Encoder and decoder packed alike: each target reads its own source only; also through a cache."""
    model = build(family="encoder-decoder", positions="relative")
    source, ids = some_ids(1, 7, seed=3), some_ids(1, 8, seed=4)
    source_documents = torch.tensor([[0, 0, 0, 1, 1, 2, 2]])
    documents = torch.tensor([[0, 0, 1, 1, 1, 1, 2, 2]])
    with torch.no_grad():
        packed = model(ids, source=source, documents=documents, source_documents=source_documents).logits
        for document in range(3):
            mine, its = documents[0] == document, source_documents[0] == document
            alone = model(ids[:, mine], source=source[:, its]).logits
            assert worst(packed[:, mine], alone) <= TOLERANCE
        given = {"source": source, "source_documents": source_documents}
        pieces = in_pieces(model, ids, [3, 1, 4], ch.Cache(), documents=documents, **given)
    assert worst(pieces, packed) <= TOLERANCE


@pytest.mark.ledger("C2")
@pytest.mark.parametrize("positions", EVERY_POSITION)
def test_prefix(positions):
    """Inside the prefix the model is an encoder; after it, a decoder that sees all of it."""
    model, ids = build(positions=positions), some_ids(2, T)
    twin = build(family="encoder", positions=positions, head="lm", head_transform=False, head_bias=False)
    twin.load_state_dict({name.replace("decoder.", "encoder."): x for name, x in model.state_dict().items()})
    prefix = torch.tensor([3, 5])
    with torch.no_grad():
        logits = model(ids, prefix=prefix).logits
        if positions != "relative":  # whose buckets tell a causal stack nothing about what comes later
            for row, length in enumerate(prefix.tolist()):
                alone = twin(ids[row : row + 1, :length]).logits
                assert worst(logits[row : row + 1, :length], alone) <= TOLERANCE
        zero = model(ids, prefix=torch.zeros(2, dtype=torch.long)).logits
        assert worst(zero, model(ids).logits) <= TOLERANCE
        changed = ids.clone()
        changed[:, 6:] = (ids[:, 6:] + 1) % V
        # Still causal after the prefix.
        assert torch.equal(model(changed, prefix=prefix).logits[:, :6], logits[:, :6])
        for make in (ch.Cache(), ch.WindowCache(), ch.FixedCache(model.config, 2, T)):
            assert worst(in_pieces(model, ids, [5, 1, 2], make, prefix=prefix), logits) <= TOLERANCE


@pytest.mark.ledger("C2")
def test_prefix_with_padding_on_the_left():
    model, ids, prefix = build(positions="rope"), some_ids(2, T), torch.tensor([3, 3])
    padded, mask = torch.cat([some_ids(2, 2, seed=7), ids], 1), torch.ones(2, T + 2, dtype=torch.bool)
    mask[:, :2] = False
    with torch.no_grad():
        assert (
            worst(model(padded, mask=mask, prefix=prefix).logits[:, 2:], model(ids, prefix=prefix).logits)
            <= TOLERANCE
        )


@pytest.mark.ledger("C2")
def test_prefix_mistakes():
    model, ids = build(), some_ids(1, 4)
    with pytest.raises(ch.InputError, match="every token sees all others"):
        build(family="encoder")(ids, prefix=torch.tensor([2]))
    with pytest.raises(ch.InputError, match="one whole number per row"):
        model(ids, prefix=torch.tensor([2, 2]))
    with pytest.raises(ch.InputError, match="one whole number per row"):
        model(ids, prefix=torch.tensor([2.0]))
    with pytest.raises(ch.InputError, match="prefix 6 passes the 4 tokens"):
        model(ids, prefix=torch.tensor([6]), cache=ch.Cache())
    cache = ch.Cache()
    model(ids, cache=cache)
    with pytest.raises(ch.InputError, match="after 4 tokens were cached"):
        model(ids, prefix=torch.tensor([2]), cache=cache)


@pytest.mark.ledger("C2", "G2")
@pytest.mark.parametrize("positions", EVERY_POSITION)
@pytest.mark.parametrize(
    "make", [lambda c: ch.Cache(), lambda c: ch.WindowCache(), lambda c: ch.FixedCache(c, 3, 16)]
)
def test_rows_of_different_lengths_go_on_through_a_cache(make, positions):
    """Prompts padded right, left and with gaps, then generated tokens: each row equals itself alone."""
    model, ids = build(positions=positions, window=(3, None)), some_ids(3, 12)
    mask = torch.ones(3, 12, dtype=torch.bool)
    mask[0, 5:7] = False  # padded on the right, up to where generation begins
    mask[1, :3] = False  # on the left
    mask[2, [1, 2, 4]] = False  # gaps
    with torch.no_grad():
        for sizes in ([7, *[1] * 5], [4, 3, 2, 3], [1] * 12):
            logits = in_pieces(model, ids, sizes, make(model.config), mask=mask)
            for row in range(3):
                real = mask[row]
                alone = model(ids[row : row + 1, real]).logits
                assert worst(logits[row : row + 1, real], alone) <= TOLERANCE


@pytest.mark.ledger("C6")
@pytest.mark.parametrize("kernel", list(KERNELS))
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("length", [1, 3])
def test_a_row_that_may_attend_to_nothing_gives_zeros(kernel, biased, kv_heads, length):
    q, k, v = torch.randn(2, 4, length, 8), torch.randn(2, kv_heads, 5, 8), torch.randn(2, kv_heads, 5, 8)
    mask = torch.ones(2, 1, length, 5, dtype=torch.bool)
    mask[0, :, 0] = False
    given = [x.requires_grad_() for x in (q, k, v, *((torch.randn(1, 4, length, 5),) if biased else ()))]
    out = KERNELS[kernel](q, k, v, mask, given[3] if biased else None)
    assert torch.equal(out[0, :, 0], torch.zeros(4, 8))
    assert out[1].abs().min() > 0
    for gradient in torch.autograd.grad(out.square().sum(), given):
        assert gradient.isfinite().all()
        assert gradient.any()


@pytest.mark.ledger("C6", "E3")
@pytest.mark.parametrize("kernel", ["eager", "fused"])
@pytest.mark.parametrize("positions", EVERY_POSITION)
def test_an_empty_source_and_an_empty_row(kernel, positions):
    """A row whose source is all padding, and one with no real token at all: finite, and z exactly zero."""
    model = build(family="encoder-decoder", positions=positions)
    ids, source = some_ids(2, 4), some_ids(2, 5)
    source_mask, mask = torch.ones(2, 5, dtype=torch.bool), torch.ones(2, 4, dtype=torch.bool)
    source_mask[0], mask[0] = False, False
    with ch.attending(model, kernel), ch.record(model, "blocks.*.z", "encoder.blocks.*.z") as seen:
        out = model(ids, mask=mask, source=source, source_mask=source_mask)
        gradients = torch.autograd.grad(out.logits.sum(), list(model.parameters()))
    assert len(seen) == 6
    for z in seen.values():
        assert torch.equal(z[0], torch.zeros_like(z[0]))
        assert z[1].any()
    assert out.logits.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients)
    full = model(ids[1:], source=source[1:]).logits
    assert worst(out.logits[1:], full) <= TOLERANCE


# Which kernel may be chosen where a gradient is asked for: cuDNN's only where it is sound -------------------


PLAIN = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()


class OnGpu(torch.Tensor):
    """A tensor on a CPU that says it is on a GPU."""

    is_cuda = True


def asked(gradient: bool, kv_heads: int = 4, length: int = 8) -> list[torch.Tensor]:
    shapes = ((2, 4, length, 16), (2, kv_heads, 8, 16), (2, kv_heads, 8, 16))
    return [torch.randn(shape).as_subclass(OnGpu).requires_grad_(gradient) for shape in shapes]


@pytest.fixture
def chosen(monkeypatch) -> list[bool]:
    """Whether cuDNN's kernel might be taken, for each call of PyTorch's attention."""
    found, right = [], nnf.scaled_dot_product_attention

    def watched(*given, **named):
        found.append(torch.backends.cuda.cudnn_sdp_enabled())
        return right(*given, **named)

    monkeypatch.setattr(attention.nnf, "scaled_dot_product_attention", watched)
    return found


@pytest.mark.parametrize(
    ("how", "length", "sound"),
    [
        ({"causal": True}, 8, True),
        ({"mask": PLAIN}, 8, False),
        ({}, 8, False),
        ({"bias": torch.zeros(1, 4, 8, 8), "causal": True}, 8, False),
        ({"mask": PLAIN[:, :, -1:]}, 1, False),
    ],
    ids=["causal", "masked", "all seen", "biased", "one query"],
)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_a_gradient_is_taken_by_cudnn_only_without_a_mask(chosen, how, length, sound, kv_heads):
    assert torch.backends.cuda.cudnn_sdp_enabled()
    for gradient in (True, False):
        q, k, v = asked(gradient, kv_heads, length)
        out = attention.fused(q, k, v, **how)
        wanted = attention.eager(*(x.as_subclass(torch.Tensor) for x in (q, k, v)), **how)
        torch.testing.assert_close(out.as_subclass(torch.Tensor), wanted, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        attention.fused(*asked(True, kv_heads, length), **how)
    assert chosen == [sound, True, True]  # to read and write text, any kernel will do
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_a_choice_of_the_caller_is_kept():
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        with cuda_attention.sound():
            pass
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def test_a_compiler_takes_it_whole():
    def product(q: torch.Tensor) -> torch.Tensor:
        with cuda_attention.sound():
            return nnf.scaled_dot_product_attention(q, q, q)

    q = torch.randn(1, 2, 8, 4)
    made = torch.compile(product, fullgraph=True, backend="aot_eager")(q)
    assert torch.equal(made, nnf.scaled_dot_product_attention(q, q, q))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="cuDNN's attention is of GPUs")
@pytest.mark.parametrize("length", [1, 8, 64, 72, 128, 192, 320])
@pytest.mark.parametrize("width", [32, 64, 128])
def test_on_a_gpu_gradients_of_very_low_scores_are_those_of_the_formula(length, width):
    """All scores of a row near -120, where exp of the sum overflows unless it is taken with care."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, length, width, device="cuda").bfloat16() for _ in range(3))
    q, k = 0.1 * q, 0.1 * k
    q[..., 0], k[..., 0] = 1.0, -120 * math.sqrt(width)
    mask = torch.ones(length, length, dtype=torch.bool, device="cuda").tril()[None, None]
    found = []
    for attending, dtype in ((attention.fused, torch.bfloat16), (attention.eager, torch.float64)):
        given = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        attending(*given, mask).sum().backward()
        found.append([x.grad.double() for x in given])
    for ours, theirs in zip(*found, strict=True):
        assert ours.isfinite().all()
        assert (ours - theirs).abs().max() <= 0.05 * theirs.abs().max() + 0.05
