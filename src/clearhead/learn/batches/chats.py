"""Conversations as batches: the targets are the tokens that the assistant wrote, and nothing else.

A conversation is rendered and tokenized as a whole, so that training reads the ids that generation reads.
The template writes every special token, and the tokenizer adds none. An answer is learned up to and with the
token that ends the turn. Where the template writes no such token, the eos token is added after the last one.

Shapes: N examples, B rows, T tokens of a row.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer, processors

from clearhead.errors import InputError, refuse
from clearhead.hub.tokens.chat import ChatTemplate, Message, Spans, Turn
from clearhead.learn.batches.batch import IGNORE, Batch, Batches
from clearhead.learn.batches.batching import Setting, blank, tensor
from clearhead.learn.batches.bucketed import Bucketed, cut_note
from clearhead.learn.batches.encoding import Columns, Encoder, characters, flat, groups
from clearhead.learn.batches.even import EvenRows
from clearhead.learn.batches.rows import Ints, Stretches, lay, pack, ragged
from clearhead.learn.data.chats import Conversation

Learned = tuple[list[int], list[bool]]  # ids, and whether each is to be learned


class ChatEncoder:
    """Turns conversations into ids and what is to be learned of them."""

    def __init__(self, encoder: Encoder) -> None:
        if encoder.template is None:
            raise InputError("conversations need a chat template: name one with tokens.template")
        self.template: ChatTemplate = encoder.template
        # A post-processor may trim white space from the offsets that spans are found by.
        self.tokenizer = Tokenizer.from_str(encoder.tokenizer.to_str())
        self.tokenizer.post_processor = processors.Sequence([])
        added = self.tokenizer.get_added_tokens_decoder().items()
        self.special = frozenset(number for number, token in added if token.special)
        self.eos = self.tokenizer.token_to_id(self.template.tokens.get("eos_token", ""))

    def __call__(self, messages: Sequence[Message], tools: Any = None, place: str = "") -> list[Learned]:
        """Return the rows of a conversation; more than one where the template writes earlier turns anew."""
        try:
            texts = self.template.learned(messages, tools)
        except InputError as error:
            raise InputError(f"{place}: {error}" if place else str(error)) from None
        encodings = self.tokenizer.encode_batch([text for text, _ in texts], add_special_tokens=False)
        return [self._row(*one) for one in zip(encodings, texts)]

    def _row(self, encoding: Encoding, learned: tuple[str, Spans]) -> Learned:
        (text, spans), ids = learned, list(encoding.ids)
        turns = [self._turn(text, span, encoding) for span in spans]
        wanted = {place for places in turns for place in places}
        if turns and turns[-1] and ids[turns[-1][-1]] not in self.special and self.eos is not None:
            end = turns[-1][-1] + 1  # nothing ends the last turn but the end of the text
            ids, wanted = [*ids[:end], self.eos], {*wanted, end}
        return ids, [place in wanted for place in range(len(ids))]

    def _turn(self, text: str, span: Turn, encoding: Encoding) -> list[int]:
        """Return the places of a turn's tokens, up to what ends it: what follows that is never generated."""
        places = [
            n for n, (start, end) in enumerate(encoding.offsets) if end > span.first and start < span.last
        ]
        ends = [n for n in places if encoding.ids[n] in self.special and encoding.offsets[n][0] >= span.said]
        if self.template.marks:  # the template says itself what is learned; the end of the turn goes with it
            after = places[-1] + 1 if places else len(encoding.ids)
            beside = after < len(encoding.ids) and encoding.ids[after] in self.special
            return [*places, after] if beside and encoding.ids[places[-1]] not in self.special else places
        if ends:
            return [n for n in places if n <= ends[0]]
        said = span.first + len(text[span.first : span.last].rstrip())
        return [n for n in places if encoding.offsets[n][0] < said]


def encode_chats(rows: Iterable[Conversation], encoder: Encoder) -> Iterator[Columns]:
    """Encode conversations, and whether each token is learned."""
    made = ChatEncoder(encoder)
    for group in groups(rows, characters):
        found = [one for row in group for one in made(row.messages, row.tools, row.place)]
        yield {
            "ids": flat([ids for ids, _ in found]),
            "learned": np.array([flag for _, flags in found for flag in flags], dtype=np.bool_),
        }


def targets_of(ids: NDArray[Any], learned: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Return ids as targets, IGNORE where they are not learned."""
    return np.where(learned, ids.astype(np.int64), IGNORE).astype(np.int32)


class _Turns:
    """Conversations cut to a length, and those left of which something is to be learned."""

    def __init__(self, setting: Setting) -> None:
        encoded, length = setting.encoded, setting.length
        whole = encoded.stretches("ids")
        rows, learned = whole.cut(length + 1), np.asarray(encoded["learned"])
        counts = np.append(0, np.cumsum(learned))
        ends = rows.starts + rows.lengths
        asked = counts[ends] - counts[np.minimum(rows.starts + 1, ends)]  # the first token is no target
        self.kept = np.flatnonzero(asked > 0)
        empty = len(asked) - len(self.kept)
        refuse(
            not len(self.kept),
            f"no conversation for {setting.side} has an answer within {length:,} tokens: "
            "raise data.max_length",
        )
        self.notes = cut_note(whole.lengths > length + 1, "conversations", length)
        if empty:
            self.notes += (
                f"{empty:,} of {len(asked):,} conversations have no answer within {length:,} tokens "
                "and are left out",
            )
        rows = rows.take(self.kept)
        self.lengths = rows.lengths - 1
        self.inputs = Stretches(rows.values, rows.starts, self.lengths)
        self.targets = Stretches(targets_of(rows.values, learned), rows.starts + 1, self.lengths)


class ChatBatches(Bucketed):
    """A conversation in each row; the targets are what the assistant wrote."""

    def __init__(self, setting: Setting) -> None:
        self.turns = _Turns(setting)
        self.notes = self.turns.notes
        super().__init__(setting, self.turns.lengths)

    def _build(self, numbers: Ints) -> Batch:
        ids, mask = blank(self.sizes[0][numbers], self.setting.pad)
        targets = np.full_like(ids, IGNORE)
        lay(ids, 0, self.turns.inputs.take(numbers))
        lay(targets, 0, self.turns.targets.take(numbers))
        return Batch(tensor(ids), tensor(targets), mask, numbers=tensor(self.turns.kept[numbers]))


class PackedChats(EvenRows):
    """Whole conversations packed into rows of T tokens, none of which sees another."""

    def __init__(self, setting: Setting) -> None:
        self.turns, self.pad, self.width = _Turns(setting), setting.pad, setting.length
        self.notes = self.turns.notes
        row_of, n_rows = pack(self.turns.lengths, self.width)
        self.members = np.argsort(row_of, kind="stable")  # conversations, row after row
        self.row_starts = np.append(0, np.cumsum(np.bincount(row_of, minlength=n_rows)))
        super().__init__(n_rows, setting.rows(self.width), setting.seed, setting.training)
        self.waste = 1 - float(self.turns.lengths.sum()) / (n_rows * self.width)

    def _build(self, places: Ints, random: np.random.Generator) -> Batch:
        counts = np.diff(self.row_starts)[places]
        row, number = ragged(counts)
        member = self.members[self.row_starts[places][row] + number]
        lengths = self.turns.lengths[member]
        before = np.cumsum(lengths) - lengths
        at = before - before[np.cumsum(counts) - counts][row]  # the column at which each begins
        ids = np.full((len(places), self.width), self.pad, dtype=np.int64)
        targets, documents = np.full_like(ids, IGNORE), np.repeat(counts[:, None] - 1, self.width, axis=1)
        lay(ids, at, self.turns.inputs.take(member), row)
        lay(targets, at, self.turns.targets.take(member), row)
        of_tokens = Stretches(np.repeat(number, lengths), before, lengths)
        lay(documents, at, of_tokens, row)
        real = np.arange(self.width) < np.bincount(row, weights=lengths, minlength=len(places))[:, None]
        return Batch(
            tensor(ids), tensor(targets), tensor(real), documents=tensor(documents), numbers=tensor(places)
        )


def chat_batches(setting: Setting) -> Batches:
    """Make batches of conversations: one in each row, or several that do not see each other."""
    return PackedChats(setting) if setting.plan.packing == "isolated" else ChatBatches(setting)
