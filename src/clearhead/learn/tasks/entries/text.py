"""Tasks of plain text: predict the next token, masked tokens, or spans that were taken out."""

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any, cast

import numpy as np

from clearhead.hub.tokens.text import decoded
from clearhead.hub.tokens.training import DENOISER, GENERATOR
from clearhead.learn.batches.batch import Batches
from clearhead.learn.batches.encoding import Columns, Encoder, Setting, flat, groups
from clearhead.learn.batches.windows import MaskedWindows, NoisyWindows, PackedDocuments, TextWindows
from clearhead.learn.data.examples import TEXT, Chunk
from clearhead.learn.evaluation.metrics import Judged
from clearhead.learn.recipe import GeneratePlan
from clearhead.learn.tasks.task import DECODER, ENCODER_DECODER, Task
from clearhead.run.api import Model

CHUNK = 2**14  # characters given to the tokenizer as one text: its threads share a buffer's chunks
PROMPT = 32  # characters of the validation text that a language model continues


def chunks_of(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """Yield the same documents in chunks of at most `CHUNK` characters, cut where tokenizers cut too."""
    rest = ""
    for text, ends in chunks:
        rest, at = rest + text, 0
        while len(rest) - at > CHUNK:
            end = _cut(rest, at + CHUNK // 2, at + CHUNK)
            yield Chunk(rest[at:end], False)
            at = end
        rest = rest[at:]
        if ends:
            yield Chunk(rest, True)
            rest = ""
    if rest:
        yield Chunk(rest, True)


def _cut(text: str, low: int, high: int) -> int:
    """Return the last good position to cut between `low` and `high`.

    That is before a single space between words, as words of many tokenizers begin with it; else before white
    space.
    """
    for pattern in (r"(?<=\w) (?=\w)", r"(?<=\S)\s"):
        for start in range(high - 256, low - 256, -256):
            found = [match.start() for match in re.finditer(pattern, text[max(low, start) - 1 : start + 257])]
            if found:
                return max(low, start) - 1 + found[-1]
    return high


class TextTask(Task):
    """A task of documents, encoded end to end."""

    shape = TEXT
    guessed = False
    reads = "vocabulary"

    def encode(self, rows: Iterable[Chunk], encoder: Encoder) -> Iterator[Columns]:
        """Encode documents end to end, each followed by the separator; a single one by nothing.

        Documents without tokens are left out.
        """
        between = [] if encoder.separator is None else [encoder.separator]
        several, length = False, 0  # `length`: tokens of the current document
        ended: int | None = None  # tokens of the document before, until it is known whether another follows
        for group in groups(chunks_of(rows), lambda chunk: len(chunk.text)):
            ids, lengths = list[list[int]](), list[int]()
            for chunk, row in zip(group, encoder.ids(chunk.text for chunk in group)):
                if row and ended is not None:
                    ids.append(between)
                    lengths.append(ended + len(between))
                    several, ended = True, None
                ids.append(row)
                length += len(row)
                if chunk.ends and length:
                    ended, length = length, 0
            yield {"ids": (flat(ids)[0], np.array(lengths, dtype=np.int64))}
        ended = length or ended
        last = between if several else []
        if ended is not None:
            yield {"ids": (np.array(last, dtype=np.int64), np.array([ended + len(last)]))}


class LanguageModel(TextTask):
    """Predict the next token."""

    name = "lm"
    tokens = GENERATOR
    guessed = True
    separator = "eos"
    one_shape = True
    head = "lm"
    usual = DECODER
    command = "generate {folder} TEXT --temperature 0.8"

    def batch(self, setting: Setting) -> Batches:
        """Return windows over all documents, or documents packed apart."""
        return PackedDocuments(setting) if setting.plan.packing == "isolated" else TextWindows(setting)

    def judge(self, judged: Judged) -> list[str]:
        """Add bits per byte and per character; they say nothing where some of the text was not predicted."""
        tokens, unknown = judged.tokens, judged.unknown
        if unknown:
            judged.notes.append(
                f"no bits per byte: {unknown:,} of {tokens:,} tokens are unknown, so the text itself was not "
                "predicted"
            )
            return []
        chunks = cast(Iterable[Chunk], judged.rows)
        sizes = [(len(chunk.text.encode("utf-8", "replace")), len(chunk.text)) for chunk in chunks]
        n_bytes, characters = np.sum(sizes, 0).tolist()
        judged.derive("bits_per_byte", "loss", lambda loss: loss / math.log(2) * tokens / n_bytes)
        judged.derive("bits_per_character", "loss", lambda loss: loss / math.log(2) * tokens / characters)
        return []

    def sample(self, loaded: Model, row: Chunk, plan: GeneratePlan, seed: int) -> str:
        """Continue the beginning of the validation text."""
        prompt = row.text.strip()[:PROMPT].rsplit(" ", 1)[0]
        ids = loaded.encode([prompt], max(1, loaded.max_length // 2))[0]
        room = min(plan.max_new_tokens, max(1, loaded.max_length - len(ids)))
        made: Any = loaded.generate(ids, room, seed=seed, temperature=plan.temperature, top_p=plan.top_p)
        return f"{decoded(loaded.text_tokenizer, ids)}|{made.text}"


class MaskedLanguageModel(TextTask):
    """Predict masked tokens."""

    name = "mlm"
    separator = "sep"
    head = "mlm"
    pooled = False
    command = "fill {folder} TEXT"

    def batch(self, setting: Setting) -> Batches:
        """See `Task.batch`."""
        return MaskedWindows(setting)

    def sample(self, loaded: Model, row: Chunk, plan: GeneratePlan, seed: int) -> str:
        """Return the text with one word masked and predicted, and the word itself."""
        words = row.text.split()[:12]
        if len(words) < 2:
            return ""
        middle = len(words) // 2
        mask = str(loaded.text_tokenizer.id_to_token(loaded.special["mask"]))
        best: Any = loaded.fill(" ".join([*words[:middle], mask, *words[middle + 1 :]]), k=1)
        return f"{best[0].text}  ({words[middle]})"


class Denoise(TextTask):
    """Write the spans that were taken out of a text."""

    name = "denoise"
    tokens = DENOISER
    separator = "eos"
    sentinels = True
    head = "lm"
    usual = ENCODER_DECODER
    command = "translate {folder} TEXT"

    def batch(self, setting: Setting) -> Batches:
        """See `Task.batch`."""
        return NoisyWindows(setting)
