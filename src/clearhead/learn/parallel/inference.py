"""A model for use, split by heads over the processes that `torchrun` has started.

Training leaves the products of split weights to PyTorch's DTensor, which works out at each of them what is
to be sent. A token takes hundreds of small products, and that takes longer than they do. So the layers of a
model for use multiply the part of their weight that is here, and send themselves what they must.

Shapes: B batch, T length, D width in, N width out, V vocabulary.
"""

import atexit
import math
from collections import OrderedDict
from collections.abc import Mapping

import torch
import torch.distributed as dist
import torch.nn.functional as nnf
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from clearhead.core.heads import LanguageHead
from clearhead.core.transformer import Transformer
from clearhead.errors import ConfigError, refuse
from clearhead.hub.checkpoint import Unread
from clearhead.learn.parallel.plan import ParallelPlan
from clearhead.learn.parallel.shards import local, materialise
from clearhead.learn.parallel.split import split_tensors
from clearhead.learn.parallel.world import join
from clearhead.run.kernels.parts import like


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
        multiply_here(model, mesh)
    materialise(model, device, unread)
    return model.eval()


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def multiply_here(model: Transformer, mesh: DeviceMesh) -> None:
    """Let split layers compute with plain tensors, in place; parameters stay DTensors."""
    heads = {part.out for part in model.modules() if isinstance(part, LanguageHead)}
    for name, part in list(model.named_modules()):
        if not isinstance(part, nn.Linear | nn.Embedding) or not isinstance(part.weight, DTensor):
            continue
        kind: type[LocalColumns | LocalRows | LocalWords | LocalTable] = LocalTable
        if isinstance(part, nn.Linear):
            by_columns = part.weight.placements[0].is_shard(0)
            kind = LocalWords if part in heads else LocalColumns if by_columns else LocalRows
        own = {"group": mesh.get_group(), "rank": mesh.get_local_rank(), "size": mesh.size()}
        made = like(part, kind, **own)
        made._forward_hooks, made._forward_pre_hooks = OrderedDict(), OrderedDict()  # DTensor's
        model.set_submodule(name, made)


def _linear_here(layer: nn.Linear, x: Tensor) -> Tensor:
    return nnf.linear(x, local(layer.weight), None if layer.bias is None else local(layer.bias))


class LocalColumns(nn.Linear):
    """A linear layer with some of the outputs."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., N here]."""
        return _linear_here(self, x)


class LocalRows(nn.Linear):
    """A linear layer with some of the inputs: what the processes find is added up."""

    group: dist.ProcessGroup

    def forward(self, x: Tensor) -> Tensor:
        """[..., D here] -> [..., N]."""
        y = nnf.linear(x, local(self.weight))
        dist.all_reduce(y, group=self.group)
        return y if self.bias is None else y + local(self.bias)


class LocalWords(nn.Linear):
    """An output layer with some of the words: what the processes find is laid side by side."""

    group: dist.ProcessGroup
    size: int

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., V]."""
        y = _linear_here(self, x)
        width = math.ceil(self.out_features / self.size)  # the last process may have fewer
        y = nnf.pad(y, (0, width - y.shape[-1])).contiguous()
        parts = [torch.empty_like(y) for _ in range(self.size)]
        dist.all_gather(parts, y, group=self.group)
        return torch.cat(parts, -1)[..., : self.out_features]


class LocalTable(nn.Embedding):
    """A token table with some of the words: a token is nothing where it is not."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def forward(self, ids: Tensor) -> Tensor:
        """[B, T] -> [B, T, D]."""
        table = local(self.weight)
        own = ids - self.rank * math.ceil(self.num_embeddings / self.size)
        here = (own >= 0) & (own < len(table))
        y = nnf.embedding(own.where(here, 0), table) * here[..., None]
        dist.all_reduce(y, group=self.group)
        return y
