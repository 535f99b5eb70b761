"""Which architectures there are. A checkpoint's `model_type` chooses; a model's own config finds the one that is exact."""

from __future__ import annotations

from typing import Any

from clearhead.config import ModelConfig
from clearhead.errors import CheckpointError, nearest
from clearhead.hub.albert import ALBERT
from clearhead.hub.architecture import Architecture
from clearhead.hub.bart import BART, MBART
from clearhead.hub.bert import BERT
from clearhead.hub.distilbert import DISTILBERT
from clearhead.hub.falcon import FALCON
from clearhead.hub.gemma import GEMMA, GEMMA2, GEMMA3
from clearhead.hub.gpt2 import GPT2
from clearhead.hub.gpt_neox import GPT_NEOX
from clearhead.hub.granite import GRANITE
from clearhead.hub.llama import LLAMA
from clearhead.hub.m2m100 import M2M100
from clearhead.hub.marian import MARIAN
from clearhead.hub.mistral import MISTRAL, MIXTRAL
from clearhead.hub.olmo2 import OLMO2
from clearhead.hub.phi import PHI, PHI3
from clearhead.hub.qwen import QWEN2, QWEN3
from clearhead.hub.roberta import ROBERTA
from clearhead.hub.smollm3 import SMOLLM3
from clearhead.hub.stablelm import STABLELM
from clearhead.hub.t5 import MT5, T5
from clearhead.hub.vit import VIT

# In the order in which `nearest_to` tries them: of several that are exact, the best known comes first.
DECODERS = (
    *(GPT2, LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3),
    *(GPT_NEOX, FALCON, PHI, PHI3, OLMO2, STABLELM, GRANITE, SMOLLM3),
)
ENCODERS = (BERT, ROBERTA, DISTILBERT, ALBERT, VIT)
ENCODER_DECODERS = (T5, BART, MBART, M2M100, MARIAN, MT5)
ARCHITECTURES: dict[str, Architecture] = {
    architecture.model_type: architecture for architecture in (*DECODERS, *ENCODERS, *ENCODER_DECODERS)
}


def architecture_of(theirs: dict[str, Any]) -> Architecture:
    """The architecture a config.json names."""
    kind = theirs.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        hint = nearest(kind, ARCHITECTURES) if isinstance(kind, str) else ""
        raise CheckpointError(
            f"config.json has model_type {kind!r}{hint}: known are {', '.join(sorted(ARCHITECTURES))}"
        )
    return ARCHITECTURES[kind]


def nearest_to(config: ModelConfig) -> tuple[Architecture | None, list[str]]:
    """The architecture that expresses this config with the fewest differences, and those differences; empty: it is exact."""
    best: tuple[Architecture | None, list[str]] = (None, [f"family {config.family!r}"])
    for architecture in ARCHITECTURES.values():
        differences = architecture.differences(config)
        if differences == []:
            return architecture, []
        if differences is not None and (best[0] is None or len(differences) < len(best[1])):
            best = architecture, differences
    return best
