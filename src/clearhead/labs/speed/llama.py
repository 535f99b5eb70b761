"""llama.cpp in a process of its own: where it gives up, it ends its process, and that must not be ours.

This file imports no torch, so that its process holds llama.cpp alone.
"""

from __future__ import annotations

import importlib
import os
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from clearhead.errors import InputError, refuse


class Llama:
    """llama.cpp's server over one GGUF file, one row at a time."""

    def __init__(self, path: Path, length: int, threads: int) -> None:
        """Open a file; a row has `length` tokens at most."""
        context = get_context("spawn")
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=_answer, args=(there, str(path), length, threads), daemon=True)
        self._process.start()
        there.close()
        self._received()

    def write(self, ids: list[int], new: int) -> int:
        """Write so many tokens after a prompt, greedily; return how many it has written."""
        self._pipe.send({"prompt": ids, "max_tokens": new})
        return written(self._received(), len(ids))

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()

    def _received(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            self._process.join()
            raise InputError(f"its process ended with code {self._process.exitcode}") from None


def written(reply: Any, prompt: int) -> int:
    """Return how many tokens a reply says were written, after a prompt of so many that was read."""
    reply = reply if isinstance(reply, dict) else {}
    if (error := reply.get("error")) is not None:
        raise InputError(str(error.get("message", error) if isinstance(error, dict) else error))
    usage = reply.get("usage")
    refuse(not isinstance(usage, dict), "its reply does not say how many tokens it has written")
    read = usage.get("prompt_tokens")
    refuse(read != prompt, f"it has read {read} of the {prompt} tokens of the prompt")
    return int(usage.get("completion_tokens", 0))


def _answer(pipe: Connection, path: str, length: int, threads: int) -> None:
    """Open the file, then answer requests, until the pipe is closed."""
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)  # it writes there by itself
    there: Any = importlib.import_module("xllamacpp")
    params = there.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup = path, length, 1, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.n_gpu_layers, params.verbosity = 0, 0
    server = there.Server(params)
    pipe.send(None)
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        fixed = {"temperature": 0.0, "top_k": 1, "cache_prompt": False, "ignore_eos": True}
        pipe.send(server.handle_completions(request | fixed))
