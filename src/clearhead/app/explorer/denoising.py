"""How a diffusion model writes on after a run's text, denoising step by denoising step, as plain JSON."""

from __future__ import annotations

from typing import Any

import torch

from clearhead.app.explorer.views import PageRun
from clearhead.errors import refuse
from clearhead.hub.tokens.text import labels
from clearhead.learn.tasks.generation import asked_for
from clearhead.run.generate.diffusion import Denoiser
from clearhead.run.generate.sequence import Prompts, Sampler
from clearhead.variants.kinds import denoises

MOST = 256  # new tokens


def denoising(run: PageRun, tokens: int = 16, steps: int = 8) -> dict[str, Any]:
    """Return what each denoising step unmasked: positions, tokens, and the probability of each.

    Each step keeps the most probable tokens, as in `clearhead generate --temperature 0`. `steps` is for each
    block.
    """
    m = run.m
    refuse(not denoises(m.config), f"denoising is for diffusion models, and this is a {m.config.family}")
    refuse(tokens > MOST, f"{tokens:,} new tokens: the page shows at most {MOST}")
    prompt = run.given if isinstance(run.given, str) else list(run.prepared.tokens.ids)
    options = {"max_new_tokens": tokens, "temperature": 0.0, "denoising_steps": steps}
    request, texts, ends = asked_for(m, [prompt], options)
    with torch.inference_mode():
        (row,) = Sampler(m.model, request, ends).begin(Prompts(texts))
        kept = list(Denoiser(m.engine.runner(), request, row, m.mask_id).steps())
    named = [{**step._asdict(), "labels": list(labels(m.tokenizer, step.tokens))} for step in kept]
    return {"start": len(texts[0]), "tokens": tokens, "steps": named}
