"""Serve random mixes of requests, and compare each with the same request alone.

    python benchmarks/serve_mixes.py [MIXES]

Families, lengths, seeds, stop strings, cancellations, shared beginnings, pools so small that requests are
preempted. Ends with an error at the first request that differs, or at a block that is not given back.
"""

from __future__ import annotations

import json
import pathlib
import sys
import time
from collections import Counter

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from tests.serve import mixes

RESULT = pathlib.Path(__file__).parent / "results" / "serve_mixes.json"


def bytes_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([], trainers.BpeTrainer(vocab_size=256, initial_alphabet=alphabet))
    return tokenizer


def main(count: int) -> None:
    tokenizer, figures, start = bytes_tokenizer(), Counter(), time.process_time()
    served = {shape: mixes.model(shape, tokenizer) for shape in mixes.SHAPES}
    for number in range(count):
        shape = list(served)[number % len(served)]
        engine = mixes.mixed(served[shape], number)
        figures["mixes"] += 1
        figures["requests"] += sum(engine.figures.ended.values())
        figures["cancelled"] += engine.figures.ended["cancelled"]
        figures["preempted"] += engine.figures.preempted
        figures["new tokens"] += engine.figures.new_tokens
        figures["tokens found in the pool"] += engine.figures.prefix_found
        if number % 50 == 49:
            print(dict(figures), flush=True)
    body = {
        **figures,
        "families": list(served),
        "different": 0,
        "cpu seconds": round(time.process_time() - start),
    }
    RESULT.write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
