"""Run a benchmark: `python benchmarks/run.py CASE [OPTIONS]`; without a case, list them.

`python benchmarks/run.py CASE --help` says what most of them take. What a case records goes to results/.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

# case: module and function
CASES = {
    # On a CPU
    "decode": "decode:run_decode",
    "beam": "decode:run_beam",
    "speculate": "decode:run_speculate",
    "mtp": "decode:run_mtp",
    "long": "decode:run_long",
    "quantize": "quantize:run_quantize",
    "products": "quantize:run_products",
    "gguf_llama": "quantize:run_gguf_llama",
    "ranks": "quantize:run_ranks",
    "train_step": "train:run_train_step",
    "train_loop": "train:run_train_loop",
    "ladder": "train:run_ladder",
    "same_bits": "train:run_same_bits",
    "startup": "process:run_startup",
    "load": "process:run_load",
    "tokenizer_memory": "process:run_tokenizer_memory",
    # On a GPU
    "gpu_decode": "gpu_decode:run_gpu_decode",
    "gpu_default": "gpu_steps:run_gpu_default",
    "gpu_steps": "gpu_steps:run_gpu_steps",
    "gpu_products": "gpu_steps:run_gpu_products",
    "gpu_embed": "gpu_steps:run_gpu_embed",
    "gpu_train": "gpu_train:run_gpu_train",
    "gpu_float8": "gpu_train:run_gpu_float8",
    "gpu_ladder": "train:run_gpu_ladder",
    "gpu_parallel": "planner:run_gpu_parallel",
    "gpu_gradients": "gpu_equality:run_gpu_gradients",
    "flex": "gpu_equality:run_flex",
    "gpu_core": "gpu_equality:run_gpu_core",
    # Serving and retrieval
    "serve_mixes": "serve:run_serve_mixes",
    "serve": "serve:run_serve",
    "serve_load": "serve:run_serve_load",
    "serve_kills": "serve_checks:run_serve_kills",
    "serve_idle": "serve_checks:run_serve_idle",
    "serve_clients": "serve_checks:run_serve_clients",
    "serve_schemas": "serve_checks:run_serve_schemas",
    "serve_peers": "serve_peers:run_serve_peers",
    "serve_embeddings": "serve_peers:run_serve_embeddings",
    "retrieval": "retrieval:run_retrieval",
    "retrieval_answers": "retrieval:run_retrieval_answers",
    "retrieval_peers": "encoders:run_retrieval_peers",
    # Models and training
    "recipes": "recipes:run_recipes",
    "gpu_small": "recipes:run_gpu_small",
    "arms": "arms:main",
    "defaults": "defaults:main",
    "sft": "finetune:run_sft",
    "tools": "tools:run_tools",
    "tool_schemas": "tools:run_tool_schemas",
    "dpo": "finetune:run_dpo",
    "dpo_trl": "finetune:run_dpo_trl",
    "diffusion": "kinds_learn:run_diffusion",
    "grpo": "grpo:run_grpo",
    "grpo_words": "grpo:run_words",
    "embed": "finetune:run_embed",
    "kinds": "kinds:run_kinds",
    "fla_kernels": "kinds:run_fla_kernels",
    "kinds_learn": "kinds_learn:run_kinds_learn",
    "decode_slopes": "kinds:run_decode_slopes",
    "latent_book": "kinds:run_latent_book",
    "depth": "depth:run_depth",
    "scaling": "depth:run_scaling",
    "tuning_curves": "depth:run_tuning_curves",
    "streaming": "streaming:run_streaming",
    "long_context": "streaming:run_long_context",
    "intervals": "intervals:main",
    "speech": "encoders:run_speech",
    "sparse_encoders": "encoders:run_sparse_encoders",
    "planner": "planner:run_planner",
    # Looking inside
    "graph": "circuits:run_graph",
    "inside": "inside:run_inside",
    "probes": "inside:run_probes",
    "syntax": "inside:run_syntax",
    "memories": "inside:run_memories",
    "prune_curve": "inside:run_prune_curve",
    "features": "features:run_features",
    "circuits": "circuits:run_circuits",
    "edges": "circuits:run_methods",
    "explorer": "explorer:main",
    "story": "story:main",
    # This checkout and another
    "versions": "process:run_versions",
}


def main() -> None:
    """Run the case that the command line names."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in CASES:
        listed = {
            module: [case for case in CASES if CASES[case].startswith(f"{module}:")] for module in _modules()
        }
        print("\n".join(f"{module + '.py':<20} {', '.join(cases)}" for module, cases in listed.items()))
        sys.exit(0 if name in ("", "-h", "--help") else f'no benchmark is called "{name}"')
    module, function = CASES[name].split(":")
    sys.argv[:2] = [f"{sys.argv[0]} {name}"]
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # in place of this folder
    getattr(importlib.import_module(f"benchmarks.{module}"), function)()


def _modules() -> list[str]:
    return list(dict.fromkeys(target.partition(":")[0] for target in CASES.values()))


if __name__ == "__main__":
    main()
