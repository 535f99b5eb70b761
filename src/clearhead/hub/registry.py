"""Which architectures there are. A checkpoint's `model_type` chooses; a model's own config finds the one that is exact."""

from __future__ import annotations

from typing import Any

from clearhead.config import ModelConfig
from clearhead.errors import CheckpointError, nearest
from clearhead.hub.architecture import Architecture
from clearhead.hub.gpt2 import GPT2
from clearhead.hub.llama import LLAMA

# In the order in which `nearest_to` tries them: of several that are exact, the best known comes first.
ARCHITECTURES: dict[str, Architecture] = {architecture.model_type: architecture for architecture in (GPT2, LLAMA)}


def architecture_of(theirs: dict[str, Any]) -> Architecture:
    """The architecture a config.json names."""
    kind = theirs.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        hint = nearest(kind, ARCHITECTURES) if isinstance(kind, str) else ""
        raise CheckpointError(f"config.json has model_type {kind!r}{hint}: known are {', '.join(sorted(ARCHITECTURES))}")
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
