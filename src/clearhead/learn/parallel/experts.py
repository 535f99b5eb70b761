"""The expert axis: each process has some of the experts of a mixture, and tokens travel to theirs and back.

A process has rows of its own and a router over all experts. All-to-all takes each token to the processes of
its experts, as many times as it has experts there, and the answers back to where they are weighted and added.
Nothing is dropped or padded: counts are exchanged first. The gradient takes the same ways.

Shapes: N tokens of this process, A active experts per token, D model, X experts.
"""

from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single
from torch.distributed.device_mesh import DeviceMesh

from clearhead.core.taps import Tap
from clearhead.core.transformer import Transformer
from clearhead.errors import ConfigError, refuse
from clearhead.run.kernels.parts import like
from clearhead.variants.routing import Experts


class SplitExperts(Experts):
    """A mixture with some of the experts, by their numbers; the others are with other processes."""

    experts: nn.ModuleDict  # type: ignore[assignment]
    group: dist.ProcessGroup  # the processes that have all experts together
    shares: list[int]  # the number of experts of each

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # the counts are not known ahead
    def answer(self, rows: Tensor, counts: Tensor, tap: Tap) -> Tensor:
        """See `Experts.answer`: rows of this process, experts of all."""
        own, processes = len(self.experts), len(self.shares)
        theirs = counts.new_empty(processes * own)
        dist.all_to_all_single(theirs, counts, [own] * processes, self.shares, group=self.group)
        asked, found = counts.tolist(), theirs.tolist()  # [X]; of each process, for each expert here
        ends = [0, *accumulate(self.shares)]
        going = [sum(asked[begin:end]) for begin, end in pairwise(ends)]
        coming = [sum(found[begin : begin + own]) for begin in range(0, len(found), own)]

        here = torch.split(self._travel(rows, going, coming), found)  # by process, then by expert
        each = []
        for number, expert in enumerate(self.experts.values()):
            answer = expert(torch.cat(here[number::own]))
            each.append(torch.split(answer, found[number::own]))
        answers = [part for process in zip(*each) for part in process]
        return self._travel(torch.cat(answers), coming, going)

    def _travel(self, rows: Tensor, going: list[int], coming: list[int]) -> Tensor:
        """Send so many rows [_, D] to each process, and return those that come from each."""
        return all_to_all_single(rows.contiguous(), coming, going, self.group)


def split_experts(model: Transformer, mesh: DeviceMesh) -> list[list[nn.Module]]:
    """Leave each process along the expert axis its share of the experts; return those, layer by layer."""
    size, place = mesh.size(), mesh.get_local_rank()
    mixtures = [(name, part) for name, part in model.named_modules() if isinstance(part, Experts)]
    refuse(
        not model.config.n_experts,  # a stage of a pipeline may have dense layers alone
        f"parallel.expert {size} shares out experts, and the model has none: use data, shard or tensor",
        ConfigError,
    )
    found: list[list[nn.Module]] = []
    for name, part in mixtures:
        count = len(part.experts)
        refuse(
            size > count,
            f"parallel.expert {size} is more than the {count} experts of {name}: choose {count} or less",
            ConfigError,
        )
        ends = [count * number // size for number in range(size + 1)]
        own = {str(number): part.experts[number] for number in range(ends[place], ends[place + 1])}
        found.append(list(own.values()))
        shares = [end - begin for begin, end in pairwise(ends)]
        changes = {"experts": nn.ModuleDict(own), "group": mesh.get_group(), "shares": shares}
        model.set_submodule(name, like(part, SplitExperts, **changes))
    return found
