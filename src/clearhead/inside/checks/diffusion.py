"""Rows of the equality suite for diffusion language models: blocks, their cache, the bound of their loss."""

import torch

from clearhead.core.cache import Cache
from clearhead.core.transformer import Transformer
from clearhead.inside.checks.rows import Comparison, Inputs, gap
from clearhead.learn.batches.batch import Batch
from clearhead.learn.tasks.table import TASKS
from clearhead.run.generate.diffusion import denoise
from clearhead.run.generate.request import Request
from clearhead.run.generate.sequence import Prompts
from clearhead.variants.kinds import block_length, denoises


def diffusion_rows(inputs: Inputs) -> list[Comparison]:
    """Return the rows about blocks; the last token of the vocabulary stands for the mask."""
    row, config = inputs.compare, inputs.model.config
    size = block_length(config.main)
    whole = size is not None and inputs.length > size
    return [
        row(
            "cached = recomputed (blocks)",
            "a block at a time through the cache with one pass over all",
            _cached,
            fits=denoises(config) and whole,
        ),
        row(
            "blocks of 1 = autoregressive",
            "greedy denoising by blocks of one token with the loop that adds a token at a time",
            _autoregressive,
            fits=denoises(config) and size in (None, 1),
        ),
        row(
            "noised = loop",
            "the loss of a noised text next to its clean copy, with each block by itself after clean ones",
            _noised,
            fits=denoises(config),
        ),
    ]


def _cached(inputs: Inputs) -> float:
    size, cache = block_length(inputs.model.main.spec), Cache()
    parts = [inputs.model(part, cache=cache).logits for part in torch.split(inputs.main, size or 1, 1)]
    return gap(torch.cat(parts, 1), inputs.run())


def _autoregressive(inputs: Inputs) -> float:
    """Compare log-probabilities; infinite where a token differs."""
    model, mask, new = inputs.model, inputs.model.config.vocab_size - 1, inputs.length // 2
    prompt = inputs.main[:1, : inputs.length - new]
    request = Request(max_new_tokens=new, block_length=1, logprobs=True)
    done = denoise(model, request, Prompts(prompt.tolist()), mask)[0]
    text, logprobs, blank = prompt, list[torch.Tensor](), torch.full_like(prompt[:, :1], mask)
    later = (
        0 if block_length(model.main.spec) else new - 1
    )  # with full attention, a token sees the masks after it
    for place in range(new):
        masks = blank.expand(-1, 1 + (later and later - place))
        values = model(torch.cat([text, masks], 1)).logits[0, text.shape[1]].float().log_softmax(-1)
        best = values[:mask].argmax()
        logprobs.append(values[best])
        text = torch.cat([text, best.view(1, 1)], 1)
    if text[0, prompt.shape[1] :].tolist() != done.ids:
        return float("inf")
    return gap(torch.tensor(done.logprobs), torch.stack(logprobs))


def _noised(inputs: Inputs) -> float:
    model, ids, task = inputs.model, inputs.main, TASKS["diffusion"]
    T, mask = ids.shape[1], inputs.model.config.vocab_size - 1
    size = block_length(model.main.spec) or T
    noise = torch.rand(len(ids), 2, T, generator=torch.Generator().manual_seed(0)).double()
    ours = task.outputs_of(model, Batch(torch.full_like(ids, mask), ids, noise=noise.to(ids.device))).sum(1)
    return gap(ours, torch.stack([_bound(model, row, each, size, mask) for row, each in zip(ids, noise)]))


def _bound(model: Transformer, text: torch.Tensor, noise: torch.Tensor, size: int, mask: int) -> torch.Tensor:
    """Return the weighed loss of one row [T], a block after the other: []."""
    total = []
    for start in range(0, len(text), size):
        order = noise[0, start : start + size].argsort()
        count = int(noise[1, start] * len(order)) + 1
        hidden = start + order[:count].to(text.device)
        seen = text[: start + len(order)].index_fill(0, hidden, mask)
        each = model(seen[None]).logits[0].float().log_softmax(-1)[hidden, text[hidden]]
        total.append(-each.sum() * len(order) / count)
    return torch.stack(total).sum()
