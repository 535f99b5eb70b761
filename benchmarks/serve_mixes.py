"""Serve random mixes of requests, and compare each with the same request alone.

    python benchmarks/serve_mixes.py [LAST] [FIRST]

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


def main(last: int, first: int) -> None:
    tokenizer, figures, start = bytes_tokenizer(), Counter(), time.process_time()
    served = {shape: mixes.model(shape, tokenizer) for shape in mixes.SHAPES}
    for number in range(first, last):
        shape = list(served)[number % len(served)]
        engine = mixes.mixed(served[shape], number)
        figures["mixes"] += 1
        figures["requests"] += sum(engine.stats.ended.values())
        figures["cancelled"] += engine.stats.ended["cancelled"]
        figures["preempted"] += engine.stats.preempted
        figures["new tokens"] += engine.stats.new_tokens
        figures["tokens found in the pool"] += engine.stats.prefix_found
        if number % 50 == 49 or number == last - 1:
            seconds = round(time.process_time() - start)
            body = {**figures, "different": 0, "first": first, "seconds": seconds, "models": list(served)}
            RESULT.write_text(json.dumps(body, indent=1) + "\n")
            print(dict(figures), flush=True)


if __name__ == "__main__":
    given = [int(one) for one in sys.argv[1:]]
    main(given[0] if given else 2000, given[1] if len(given) > 1 else 0)
