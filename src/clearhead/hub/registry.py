"""All architectures.

A checkpoint's `model_type` names one; for a config of ours, the one that expresses it best is found.
"""

from pathlib import Path
from typing import Any

from clearhead.core.config import ModelConfig
from clearhead.errors import CheckpointError
from clearhead.hub import (
    bart,
    bert,
    big_bird,
    clip,
    deberta,
    electra,
    gpt,
    gpt_oss,
    later_decoders,
    llama,
    llama_relatives,
    longformer,
    modernbert,
    mpnet,
    open_decoders,
    qwen_moe,
    qwen_next,
    siglip,
    t5,
    vit,
    whisper,
)
from clearhead.hub.architecture import Architecture
from clearhead.hub.files import read_json_if_any
from clearhead.hub.tower_tables import SECTIONS, Tower, TowersTable

MODELS_LISTED = "docs/checkpoints.md"

# In the order in which `nearest_to` tries them: of several that are exact, the best known comes first.
KNOWN = (
    *(gpt.GPT2, llama.LLAMA, llama_relatives.MISTRAL, llama_relatives.MIXTRAL),
    *(llama_relatives.QWEN2, llama_relatives.QWEN3, qwen_moe.QWEN2_MOE, qwen_moe.QWEN3_MOE),
    qwen_next.QWEN3_NEXT,
    *(llama_relatives.GEMMA, llama_relatives.GEMMA2, llama_relatives.GEMMA3),
    *(gpt.GPT_NEOX, gpt.FALCON, llama_relatives.PHI, llama_relatives.PHI3, llama_relatives.OLMO2),
    *(llama_relatives.STABLELM, llama_relatives.GRANITE, llama_relatives.SMOLLM3, gpt_oss.GPT_OSS),
    *(later_decoders.COHERE, later_decoders.COHERE2, later_decoders.STARCODER2, later_decoders.NEMOTRON),
    *(later_decoders.GLM, later_decoders.GLM4, later_decoders.OLMO3, later_decoders.OLMOE),
    *(later_decoders.GRANITE_MOE, open_decoders.BIGCODE),
    *(open_decoders.OPT, open_decoders.GPT_NEO, open_decoders.GPT_J, open_decoders.BLOOM),
    *(bert.BERT, bert.ROBERTA, bert.DISTILBERT, bert.ALBERT, big_bird.BIG_BIRD, vit.VIT),
    *(bert.XLM_ROBERTA, bert.CAMEMBERT, mpnet.MPNET, electra.ELECTRA),
    *(modernbert.MODERNBERT, deberta.DEBERTA),
    longformer.LONGFORMER,
    *(t5.T5, bart.BART, bart.MBART, bart.M2M100, bart.MARIAN, t5.MT5),
    whisper.WHISPER,
)
ARCHITECTURES: dict[str, Architecture] = {architecture.model_type: architecture for architecture in KNOWN}
# Two architectures each, which are found by `architecture_of` and never by `nearest_to`.
TOWERS: dict[str, TowersTable] = {table.model_type: table for table in (clip.CLIP, siglip.SIGLIP)}
ONE_TOWER = {tower.model_type: tower for table in TOWERS.values() for tower in (table.text, table.image)}


def architecture_of(theirs: dict[str, Any]) -> Architecture:
    """Return the architecture that a config.json names."""
    kind = theirs.get("model_type")
    known = {**ARCHITECTURES, **ONE_TOWER}
    if isinstance(kind, str) and kind in TOWERS:
        raise CheckpointError(
            f"{kind} has two towers, and this needs one: add /text or /image to the name of the directory"
        )
    if not isinstance(kind, str) or kind not in known:
        names = ", ".join(sorted({**ARCHITECTURES, **TOWERS}))
        raise CheckpointError(
            f"config.json has model_type {kind!r}: see {MODELS_LISTED} for the models; known are {names}"
        )
    return known[kind]


def tower_path(path: Path) -> tuple[Path, TowersTable, Tower] | None:
    """Return directory, table and tower of a name such as clip/text, where clip has two towers; else None."""
    if path.name not in SECTIONS or path.exists():
        return None
    kind = read_json_if_any(path.parent / "config.json").get("model_type")
    table = TOWERS.get(kind) if isinstance(kind, str) else None
    return None if table is None else (path.parent, table, "text" if path.name == "text" else "image")


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
