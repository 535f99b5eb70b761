"""Worlds of 8 to 64 processes, each a thread of this one with real arithmetic, give one process's numbers."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import clearhead as ch
from clearhead.learn.parallel import ParallelPlan, shards
from clearhead.learn.parallel.split import split
from clearhead.learn.parallel.world import World

pytestmark = pytest.mark.ledger("I3")
ROWS, LENGTH = 8, 6
# Nothing but heads and d_ff is divided by the mesh: not the vocabulary, the width, the rows of a batch.
SIZES = {"vocab_size": 101, "n_layers": 1, "max_positions": 7}
MODELS: dict[str, dict[str, Any]] = {
    "one key head": {"d_model": 18, "n_heads": 16, "d_head": 2, "n_kv_heads": 1, "d_ff": 48, "gated": True},
    "three key heads": {"d_model": 30, "n_heads": 24, "d_head": 2, "n_kv_heads": 3, "d_ff": 40},
    "key heads for some": {"d_model": 18, "n_heads": 16, "d_head": 3, "n_kv_heads": 4, "d_ff": 16},
    "sixty-four heads": {"d_model": 15, "n_heads": 64, "d_head": 2, "n_kv_heads": 8, "d_ff": 64},
}
MODELS["one key head"] |= {"positions": "rope", "norm": "rmsnorm", "tie_embeddings": False}
MODELS["three key heads"] |= {"positions": "relative", "qk_norm": "head"}
MODELS["key heads for some"] |= {"positions": "alibi", "attention_sink": True}
# In the suite three of them, as tensors of 64 threads take long; `python -m tests.parallel.test_worlds`: all.
WORLDS = [
    ("key heads for some", {"tensor": 16}),
    ("three key heads", {"data": 2, "shard": 2, "tensor": 2}),
    ("sixty-four heads", {"data": 2, "shard": 32}),
    ("one key head", {"tensor": 8}),
    ("three key heads", {"tensor": 8}),
    ("sixty-four heads", {"tensor": 64}),
    ("three key heads", {"shard": 8}),
    ("one key head", {"data": 2, "shard": 3, "tensor": 4}),
]


def simulate(size: int, work: Callable[[World], Any]) -> list[Any]:
    """Call `work` in a world of threads; return what each of them returned."""
    from torch.testing._internal.distributed.multi_threaded_pg import (
        ProcessLocalGroup,
        _install_threaded_pg,
        _uninstall_threaded_pg,
    )

    found: list[Any] = [None] * size
    failures: list[BaseException] = []
    _install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    store = dist.HashStore()

    def one(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=size, store=store)
            found[rank] = work(World(rank=rank, size=size))
        except BaseException as error:
            failures.append(error)
            ProcessLocalGroup.exception_handle(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        _uninstall_threaded_pg()
        ProcessLocalGroup.reset()
    if failures:
        raise failures[0]
    return found


def passed(model: ch.Transformer, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Run both passes on some rows; return the logits [B, T, V]."""
    logits = model(ids).logits
    (logits.log_softmax(-1) * weights).sum().backward()
    return logits.detach()


@pytest.mark.parametrize(("name", "mesh"), WORLDS[:3], ids=str)
@pytest.mark.slow
def test_a_large_world_gives_the_numbers_of_one_process(name: str, mesh: dict[str, int]) -> None:
    torch.manual_seed(0)
    plain = ch.Transformer(ch.ModelConfig(**SIZES, **MODELS[name])).train()
    ids = torch.randint(101, (ROWS, LENGTH))
    weights = torch.randn(ROWS, LENGTH, 101) / ids.numel()
    size = math.prod(mesh.values())

    def work(world: World) -> tuple[slice, torch.Tensor, dict[str, torch.Tensor]]:
        plan = ParallelPlan(**mesh).settled(world.size)
        # The axes that `split` asks for: a mesh of all six makes ten thousands of groups among 64 processes.
        sizes = (plan.data or 1, plan.shard or 1, plan.tensor)
        whole = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "held", "tensor"))
        world = replace(world, plan=plan, mesh=whole, held=whole["data", "held"])
        model = copy.deepcopy(plain)
        partial = split(model, world)
        begin, end = (ROWS * number // world.shares for number in (world.share, world.share + 1))
        rows = slice(begin, end) if end > begin else slice(0, 1)
        logits = passed(model, ids[rows], weights[rows] * (end > begin))
        world.complete(partial)
        gradients = {name: shards.whole(one.grad) for name, one in model.named_parameters()}
        return rows, logits, gradients if world.first else {}

    found = simulate(size, work)
    expected = passed(plain, ids, weights)
    for rows, logits, _ in found:
        torch.testing.assert_close(logits, expected[rows], atol=1e-5, rtol=1e-5)
    for key, parameter in plain.named_parameters():
        torch.testing.assert_close(found[0][2][key], parameter.grad, atol=1e-5, rtol=1e-5)


if __name__ == "__main__":
    for each in WORLDS:
        test_a_large_world_gives_the_numbers_of_one_process(*each)
        print(*each, "to 1e-5", flush=True)
