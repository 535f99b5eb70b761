"""Sampling from masked and block diffusion language models: new tokens begin masked, and steps unmask them.

A block of new tokens begins as masks. Each denoising step runs the model once on the block and its context,
draws a token for every mask, keeps some of these, and masks the others again (low-confidence remasking, as in
LLaDA, or at random, as in MDLM). Once a block is finished, the next begins.

In a model whose attention is block-causal, finished blocks never change: a cache keeps their keys, and a step
runs the block alone. Blocks of one token are the autoregressive loop. In a model with full attention
(LLaDA) each token sees all others, masks too, and a step runs the whole text.

Shapes: T tokens of a text, N masked tokens of a block, V vocabulary.
"""

import math
from collections.abc import Generator, Iterator
from itertools import pairwise
from typing import NamedTuple, cast

import torch
from torch import Tensor

from clearhead.core.cache import Cache
from clearhead.core.config import TABLES, ModelConfig
from clearhead.core.transformer import Transformer
from clearhead.errors import refuse
from clearhead.run.generate.request import DEFAULTS, DIFFUSION, DRAWING, Request
from clearhead.run.generate.sequence import (
    LENGTH_ALONE,
    Dice,
    Ends,
    Prompts,
    Sampler,
    Sequence,
    distribution,
    draw,
    logprobs_of,
    without,
)
from clearhead.variants.kinds import block_length, denoises

LIMITS = ("max_new_tokens", "stop", "stop_tokens", "seconds")
TAKEN = (*DIFFUSION, *DRAWING, *LIMITS, "seed", "logprobs", "skip_special_tokens", "banned")


def check_diffusion(config: ModelConfig, request: Request, **hooks: object) -> None:
    """Refuse options that a diffusion model has no use for, and those of one that this model has not."""
    changed = [name for name, value in vars(request).items() if value != DEFAULTS[name]]
    if not denoises(config):
        name = next((name for name in changed if name in DIFFUSION), None)
        way = f"{name} is for diffusion models, and this is a {config.family} that writes token by token"
        return refuse(name is not None, f"{way}: leave it out")
    changed += [name for name, value in hooks.items() if value is not None]
    name = next((name for name in changed if name not in TAKEN), None)
    refuse(
        name is not None,
        f"{name} is for models that write from left to right, and this is a diffusion model, which unmasks "
        f"tokens in any order: leave it out, or choose from {', '.join(TAKEN)}",
    )
    size, wanted = block_length(config.main), request.block_length
    refuse(
        size is not None and wanted not in (None, size),
        f"block_length {wanted}: this model was built for blocks of {size}: leave it out",
    )


def schedule(masked: int, steps: int, name: str) -> list[int]:
    """Return how many tokens each step unmasks; steps that would unmask none are left out.

    After the share s of the steps, 1 - s of the tokens are masked (linear), or cos(s * pi / 2) of them
    (cosine, MaskGIT): few at first, where little is known.
    """
    shares = [step / steps for step in range(1, steps)]
    rest = [1 - share if name == "linear" else math.cos(share * math.pi / 2) for share in shares]
    left = [masked, *(round(masked * share) for share in rest), 0]
    return [before - after for before, after in pairwise(left) if before > after]


@torch.inference_mode()
def denoise(
    model: Transformer,
    request: Request,
    prompts: Prompts,
    mask: int,
    ends: Ends = LENGTH_ALONE,
    use_cache: bool = True,
) -> list[Sequence]:
    """Continue each prompt by `request.max_new_tokens`, each by itself, so that batches change nothing.

    `mask` is the id of the mask token. `use_cache` may be turned off, which changes nothing but the time.
    """
    rows = Sampler(model, request, ends).begin(prompts)
    for row in rows:
        for _ in Denoiser(model, request, row, mask, use_cache).steps():
            pass
    return rows


class Unmasked(NamedTuple):
    """What a denoising step has kept, of the block from `begin` to `end`."""

    begin: int
    end: int
    positions: list[int]  # in the text
    tokens: list[int]
    confidence: list[float]  # the probability that the model gave to each token


class Denoiser:
    """One text as it is denoised."""

    def __init__(
        self, model: Transformer, request: Request, row: Sequence, mask: int, use_cache: bool = True
    ) -> None:
        config, size = model.config, block_length(model.config.main)
        self.model, self.request, self.row, self.mask = model, request, row, mask
        self.device = next(model.parameters()).device
        self.dice = row.dice or Dice(request.seed)  # also of the order
        total = len(row.prompt) + request.max_new_tokens
        refuse(
            config.positions in TABLES and total > config.max_positions,
            f"a prompt of {len(row.prompt)} tokens and {request.max_new_tokens} new ones need {total} "
            f"positions and the model has {config.max_positions}: shorten one of them",
        )
        self.text = torch.tensor([*row.prompt, *[mask] * request.max_new_tokens], device=self.device)
        self.causal = size is not None
        self.size = size or request.block_length or request.max_new_tokens
        self.cache = Cache(total) if self.causal and use_cache else None
        # Blocks of attention are counted from the text's first token; others from the first new one.
        self.start = len(row.prompt) // self.size * self.size if self.causal else len(row.prompt)

    def steps(self) -> Iterator[Unmasked]:
        """Finish block after block until the text ends; yield after each denoising step."""
        if self.cache is not None and self.start:
            self.model(self.text[None, : self.start], cache=self.cache, logits="none")
        for begin in range(self.start, len(self.text), self.size):
            end = min(begin + self.size, len(self.text))
            if not (yield from self.finish(begin, end)) or end == len(self.text):
                return
            if self.cache is not None:
                self.model(self.text[None, begin:end], cache=self.cache, logits="none")

    def finish(self, begin: int, end: int) -> Generator[Unmasked, None, bool]:
        """Unmask a block and add its tokens to the row; return False where the text has ended."""
        masked = torch.arange(max(begin, len(self.row.prompt)), end, device=self.device)  # N
        first, logprobs = int(masked[0]), torch.zeros(len(self.text))
        steps = self.request.denoising_steps or len(masked)
        for count in schedule(len(masked), steps, self.request.mask_schedule):
            if (reason := self.row.ends.reason()) is not None:
                self.row.stop_reason = reason
                return False
            logits = self.logits(begin, end)[masked - begin]  # N V
            tokens, confidence, order = self.drawn(logits)
            chosen = order.sort(descending=True, stable=True).indices[:count]
            self.text[masked[chosen]] = tokens[chosen]
            if self.request.logprobs:
                values, _ = logprobs_of(logits[chosen], tokens[chosen], 0)
                logprobs[masked[chosen].cpu()] = torch.tensor(values)
            kept = (values[chosen].tolist() for values in (masked, tokens, confidence))
            keep = torch.ones(len(masked), dtype=torch.bool, device=self.device)
            masked = masked[keep.index_fill(0, chosen, False)]
            self.row.steps += 1
            yield Unmasked(begin, end, *kept)
        for token, logprob in zip(self.text[first:end].tolist(), logprobs[first:end].tolist()):
            if self.request.logprobs:
                self.row.logprobs.append(logprob)
            if not self.row.add(token, self.row.steps):
                return False
        return True

    def logits(self, begin: int, end: int) -> Tensor:
        """Run the model on the text, or with a cache on the block; return the block's logits [T, V]."""
        if self.cache is not None:
            logits = self.model(self.text[None, begin:end], cache=self.cache).logits[0]
            self.cache.crop(begin)
            return cast(Tensor, logits)
        seen = self.text[:end] if self.causal else self.text
        return cast(Tensor, self.model(seen[None]).logits[0, begin:end])

    def drawn(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return a token for each mask, its probability, and how soon it is kept: [N, V] -> [N] each.

        The most probable ones come first, or any, by a random number.
        """
        allowed = without(logits, [self.mask, *self.request.banned])
        probability = distribution(allowed, self.request)
        if self.request.temperature > 0:
            tokens = draw(probability, self.roll(len(logits))).to(logits.device)
        else:
            tokens = probability.argmax(-1)
        confidence = allowed.double().softmax(-1).gather(-1, tokens[:, None])[:, 0]
        if self.request.unmasking == "random":
            return tokens, confidence, self.roll(len(logits)).to(logits.device)
        return tokens, confidence, confidence

    def roll(self, count: int) -> Tensor:
        """Return the next uniform numbers [N]."""
        return torch.tensor([self.dice.roll() for _ in range(count)], dtype=torch.float64)
