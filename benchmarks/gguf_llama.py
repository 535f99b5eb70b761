"""Greedy tokens of one GGUF file here and in llama.cpp (the xllamacpp wheel), both ways.

    python -m benchmarks.gguf_llama SmolLM2-135M-Instruct.Q4_1.gguf --tokens 24

The file is opened here and written again in F32, which llama.cpp opens: the same numbers in float. Both
continue the same texts, each by its own tokenizer, and the tokens are compared.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import clearhead as ch

PROMPTS = (
    *("Once upon a time", "The capital of France is", "def add(a, b):", "1, 2, 3, 4,", "Dear Sir or Madam,"),
    *("Water boils at", "The three primary colours are", "Q: What is 12 + 30?\nA:", "It's a café in Paris"),
    *("To be, or not to be", "In 1969, humans first", "<html>\n<body>", "The mitochondria is the"),
    *("She opened the door and", "Рим — это", "日本の首都は", "import numpy as np\n", "E = mc^2 means"),
    *("My favourite recipe:\n\n1.", "The quick brown fox"),
)


def llama_server(path: Path, length: int = 256) -> Any:
    """Return llama.cpp's server over a file, in one thread, with keys and values in float32."""
    import xllamacpp

    given = xllamacpp.CommonParams()
    given.model.path, given.n_ctx, given.n_parallel, given.warmup = str(path), length, 1, False
    given.cache_type_k = given.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    given.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    given.cpuparams.n_threads = given.cpuparams_batch.n_threads = 1
    given.n_gpu_layers, given.verbosity = 0, 0
    return xllamacpp.Server(given)


def llama_greedy(server: Any, prompt: str | list[int], tokens: int) -> tuple[list[int], list[float]]:
    """Return llama.cpp's greedy tokens after a prompt, and log-probabilities of those that end a character.

    Its server leaves the others out of what it says of log-probabilities, and of its text.
    """
    asked = {"prompt": prompt, "max_tokens": tokens, "temperature": 0.0, "top_k": 1, "logprobs": 1}
    whole = {"return_tokens": True, "verbose": True}
    made = server.handle_completions(asked | whole | {"cache_prompt": False, "repeat_penalty": 1.0})
    found = (made["choices"][0]["logprobs"] or {}).get("content") or []
    return made["__verbose"]["tokens"], [one["logprob"] for one in found]


def main() -> None:
    """Compare, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--tokens", type=int, default=24)
    given = parser.parse_args()
    m = ch.load(given.file)
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "ours.gguf"
        m.save(written, "float32")
        server = llama_server(written)
        equal, first, size = 0, [], 0
        for prompt in PROMPTS:
            theirs, _ = llama_greedy(server, prompt, given.tokens)
            ours = m.generate(prompt, given.tokens).ids[: len(theirs)]
            size += len(theirs)
            equal += ours == theirs
            if ours != theirs:
                first.append({"prompt": prompt, "ours": ours, "theirs": theirs})
    print(json.dumps({"prompts": len(PROMPTS), "equal": equal, "tokens": size, "differing": first}))


if __name__ == "__main__":
    main()
