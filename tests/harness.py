"""Share what the tests need: micro models, inputs, ways to run a model, and checks every part must pass."""

from __future__ import annotations

from collections.abc import Callable

import safetensors.torch
import torch
from torch import Tensor, nn

import clearhead as ch

V = 13  # vocabulary of the micro models
T = 8  # tokens of their inputs
SMALL = {"vocab_size": V, "d_model": 16, "n_layers": 2, "n_heads": 4, "d_ff": 24, "max_positions": 32}


def config(**changes) -> ch.ModelConfig:
    """A micro model; `changes` override."""
    return ch.ModelConfig(**{**SMALL, **changes})


def scramble(module: nn.Module, seed: int = 0, spread: float = 0.2) -> nn.Module:
    """Large random weights, biases and norms too: fresh ones are too tame for a wrong mask to show."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
            is_norm = parameter.ndim == 1 and name.endswith("weight")
            parameter.copy_(1 + 0.3 * noise if is_norm else spread * noise)
    return module


def build(seed: int = 0, **changes) -> ch.Transformer:
    """A scrambled micro model in evaluation mode."""
    return scramble(ch.Transformer(config(**changes)), seed).eval()


def some_ids(batch: int = 2, length: int = T, seed: int = 1, vocab: int = V) -> Tensor:
    """[B, T] token ids."""
    return torch.randint(vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def worst(a: Tensor, b: Tensor) -> float:
    """The largest absolute difference; infinite if anything is NaN."""
    assert a.shape == b.shape, f"{tuple(a.shape)} against {tuple(b.shape)}"
    a, b = (one.int() if one.dtype == torch.bool else one for one in (a, b))
    difference = (a.detach() - b.detach()).abs().max().item() if a.numel() else 0.0
    return difference if difference == difference else float("inf")


def in_pieces(model: ch.Transformer, ids: Tensor, sizes: list[int], cache: ch.Cache, **given) -> Tensor:
    """Return logits of `ids` fed through `cache` in pieces; cut tensors [B, T] among `given` alongside."""
    along = {
        name: given.pop(name)
        for name in ("mask", "positions", "documents", "types")
        if given.get(name) is not None
    }
    said, start = [], 0
    for size in sizes:
        piece = slice(start, start + size)
        cut = {name: x[:, piece] for name, x in along.items()}
        said.append(model(ids[:, piece], cache=cache, **cut, **given).logits)
        start += size
        (
            given.pop("source", None),
            given.pop("source_mask", None),
            given.pop("source_documents", None),
            given.pop("prefix", None),
        )
    assert start == ids.shape[1], "the pieces do not add up"
    return torch.cat(said, dim=1)


def chunks(length: int, size: int) -> list[int]:
    """Pieces of one size, the last perhaps shorter."""
    return [min(size, length - start) for start in range(0, length, size)]


def pad(ids: Tensor, where: str, seed: int = 9) -> tuple[Tensor, Tensor]:
    """Add three slots of random ids to `ids`, left, right or between; return also the mask of real ones."""
    batch, length = ids.shape
    slots = {
        "left": range(3, 3 + length),
        "right": range(length),
        "gaps": [slot for slot in range(length + 3) if slot not in (1, 2, length - 1)],
    }[where]
    padded = some_ids(batch, length + 3, seed, int(ids.max()) + 1)
    mask = torch.zeros(batch, length + 3, dtype=torch.bool)
    padded[:, list(slots)], mask[:, list(slots)] = ids, True
    return padded, mask


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor | None]:
    """Gradient of every parameter, by name."""
    named = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return dict(zip(named, found))


def through_bytes(model: nn.Module, fresh: nn.Module) -> nn.Module:
    """`fresh` with the weights of `model`, sent through the bytes of a safetensors file."""
    written = safetensors.torch.save(
        {name: x.detach().clone().contiguous() for name, x in model.state_dict().items()}
    )
    fresh.load_state_dict(safetensors.torch.load(written))
    return fresh.eval()


def every_dtype_kept(part: Callable[[Tensor], Tensor], module: nn.Module | None, x: Tensor) -> None:
    """bfloat16 in, bfloat16 out; float64 stays float64."""
    for dtype in (torch.float64, torch.bfloat16):
        if module is not None:
            module.to(dtype)
        assert part(x.to(dtype)).dtype == dtype
