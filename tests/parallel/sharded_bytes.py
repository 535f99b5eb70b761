"""Train an odd model for one step under `fully_shard` on one of two gloo ranks, and print its bytes."""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import clearhead as ch


def local_bytes(tensors):
    """Bytes that this rank has of each tensor."""
    return sum(tensor.to_local().numel() * tensor.element_size() for tensor in tensors)


def main() -> None:
    """Print one JSON object: bytes of weights, gradients and moments, for each config."""
    torch.set_num_threads(1)
    rank = int(sys.argv[1])
    dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
    found = []
    for settings in json.loads(sys.argv[3]):
        torch.manual_seed(0)
        model = ch.Transformer(ch.ModelConfig(**settings))
        for block in model.decoder.blocks:
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.arange(8)[None] % 7).logits.square().mean().backward()
        optimizer.step()
        states = optimizer.state.values()
        parameters = list(model.parameters())
        found.append(
            {
                "weights": local_bytes(parameters),
                "gradients": local_bytes(parameter.grad for parameter in parameters),
                "optimizer": local_bytes(
                    state[name] for state in states for name in ("exp_avg", "exp_avg_sq")
                ),
            }
        )
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()
    os._exit(0)  # what gloo's threads still do at the end is not waited for


if __name__ == "__main__":
    main()
