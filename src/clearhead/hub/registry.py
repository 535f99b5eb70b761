"""All architectures.

A checkpoint's `model_type` names one; for a config of ours, the one that expresses it best is found.
"""

from typing import Any

from clearhead.config import ModelConfig
from clearhead.errors import CheckpointError, nearest
from clearhead.hub import (
    albert,
    bart,
    bert,
    distilbert,
    falcon,
    gemma,
    gpt2,
    gpt_neox,
    granite,
    llama,
    m2m100,
    marian,
    mistral,
    olmo2,
    phi,
    qwen,
    roberta,
    smollm3,
    stablelm,
    t5,
    vit,
)
from clearhead.hub.architecture import Architecture

# In the order in which `nearest_to` tries them: of several that are exact, the best known comes first.
KNOWN = (
    *(
        gpt2.GPT2,
        llama.LLAMA,
        mistral.MISTRAL,
        mistral.MIXTRAL,
        qwen.QWEN2,
        qwen.QWEN3,
        gemma.GEMMA,
        gemma.GEMMA2,
        gemma.GEMMA3,
    ),
    *(
        gpt_neox.GPT_NEOX,
        falcon.FALCON,
        phi.PHI,
        phi.PHI3,
        olmo2.OLMO2,
        stablelm.STABLELM,
        granite.GRANITE,
        smollm3.SMOLLM3,
    ),
    *(bert.BERT, roberta.ROBERTA, distilbert.DISTILBERT, albert.ALBERT, vit.VIT),
    *(t5.T5, bart.BART, bart.MBART, m2m100.M2M100, marian.MARIAN, t5.MT5),
)
ARCHITECTURES: dict[str, Architecture] = {architecture.model_type: architecture for architecture in KNOWN}


def architecture_of(theirs: dict[str, Any]) -> Architecture:
    """Return the architecture that a config.json names."""
    kind = theirs.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        hint = nearest(kind, ARCHITECTURES) if isinstance(kind, str) else ""
        raise CheckpointError(
            f"config.json has model_type {kind!r}{hint}: known are {', '.join(sorted(ARCHITECTURES))}"
        )
    return ARCHITECTURES[kind]


def nearest_to(config: ModelConfig) -> tuple[Architecture | None, list[str]]:
    """Return the architecture that expresses this config with the fewest differences, and the differences."""
    best: tuple[Architecture | None, list[str]] = (None, [f"family {config.family!r}"])
    for architecture in ARCHITECTURES.values():
        differences = architecture.differences(config)
        if differences == []:
            return architecture, []
        if differences is not None and (best[0] is None or len(differences) < len(best[1])):
            best = architecture, differences
    return best
