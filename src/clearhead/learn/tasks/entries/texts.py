"""Tasks whose targets are text: the next token, masked tokens, spans that were taken out, a translation."""

import math
from collections.abc import Iterable
from typing import Any, cast

import numpy as np

from clearhead.hub.tokens.text import decoded
from clearhead.hub.tokens.training import DENOISER, GENERATOR, READER, TRANSLATOR
from clearhead.learn.batches import bucketed, encoding, even
from clearhead.learn.batches.batching import Batching
from clearhead.learn.data.examples import PAIRS, TEXT, Chunk, Pair
from clearhead.learn.evaluation.judgement import Judgement
from clearhead.learn.recipe import GeneratePlan
from clearhead.learn.tasks.spec import DECODER, ENCODER, ENCODER_DECODER, TaskSpec, sampled
from clearhead.run.api import Model

PROMPT = 32  # characters of the validation text that a language model continues


def _continued(loaded: Model, row: Chunk, plan: GeneratePlan, seed: int) -> str:
    prompt = row.text.strip()[:PROMPT].rsplit(" ", 1)[0]
    ids = loaded.encode([prompt], max(1, loaded.max_length // 2))[0]
    room = min(plan.max_new_tokens, max(1, loaded.max_length - len(ids)))
    made: Any = loaded.generate(ids, room, seed=seed, temperature=plan.temperature, top_p=plan.top_p)
    return f"{decoded(loaded.text_tokenizer, ids)}|{made.text}"


def _filled(loaded: Model, row: Chunk, plan: GeneratePlan, seed: int) -> str:
    """Return the text with one word masked and predicted, and the word itself."""
    words = row.text.split()[:12]
    if len(words) < 2:
        return ""
    place = len(words) // 2
    mask = str(loaded.text_tokenizer.id_to_token(loaded.special["mask"]))
    best: Any = loaded.fill(" ".join([*words[:place], mask, *words[place + 1 :]]), k=1)
    return f"{best[0].text}  ({words[place]})"


def _bits(judgement: Judgement) -> list[str]:
    """Add bits per byte and per character; they say nothing where some of the text was not predicted."""
    tokens, unknown = judgement.tokens, judgement.unknown
    if unknown:
        judgement.figures.notes.append(
            f"no bits per byte: {unknown:,} of {tokens:,} tokens are unknown, so the text itself was not "
            "predicted"
        )
        return []
    chunks = cast(Iterable[Chunk], judgement.rows)
    sizes = [(len(chunk.text.encode("utf-8", "replace")), len(chunk.text)) for chunk in chunks]
    n_bytes, characters = np.sum(sizes, 0).tolist()
    figures = judgement.figures
    figures.derive("bits_per_byte", "loss", lambda loss: loss / math.log(2) * tokens / n_bytes)
    figures.derive("bits_per_character", "loss", lambda loss: loss / math.log(2) * tokens / characters)
    return []


def _translated(loaded: Model, row: Pair, plan: GeneratePlan, seed: int) -> str:
    ids = loaded.encode([row.source], loaded.max_length)[0]
    room = max(1, min(plan.max_new_tokens, loaded.config.max_positions - 2))
    made: Any = loaded.generate(ids, room, num_beams=1)
    return sampled(row.source, made.text, row.target)


def _texts(judgement: Judgement) -> list[str]:
    """Add exact match, edits per token, BLEU and chrF."""
    written, references = judgement.write(), judgement.references
    judgement.figures.texts(written, references, judgement.tokenize, judgement.lowercase)
    return written


TASKS = (
    TaskSpec(
        name="lm",
        batching=Batching("lm", TEXT, encoding.encode_text, even.next_token_batches, separator="eos"),
        tokens=GENERATOR,
        head="lm",
        usual=DECODER,
        one_shape=True,
        command="generate {folder} TEXT --temperature 0.8",
        sample=_continued,
        figures=_bits,
    ),
    TaskSpec(
        name="mlm",
        batching=Batching("mlm", TEXT, encoding.encode_text, even.MaskedWindows, separator="sep"),
        tokens=READER,
        guessed=False,
        head="mlm",
        usual=ENCODER,
        pooled=False,
        command="fill {folder} TEXT",
        sample=_filled,
        figures=lambda judgement: [],  # the loss says it all
    ),
    TaskSpec(
        name="denoise",
        batching=Batching(
            "denoise", TEXT, encoding.encode_text, even.NoisyWindows, separator="eos", sentinels=True
        ),
        tokens=DENOISER,
        guessed=False,
        head="lm",
        usual=ENCODER_DECODER,
        command="translate {folder} TEXT",
        sample=lambda *given: "",
        figures=lambda judgement: [],  # the loss says it all
    ),
    TaskSpec(
        name="seq2seq",
        batching=Batching("seq2seq", PAIRS, encoding.encode_pairs, bucketed.PairBatches),
        tokens=TRANSLATOR,
        head="lm",
        usual=ENCODER_DECODER,
        metrics=("loss", "exact", "bleu", "chrf"),
        writes=True,
        command="translate {folder} TEXT",
        sample=_translated,
        figures=_texts,
    ),
)
