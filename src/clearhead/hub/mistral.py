"""Mistral: Llama with a window in every layer.

Mixtral: the same with a mixture of experts for a feed-forward.
"""

from clearhead.hub.fields import field, sliding_windows
from clearhead.hub.llama import ACTIVATION, ATTENTION, BLOCK, EDGES, NORMS, THEIRS, llama_like, shape
from clearhead.hub.rope import rope
from clearhead.hub.rules import EXPERTS, Rule

MISTRAL = llama_like(
    "mistral",
    "Mistral",
    *shape(d_ff=14336, kv_heads=8, max_position_embeddings=131072),
    ACTIVATION,
    rope(),
    sliding_windows(default=4096),
)

MOE, EXPERT = f"{THEIRS}.block_sparse_moe", f"{BLOCK}.feedforward.experts"
ROUTER = (f"{BLOCK}.feedforward.router.weight",)
SEPARATE_EXPERTS = (
    Rule(f"{MOE}.gate.weight", ROUTER),
    Rule(f"{MOE}.experts.{{j}}.w1.weight", (f"{EXPERT}.{{j}}.gate.weight",)),
    Rule(f"{MOE}.experts.{{j}}.w3.weight", (f"{EXPERT}.{{j}}.up.weight",)),
    Rule(f"{MOE}.experts.{{j}}.w2.weight", (f"{EXPERT}.{{j}}.down.weight",)),
)
FUSED = (f"{EXPERT}.{{J}}.gate.weight", f"{EXPERT}.{{J}}.up.weight")
FUSED_EXPERTS = (  # as transformers 5 holds them in memory, and writes them when asked to
    Rule(f"{THEIRS}.mlp.gate.weight", ROUTER),
    Rule(f"{THEIRS}.mlp.experts.gate_up_proj", FUSED, EXPERTS),
    Rule(f"{THEIRS}.mlp.experts.down_proj", (f"{EXPERT}.{{J}}.down.weight",), EXPERTS),
)

MIXTRAL = llama_like(
    "mixtral",
    "Mixtral",
    *shape(d_ff=14336, kv_heads=8, eps=1e-5, max_position_embeddings=131072),
    ACTIVATION,
    rope(base=1_000_000.0),
    sliding_windows(),
    field("num_local_experts", "n_experts", 8, least=1),
    field("num_experts_per_tok", "n_active_experts", 2),
    rules=(*EDGES, *NORMS, *ATTENTION, *SEPARATE_EXPERTS, *FUSED_EXPERTS),
)
