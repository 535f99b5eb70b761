"""Mistral: Llama with a window in every layer. Mixtral: the same with a mixture of experts for a feed-forward."""

from __future__ import annotations

from clearhead.hub.architecture import Architecture
from clearhead.hub.fields import Field, Windows
from clearhead.hub.llama import (
    ACTIVATION,
    ATTENTION,
    BLOCK,
    EDGES,
    FEEDFORWARD,
    HEADS,
    IGNORED,
    NORMS,
    THEIRS,
    classes,
    shape,
)
from clearhead.hub.rope import Rope
from clearhead.hub.rules import Rule, SplitExperts

MISTRAL = Architecture(
    model_type="mistral",
    classes=classes("Mistral"),
    prefix="model.",
    config=(
        *shape(d_ff=14336, kv_heads=8, max_position_embeddings=131072),
        ACTIVATION,
        Rope(),
        Windows(default=4096),
    ),
    rules=(*EDGES, *NORMS, *ATTENTION, *FEEDFORWARD),
    heads=HEADS,
    ignored=IGNORED,
)

EXPERT = f"{BLOCK}.feedforward.experts"
EXPERTS = (
    Rule(f"{THEIRS}.block_sparse_moe.gate.weight", (f"{BLOCK}.feedforward.router.weight",)),
    Rule(f"{THEIRS}.block_sparse_moe.experts.{{j}}.w1.weight", (f"{EXPERT}.{{j}}.gate.weight",)),
    Rule(f"{THEIRS}.block_sparse_moe.experts.{{j}}.w3.weight", (f"{EXPERT}.{{j}}.up.weight",)),
    Rule(f"{THEIRS}.block_sparse_moe.experts.{{j}}.w2.weight", (f"{EXPERT}.{{j}}.down.weight",)),
)
FUSED_EXPERTS = (  # as transformers 5 holds them in memory, and writes them when asked to
    Rule(f"{THEIRS}.mlp.gate.weight", (f"{BLOCK}.feedforward.router.weight",)),
    Rule(
        f"{THEIRS}.mlp.experts.gate_up_proj",
        (f"{EXPERT}.{{J}}.gate.weight", f"{EXPERT}.{{J}}.up.weight"),
        SplitExperts(),
    ),
    Rule(f"{THEIRS}.mlp.experts.down_proj", (f"{EXPERT}.{{J}}.down.weight",), SplitExperts()),
)

MIXTRAL = Architecture(
    model_type="mixtral",
    classes=classes("Mixtral"),
    prefix="model.",
    config=(
        *shape(d_ff=14336, kv_heads=8, eps=1e-5, max_position_embeddings=131072),
        ACTIVATION,
        Rope(base=1_000_000.0),
        Windows(),
        Field("num_local_experts", "n_experts", 8, least=1),
        Field("num_experts_per_tok", "n_active_experts", 2),
    ),
    rules=(*EDGES, *NORMS, *ATTENTION, *EXPERTS, *FUSED_EXPERTS),
    heads=HEADS,
    ignored=IGNORED,
)
