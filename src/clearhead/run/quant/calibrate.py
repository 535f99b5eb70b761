"""What the linear layers of a model read: the second moment of their inputs on texts, or their mean squares.

Which inputs are large is much the same whatever a model reads. Tokens drawn at random tell it well enough,
and a model can be calibrated so without any text.

Shapes: D width in, T tokens.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from clearhead.core.transformer import Transformer
from clearhead.variants.contexts import evaluating

DRAWN = 256  # tokens


@torch.no_grad()
def moments(model: Transformer, rows: Iterable[Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Return the mean of x xᵀ over what each named linear layer reads, by name: [D, D].

    `rows` are ids [1, T]. Layers that read the same tensor, such as queries, keys and values, share theirs.
    """
    sums: dict[str, tuple[Tensor, int]] = {}
    latest: list[tuple[Tensor, Tensor]] = []  # the input seen last, and its product with itself

    def see(name: str, part: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0]
        if not latest or latest[0][0] is not x:
            rows = x.reshape(-1, x.shape[-1]).float()
            latest[:] = [(x, rows.t() @ rows)]
        before, count = sums.get(name, (torch.zeros_like(latest[0][1]), 0))
        sums[name] = before + latest[0][1], count + x.numel() // x.shape[-1]

    with _watched(model, names, see):
        for row in rows:
            model(row.to(next(model.parameters()).device), logits="last")
    return {name: total / count for name, (total, count) in sums.items()}


@torch.no_grad()
def drawn_sizes(model: Transformer, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the mean squares of what each named layer reads of tokens drawn at random, by name: [D].

    Empty for a model that reads more than tokens, or no tokens.
    """
    config, sizes = model.config, dict[str, Tensor]()
    if config.family != "decoder" or config.head != "lm":
        return sizes
    length = min(DRAWN, config.max_positions)
    ids = torch.randint(config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))

    def see(name: str, part: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        sizes[name] = inputs[0].reshape(-1, inputs[0].shape[-1]).float().square().mean(0)

    with _watched(model, names, see):
        model(ids.to(next(model.parameters()).device), logits="last")
    return sizes


@contextmanager
def _watched(model: Transformer, names: Iterable[str], see: Callable[..., None]) -> Iterator[None]:
    """Show the inputs of the named layers to `see` within a `with` block, in eval mode."""
    hooks = [model.get_submodule(name).register_forward_pre_hook(partial(see, name)) for name in names]
    try:
        with evaluating(model):
            yield
    finally:
        for hook in hooks:
            hook.remove()
