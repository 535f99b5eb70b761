"""A model for use, split by heads over the processes that `torchrun` has started."""

import atexit
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from clearhead.errors import ConfigError, refuse
from clearhead.hub.checkpoint import Unread
from clearhead.model.transformer import Transformer
from clearhead.parallel.plan import ParallelPlan
from clearhead.parallel.shards import materialise
from clearhead.parallel.split import split_tensors
from clearhead.parallel.world import join


def split_for_use(
    model: Transformer, unread: Unread, sizes: Mapping[str, int], device: torch.device
) -> Transformer:
    """Split a model that has no weights yet, and read this process's parts; the processes stay joined."""
    refuse(
        sizes.keys() != {"tensor"},
        f'parallel {dict(sizes)} is not possible: a model for use is split by heads, as {{"tensor": 2}}',
        ConfigError,
    )
    plan, opened = ParallelPlan(data=1, shard=1, **sizes), dist.is_initialized()
    world = join()
    if not opened and dist.is_initialized():
        atexit.register(_leave)
    plan = plan.settled(world.size)
    if plan.tensor > 1:
        mesh = init_device_mesh(device.type, (plan.tensor,), mesh_dim_names=("tensor",))
        split_tensors(model, mesh)
    materialise(model, device, unread)
    return model.eval()


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
