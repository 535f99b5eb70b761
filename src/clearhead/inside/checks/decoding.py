"""Rows of the equality suite for diffusion language models and multi-token prediction.

Blocks, their cache and the bound of their loss; drafts that change no token, and the loss as a loop.
"""

import torch
import torch.nn.functional as F

from clearhead.core.cache import Cache
from clearhead.core.masks import tokens_from
from clearhead.core.stack import Inputs as StackInputs
from clearhead.core.transformer import Transformer
from clearhead.inside.checks.rows import Comparison, Inputs, gap
from clearhead.learn.batches.batch import Batch
from clearhead.learn.losses import Terms, batch_loss
from clearhead.learn.tasks.table import TASKS
from clearhead.run.generate.decode import decode, steps_back
from clearhead.run.generate.diffusion import denoise
from clearhead.run.generate.request import Request
from clearhead.run.generate.sequence import Prompts
from clearhead.run.generate.speculate import MTPDrafter
from clearhead.variants.kinds import block_length, denoises
from clearhead.variants.mtp import states_after

# Diffusion --------------------------------------------------------------------------------------------------


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


# Multi-token prediction -------------------------------------------------------------------------------------


def mtp_rows(inputs: Inputs) -> list[Comparison]:
    """Return the rows about MTP layers."""
    model, config = inputs.model, inputs.model.config
    layers = config.n_mtp_layers > 0
    return [
        inputs.compare(
            "MTP drafts = greedy decoding",
            "greedy tokens with drafts of the model's own MTP layers with one pass over the whole text",
            _drafted,
            fits=layers and steps_back(model) and not config.rotates_by_length and inputs.length > 2,
        ),
        inputs.compare(
            "MTP loss = loop",
            "the loss of the MTP layers over all rows with a loop over rows, layers and tokens",
            _loss,
            fits=layers and inputs.length > 1 + config.n_mtp_layers,
        ),
    ]


def _drafted(inputs: Inputs) -> float:
    """Compare log-probabilities, those of the tokens also with the best at their place."""
    new = inputs.length // 2
    prompt = inputs.main[:1, : inputs.length - new].tolist()
    request = Request(max_new_tokens=new, logprobs=True)
    drafter = MTPDrafter(inputs.model, 3, request)
    row = decode(inputs.model, request, Prompts(prompt), drafters=[drafter])[0]
    text = torch.tensor([prompt[0] + row.ids], device=inputs.device)
    values = inputs.model(text).logits[0, len(prompt[0]) - 1 : -1].float().log_softmax(-1)
    chosen = values.gather(-1, text[0, len(prompt[0]) :, None])[:, 0]
    reported = torch.tensor(row.logprobs, device=inputs.device)
    return max(gap(reported, chosen), gap(reported, values.amax(-1)))


def _loss(inputs: Inputs) -> float:
    model, ids, weight = inputs.model, inputs.main, 0.5
    batch = Batch(ids[:, :-1], ids[:, 1:].clone())
    model.training = True  # of the whole alone, whose loss then has that of its MTP layers: nothing drops out
    try:
        whole = batch_loss(model, batch, balance=0.0, terms=Terms(mtp_weight=weight))[0]
        main = batch_loss(model, batch, balance=0.0)[0]
    finally:
        model.training = False
    total = torch.zeros((), device=inputs.device)
    for row in ids[:, None]:
        states, length = model(row[:, :-1]).hidden, row.shape[1] - 1
        for number, layer in enumerate(model.mtp or (), 1):
            later, tokens = row[:, number:-1], tokens_from(1, length - number, inputs.device)
            states = states_after(model, layer, states[:, : length - number], StackInputs(later), tokens)
            for place, token in enumerate(row[0, number + 1 :]):
                logits = model.head(states[:, place : place + 1], None)[0, 0].float()
                total += F.cross_entropy(logits, token)
    return gap(whole, main + weight / model.config.n_mtp_layers * total)
