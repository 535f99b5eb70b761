"""Tasks of plain text and of pairs of texts: predict tokens, masked tokens or removed spans; translate.

Shapes: N examples, B rows, T tokens of the target, S tokens of the source.
"""

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Literal, cast

import numpy as np

from clearhead.hub.tokens.text import decoded
from clearhead.hub.tokens.training import DENOISER, GENERATOR, TRANSLATOR
from clearhead.learn.batches.batch import IGNORE, Batches, Bucketed, cut_note
from clearhead.learn.batches.encoding import Columns, Encoder, Setting, characters, flat, groups
from clearhead.learn.batches.ragged import Ints, blank, frame_rows, lay
from clearhead.learn.batches.windows import MaskedWindows, NoisyWindows, PackedDocuments, TextWindows
from clearhead.learn.data.examples import Chunk, Pair
from clearhead.learn.evaluation.metrics import Judged
from clearhead.learn.recipe import GeneratePlan
from clearhead.learn.tasks.task import DECODER, ENCODER_DECODER, Task, sampled
from clearhead.run.api import Model

CHUNK = 2**14  # characters given to the tokenizer as one text: its threads share a buffer's chunks
PROMPT = 32  # characters of the validation text that a language model continues


def chunks_of(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """Yield the same documents in chunks of at most `CHUNK` characters, cut where tokenizers cut too."""
    rest = ""
    for chunk in chunks:
        rest, at = rest + chunk.text, 0
        while len(rest) - at > CHUNK:
            end = _cut(rest, at + CHUNK // 2, at + CHUNK)
            yield Chunk(rest[at:end], False)
            at = end
        rest = rest[at:]
        if chunk.ends:
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
            begin = max(low, start) - 1
            matches = [match.start() for match in re.finditer(pattern, text[begin : start + 257])]
            if matches:
                return begin + matches[-1]
    return high


class TextTask(Task):
    """A task of documents, encoded end to end."""

    row = Chunk
    guessed = False
    redraws = True
    reads: ClassVar[Literal["vocabulary", "states"]] = "vocabulary"

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
        drawn: Any = {"seed": seed, "temperature": plan.temperature, "top_p": plan.top_p}
        generation: Any = loaded.generate(ids, room, **drawn)
        return f"{decoded(loaded.text_tokenizer, ids)}|{generation.text}"


class MaskedLanguageModel(TextTask):
    """Predict masked tokens."""

    name = "mlm"
    batches = MaskedWindows
    separator = "sep"
    head = "mlm"
    pooled = False
    command = "fill {folder} TEXT"

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
    batches = NoisyWindows
    tokens = DENOISER
    separator = "eos"
    sentinels = True
    head = "lm"
    usual = ENCODER_DECODER
    command = "translate {folder} TEXT"


# Pairs ------------------------------------------------------------------------------------------------------


class PairBatches(Bucketed):
    """A source for the encoder; for the decoder bos and the target, whose targets are the target and eos.

    A target that is cut has no eos: the model must not learn to stop there.
    """

    side = 1

    def __init__(self, setting: Setting) -> None:
        length, self.frame = setting.length, setting.encoded.frame
        self.bos, self.eos = setting.need("bos"), setting.need("eos")
        room = setting.room(self.frame, "a source")
        source, target = setting.encoded.stretches("source"), setting.encoded.stretches("target")
        # A target is cut at its end whatever the tokenizer says: what is generated begins at its beginning.
        self.source = setting.cut(source, room)
        self.inputs, self.targets = target.cut(length - 1), target.cut(length)
        self.whole = target.lengths < length
        cut_sources = cut_note(source.lengths > room, "sources", length)
        self.notes = cut_sources + cut_note(~self.whole, "targets", length)
        super().__init__(setting, self.source.lengths + self.frame.size, self.inputs.lengths + 1)

    def _fill(self, ids: Ints, numbers: Ints) -> dict[str, Any]:
        source, source_mask = blank(self.sizes[0][numbers], self.setting.pad)
        frame_rows(self.frame, [self.source.take(numbers)], source)
        wanted, whole = self.targets.take(numbers), self.whole[numbers]
        targets = np.full_like(ids, IGNORE)
        ids[:, 0] = self.bos
        lay(ids, 1, self.inputs.take(numbers))
        lay(targets, 0, wanted)
        targets[whole, wanted.lengths[whole]] = self.eos
        return {"targets": targets, "source": source, "source_mask": source_mask}


class Seq2seq(Task):
    """Translate a source text into a target text."""

    name = "seq2seq"
    row = Pair
    batches = PairBatches
    tokens = TRANSLATOR
    head = "lm"
    usual = ENCODER_DECODER
    reads = "vocabulary"
    redraws = True
    metrics = ("loss", "exact", "bleu", "chrf")
    writes = True
    command = "translate {folder} TEXT"

    def encode(self, rows: Iterable[Pair], encoder: Encoder) -> Iterator[Columns]:
        """Encode sources and targets."""
        for group in groups(rows, characters):
            yield {
                "source": flat(encoder.ids(row.source for row in group)),
                "target": flat(encoder.ids(row.target for row in group)),
            }

    def judge(self, judged: Judged) -> list[str]:
        """Add exact match, edits per token, BLEU and chrF of what the model writes."""
        written = judged.write()
        judged.texts(written, judged.references, judged.tokenize, judged.lowercase)
        return written

    def sample(self, loaded: Model, row: Pair, plan: GeneratePlan, seed: int) -> str:
        """Return what the model writes for the source."""
        ids = loaded.encode([row.source], loaded.max_length)[0]
        room = max(1, min(plan.max_new_tokens, loaded.config.max_positions - 2))
        generation: Any = loaded.generate(ids, room, num_beams=1)
        return sampled(row.source, generation.text, row.target)
