"""Ring attention is attention: processes as threads, every number against one process in float64."""

from __future__ import annotations

import copy
import functools
import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as nnf
from torch import Tensor

import clearhead as ch
from clearhead.core import masks
from clearhead.core.attention import eager
from clearhead.core.config import RopeScaling
from clearhead.errors import ConfigError
from clearhead.learn.batches.batch import IGNORE, Batch
from clearhead.learn.losses import batch_loss
from clearhead.learn.parallel import ring_schedule as rings
from clearhead.learn.parallel.context import attend_ring, share_tokens
from clearhead.learn.parallel.ring_schedule import TokenShards
from clearhead.variants.checks import read_kind

pytestmark = pytest.mark.ledger("I3")
Boxes = list[list["queue.Queue[Tensor]"]]


class ThreadRing(rings.Ring):
    """A ring of threads of one process, which counts the keys that it sends."""

    def __init__(self, rank: int, boxes: Boxes) -> None:
        self.rank, self.size, self.boxes, self.sent = rank, len(boxes), boxes, 0

    def swap(self, sent: Tensor | None, to: int, received: Tensor | None, source: int) -> Callable[[], None]:
        if sent is not None:
            self.sent += sent.shape[2]
            self.boxes[to % self.size][self.rank].put(sent.clone())

        def wait() -> None:
            if received is not None:
                received.copy_(self.boxes[self.rank][source % self.size].get(timeout=20))

        return wait

    def all(self, x: Tensor) -> list[Tensor]:
        for box in self.boxes:
            box[self.rank].put(x.detach().clone())
        return [self.boxes[self.rank][source].get(timeout=20) for source in range(self.size)]

    def gathered(self, x: Tensor) -> Tensor:
        return Gathered.apply(x, self)  # type: ignore[no-untyped-call, no-any-return]

    def summed(self, x: Tensor) -> Tensor:
        return torch.stack(self.all(x)).sum(0)


class Gathered(torch.autograd.Function):
    """What each thread has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ring: ThreadRing) -> Tensor:
        ctx.ring = ring
        return torch.stack(ring.all(x))

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return ctx.ring.summed(upstream)[ctx.ring.rank], None


def on_ring(count: int, work: Callable[[ThreadRing], Any]) -> list[Any]:
    """Do some work in each thread of a ring; return what each made."""
    boxes: Boxes = [[queue.Queue() for _ in range(count)] for _ in range(count)]
    made: list[Any] = [None] * count
    failed: list[Exception] = []

    def run(rank: int) -> None:
        try:
            made[rank] = work(ThreadRing(rank, boxes))
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return made


def tokens_of(kind: str, length: int, causal: bool, uneven: bool) -> masks.TokenInfo:
    """Describe three rows; `uneven`: padded on either side, with several documents."""
    mask = documents = None
    if uneven:
        mask = torch.ones(3, length, dtype=torch.bool)
        mask[0, -3:] = mask[1, :2] = False
        documents = (torch.arange(length) // 5).expand(3, -1)
    tokens = masks.tokens_from(3, length, torch.device("cpu"), mask, None, documents)
    return read_kind(kind).describe(tokens, causal, tokens.order, None)


def heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("kind", ["full", "window(4)", "dilated(3, 2, sinks=2)", "blocks(2, 3, 2, 0, 1)"])
@pytest.mark.parametrize("causal", [True, False])
def test_a_ring_gives_dense_attention(count, kind, causal, monkeypatch):
    """Answers and gradients, with grouped heads, a cap, sinks, a learned bias, padding and documents."""
    monkeypatch.setattr(rings, "MAX_SCORES", 400)  # several blocks
    for length, uneven, cap in ((12, False, None), (21, True, 2.0)):
        torch.manual_seed(count)
        shapes = [(3, 4, length, 5), (3, 2, length, 5), (3, 2, length, 6), (4,), (length, 4)]
        given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
        upstream = torch.randn(3, 4, length, 6, dtype=torch.float64)
        tokens, layout = tokens_of(kind, length, causal, uneven), TokenShards(length, count, causal)
        real = tokens.real_mask().expand(3, -1)[:, None, :, None]
        upstream = upstream * real  # nobody asks what padding says

        def bias(table: Tensor, queries: masks.TokenInfo, keys: masks.TokenInfo) -> Tensor:
            distance = (queries.positions[:, :, None] - keys.positions[:, None]).abs()
            return table[distance].permute(0, 3, 1, 2)

        mask, plain = masks.compose(tokens, tokens, causal=causal, kind=read_kind(kind))
        mask = masks.spelled_out(mask, plain, tokens, tokens)
        q, k, v, sink, table = given
        want = eager(q, k, v, mask, bias(table, tokens, tokens), 0.3, softcap=cap, sink=sink) * real
        wanted = [want, *torch.autograd.grad((want * upstream).sum(), given)]

        def work(
            ring: ThreadRing,
            given: list[Tensor] = given,
            tokens: masks.TokenInfo = tokens,
            layout: TokenShards = layout,
            upstream: Tensor = upstream,
            cap: float | None = cap,
            bias: Callable[..., Tensor] = bias,
        ) -> list[Tensor]:
            def mine(x: Tensor) -> Tensor:
                return heads_first(layout.pick(heads_first(x), ring.rank)).detach().clone().requires_grad_()

            q, k, v = map(mine, given[:3])
            sink, table = (x.detach().clone().requires_grad_() for x in given[3:])
            own = (tokens, layout)
            more = {"bias_of": functools.partial(bias, table), "weights": lambda: [table], "width": 12}
            view = rings.ring_view(ring, own, own, read_kind(kind), causal, **more)
            found = attend_ring(q, k, v, view, 0.3, cap, sink)
            there = (layout.slots(ring.rank) < layout.length)[:, None]
            (found * mine(upstream).detach() * there).sum().backward()
            return [found.detach(), *(x.grad for x in (q, k, v, sink, table) if x.grad is not None)]

        made = on_ring(count, work)
        for number, right in enumerate(wanted):
            parts = [one[number] for one in made]
            if number < 4:
                found = heads_first(layout.joined(torch.cat([heads_first(x) for x in parts], 1)))
            else:
                found = torch.stack(parts).sum(0)
            assert (found * real if number == 0 else found).sub(right).abs().max() <= 1e-10


def test_keys_in_reach_are_sent_and_work_is_even() -> None:
    """Of 64 tokens, a window of 5 asks for four on each end; a causal row costs everyone the same."""

    def view_of(kind: str, causal: bool) -> Callable[[ThreadRing], tuple[int, int]]:
        def work(ring: ThreadRing) -> tuple[int, int]:
            layout = TokenShards(64, ring.size, causal)
            tokens = masks.tokens_from(1, 64, torch.device("cpu"))
            view = rings.ring_view(ring, (tokens, layout), (tokens, layout), read_kind(kind), causal, width=1)
            seen = [masks_of for step in view.steps for masks_of in map(view.seen, step.blocks)]
            return sum(len(step.sent) for step in view.steps[1:]), sum(int(one.sum()) for one in seen)  # type: ignore[union-attr]

        return work

    assert on_ring(4, view_of("window(5)", False)) == [(4, 134), (8, 144), (8, 144), (4, 134)]
    sent, pairs = zip(*on_ring(4, view_of("window(5)", True)))
    assert max(sent) == 8 and sum(pairs) == 5 * 64 - 10
    sent, pairs = zip(*on_ring(4, view_of("full", True)))
    assert sum(pairs) == 64 * 65 // 2 and len(set(pairs)) == 1


def test_dropout_is_the_same_in_both_passes() -> None:
    layout, tokens = TokenShards(4, 1, zigzag=True), masks.tokens_from(1, 4, torch.device("cpu"))
    given = [torch.randn(1, 1, 4, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    def work(ring: ThreadRing) -> bool:
        view = rings.ring_view(ring, (tokens, layout), (tokens, layout), causal=True, width=2)

        def attend(*qkv: Tensor) -> Tensor:
            torch.manual_seed(0)
            return attend_ring(*qkv, view, 0.5, dropout=0.4)

        assert (attend(*given) - attend_ring(*given, view, 0.5)).abs().max() > 0.1
        return torch.autograd.gradcheck(attend, given)

    assert on_ring(1, work) == [True]


def test_half_precision_is_as_that_of_one_process() -> None:
    """Norms of heads leave queries and keys in float32 under autocast, and values in bfloat16."""
    torch.manual_seed(0)
    q, k, v, upstream = (torch.randn(2, 2, 8, 4) for _ in range(4))
    tokens, layout = masks.tokens_from(1, 8, torch.device("cpu")), TokenShards(8, 1, zigzag=True)
    given = [q.requires_grad_(), k.requires_grad_(), v.bfloat16().requires_grad_()]

    def answers(attend: Callable[..., Tensor]) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            found = attend(*given)
        return [found, *torch.autograd.grad((found * upstream).sum(), given)]

    def work(ring: ThreadRing) -> list[Tensor]:
        view = rings.ring_view(ring, (tokens, layout), (tokens, layout), causal=True, width=4)
        return answers(lambda *qkv: attend_ring(*qkv, view, 0.5))

    wanted = answers(lambda q, k, v: nnf.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5))
    for found, right in zip(on_ring(1, work)[0], wanted):
        assert found.dtype == right.dtype
        assert (found.float() - right.float()).abs().max() <= 0.03


SMALL = {"d_model": 16, "n_heads": 4, "n_layers": 2, "d_ff": 12, "vocab_size": 11, "max_positions": 16}
SCALING = RopeScaling(kind="dynamic", factor=2.0, original_positions=6)
MODELS: dict[str, dict[str, Any]] = {
    "packed": {"family": "decoder", "attention": ("full", "window(4)"), "n_kv_heads": 2},
    "relative": {"family": "decoder", "positions": "relative", "attention_softcap": 3.0},
    "masked": {"family": "encoder", "head": "mlm", "positions": "alibi", "attention": "window(3)"},
    "pair": {"family": "encoder-decoder", "positions": "relative", "attention_sink": True},
    "experts": {"family": "decoder", "n_experts": 3, "n_active_experts": 2},
    "tagger": {"family": "encoder", "head": "tagger", "n_classes": 3, "n_experts": 3, "n_active_experts": 1},
    "span": {"family": "encoder", "head": "span", "n_classes": 2, "positions": "sinusoidal", "n_types": 2},
    "mean": {"family": "encoder", "head": "classifier", "n_classes": 3, "pooling": "mean"},
    "last": {"family": "decoder", "head": "classifier", "n_classes": 3, "pooling": "last"},
    "picture": {"family": "encoder", "input": "patches", "image_size": (6, 4), "patch_size": 2},
}
MODELS["experts"] |= {"positions": "rope", "rope_scaling": SCALING}
MODELS["picture"] |= {"head": "classifier", "n_classes": 3, "positions": "learned", "n_channels": 1}


def batch_for(name: str, config: ch.ModelConfig) -> Batch:
    """Make a batch of three rows of 13 tokens, some of them padding."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(11, (3, 13), generator=draw)
    if name == "picture":
        return Batch(torch.randn(3, 1, 6, 4, generator=draw, dtype=torch.float64), torch.tensor([0, 2, 1]))
    if name == "packed":
        return Batch(ids, ids.roll(-1, 1), documents=(torch.arange(13) // 5).expand(3, -1).contiguous())
    mask = torch.ones(3, 13, dtype=torch.bool)
    mask[0, 9:] = mask[2, 12:] = False
    if config.head == "classifier":
        return Batch(ids, torch.tensor([0, 2, 1]), mask)
    if name == "span":
        return Batch(ids, torch.tensor([[1, 4], [0, 12], [IGNORE, 3]]), mask, types=(ids > 5).long())
    targets = (ids % config.n_classes if name == "tagger" else ids.roll(-1, 1)).masked_fill(~mask, IGNORE)
    if name == "pair":
        return Batch(ids, targets, mask, source=ids[:, :7], source_mask=mask[:, 3:10])
    return Batch(ids, targets, None if name == "experts" else mask)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_on_a_ring_has_the_gradients_of_one_process(name: str) -> None:
    torch.manual_seed(0)
    sizes = {key: value for key, value in SMALL.items() if name != "picture" or key not in ("vocab_size",)}
    config = ch.ModelConfig(**{**sizes, "dropout": 0.0, **MODELS[name]})
    model = ch.Transformer(config).double().train()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    batch = batch_for(name, config)
    loss, _ = batch_loss(model, batch, smoothing=0.1)
    loss.backward()
    rows = model.eval()(**batch.arguments()).hidden

    def work(ring: ThreadRing) -> tuple[Tensor, list[Tensor | None], Tensor]:
        own = copy.deepcopy(model).train()
        own.zero_grad()
        share_tokens(own, ring)
        found, _ = batch_loss(own, batch, smoothing=0.1, total=ring.summed)
        found.backward()
        gradients = [parameter.grad for parameter in own.parameters()]
        return found.detach(), gradients, own.eval()(**batch.arguments()).hidden.detach()

    made = on_ring(2, work)
    assert sum(found for found, _, _ in made).sub(loss).abs() <= 1e-10
    for number, parameter in enumerate(model.parameters()):
        parts = [gradients[number] for _, gradients, _ in made if gradients[number] is not None]
        right = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert torch.stack([torch.zeros_like(right), *parts]).sum(0).sub(right).abs().max() <= 1e-10
    for _, _, whole in made:  # outside of training each process reads whole rows
        assert whole.sub(rows).abs().max() <= 1e-10


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"attention": ("full", "linear(elu)")}, r"layer 1 is linear"),
        ({"attention": "gated-delta"}, r"layer 0 is gated-delta"),
        ({"depth_capacity": 0.5}, "depth_capacity, which ranks"),
        ({"layer_drop": 0.1}, "layer_drop 0.1, which draws"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(changes: dict[str, Any], why: str) -> None:
    model = ch.Transformer(ch.ModelConfig(**{**SMALL, "family": "decoder", **changes}))
    with pytest.raises(ConfigError, match=why):
        on_ring(2, lambda ring: share_tokens(copy.deepcopy(model), ring))
