"""Fine-tuning of models that read images, by captions or conversations.

A row names image files, and has messages, or a prompt and an answer. Image tower and connector stay as they
are: the vectors of an image are computed once, and the decoder learns, whole or by low-rank updates.

Shapes: B rows, T tokens of a row, D model.
"""

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from clearhead.errors import ConfigError, InputError, refuse
from clearhead.hub.tokens import TokensPlan
from clearhead.hub.tokens.chat import ASSISTANT, answers
from clearhead.learn.batches.batch import IGNORE, ORDER, Batch, Batches, cut_note, generator
from clearhead.learn.batches.encoding import Encoder
from clearhead.learn.data.examples import Conversation, Corpus, Messages
from clearhead.learn.data.files import digest
from clearhead.learn.data.formats import rows_of
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.data.tables import Record
from clearhead.learn.recipe import BASE, GeneratePlan, Recipe, TrainPlan
from clearhead.learn.tasks.entries.chats import Chat, ChatEncoder, written
from clearhead.learn.tasks.generation import chat_template
from clearhead.learn.tasks.images import IMAGE, ImagePrompt, encoder_of, spread, vectors_of
from clearhead.learn.tasks.task import Side, sampled
from clearhead.run.api import Model
from clearhead.run.bundle import Bundle
from clearhead.variants.images import prompt_axes

FILES = ("images", "image")  # names of columns, the first that is there
PROMPTS = ("prompt", "question", "instruction")
ANSWERS = ("answer", "completion", "response", "output", "caption", "text")
HELD_OUT = 10  # of so many images one is for validation, where no file is
UNREAD = (  # what rows of other tasks are read by
    *("format", "columns", "header", "encoding", "pattern", "texts_only", "lowercase", "validation_share"),
    *("bad_rows", "packing", "mask_share", "span_length", "image_size", "augment", "stride"),
    *("cache", "token_dropout", "bpe_dropout"),
)
KEPT = 2**30  # bytes of vectors of images that are kept from one epoch to the next, at most


@dataclass(frozen=True, slots=True)
class Pictured(Conversation):
    """A conversation about images: each stands where a message has a part of type image."""

    PLURAL = "conversations about images"
    images: tuple[Path, ...] = ()

    def asked(self) -> tuple[str, ...]:
        """Return the names of the images, and the text before the first answer."""
        texts = [_text(message) for message in self.messages[: answers(self.messages)[0]]]
        return (*(image.name for image in self.images), *filter(None, texts))

    def shown(self) -> Messages:
        """Return the messages with the images in them."""
        files = iter(self.images)
        return tuple(
            {
                **message,
                "content": [
                    {**part, IMAGE: next(files)} if part.get("type") == IMAGE else part
                    for part in message["content"]
                ],
            }
            if isinstance(message["content"], list)
            else message
            for message in self.messages
        )


def _text(message: Any) -> str:
    content = message["content"]
    return content if isinstance(content, str) else " ".join(part.get("text", "") for part in content)


def read_pictured(path: str | Path) -> list[Pictured]:
    """Read rows of image and conversation, question and answer, or caption: JSON lines, TSV or CSV.

    `image`, or a list `images`, are paths from the folder of the file on.
    """
    return rows_of(
        path,
        _pictured,
        absent="give JSON lines of image, prompt and answer",
        other="give rows of image, prompt and answer as JSON lines, TSV or CSV",
        empty="no row",
    )


def _pictured(record: Record, folder: Path) -> Pictured:
    column = next((name for name in FILES if name in record.cells), FILES[1])
    value = record.value(column)
    names = [value] if isinstance(value, str) else value
    listed = isinstance(names, list) and names and all(isinstance(name, str) for name in names)
    refuse(not listed, f"{record.place}: `{column}` must be the path of an image, or a list of paths")
    images = tuple(folder / name for name in names)
    missing = next((image for image in images if not image.is_file()), None)
    refuse(missing, f"{record.place}: the image {missing} is not there")
    if "messages" in record.cells:
        chat = Conversation.read(record, {"messages": "messages"})
        refuse(chat is None, f"{record.place}: `messages` have no answer of the {ASSISTANT} to learn")
        messages: Messages = chat.messages if chat is not None else ()
    else:
        prompt, answer = (
            next((name for name in names if name in record.cells), None) for names in (PROMPTS, ANSWERS)
        )
        refuse(answer is None, f"{record.place} has no answer: name one of {', '.join(ANSWERS)}, or messages")
        reply = record.text(str(answer)).strip()
        refuse(not reply, f"{record.place}: the {answer} is empty")
        question = record.text(prompt).strip() if prompt else ""
        messages = ({"role": "user", "content": question}, {"role": ASSISTANT, "content": reply})
    return Pictured(_placed(messages, len(images), record.place), place=record.place, images=images)


def _placed(messages: Messages, count: int, place: str) -> Messages:
    """Return messages with a part for each image: those that they have, else before the first question."""
    parts = [part for message in messages for part in message["content"] if isinstance(part, dict)]
    images = [part for part in parts if part.get("type") != "text"]
    other = next((part for part in images if part != {"type": IMAGE}), None)
    refuse(other, f'{place} has a part {other!r:.60}: supported are text and {{"type": "image"}}, whose file '
           "`images` names")  # fmt: skip
    if images:
        refuse(
            len(images) != count,
            f"{place} has {len(images)} parts of type image, and names {count} images: give as many",
        )
        return messages
    first = next((n for n, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        raise InputError(f"{place} has no message of the user: the images stand in the first one")
    content = messages[first]["content"]
    texts = [{"type": "text", "text": content}] if isinstance(content, str) and content else content or []
    shown = {**messages[first], "content": [{"type": IMAGE}] * count + list(texts)}
    return (*messages[:first], shown, *messages[first + 1 :])


@dataclass(frozen=True)
class _Row:
    """A conversation as the model reads it: ids, whether each is learned, and its images."""

    ids: list[int]
    learned: list[bool]
    images: tuple[Path, ...]


class PicturedBatches(Batches):
    """A conversation in each row, with the vectors of its images; the targets are what the assistant says."""

    def __init__(
        self, loaded: Model, rows: Sequence[Pictured], plan: DataPlan, seed: int, training: bool
    ) -> None:
        self.loaded, self.seed, self.training = loaded, seed, training
        self.length = min(loaded.max_length, plan.max_length or loaded.max_length)
        self.config = encoder_of(loaded).config
        whole = self._encoded(rows)
        kept = [self._cut(row) for row in whole]
        self.rows = [row for row in kept if row is not None]
        refuse(
            not self.rows,
            f"no conversation has its images and an answer within {self.length:,} tokens: "
            "raise data.max_length",
        )
        self.notes = cut_note(
            np.array([len(row.ids) > self.length + 1 for row in whole]),
            "conversations",
            self.length,
            "" if len(kept) == len(self.rows) else f"; {len(kept) - len(self.rows):,} are left out",
        )
        size, longest = plan.batch_size, max(len(row.ids) - 1 for row in self.rows)
        if plan.batch_tokens is not None:
            size = max(1, plan.batch_tokens // longest)
        self.size = min(size, len(self.rows))
        self.per_epoch = -(-len(self.rows) // self.size)
        bytes_each = 4 * self.length * loaded.config.d_model
        self.vectors = functools.lru_cache(maxsize=max(1, KEPT // bytes_each))(self._vectors)

    def _encoded(self, rows: Sequence[Pictured]) -> list[_Row]:
        m = self.loaded
        encode = ChatEncoder(Encoder(m.text_tokenizer, {}, None, chat_template(m)))
        whole = []
        for row in rows:
            for ids, learned in encode(row.messages, row.tools, row.place):
                images = row.images[: ids.count(self.config.token_id)]  # a text may end before later ones
                ids_of = spread(m, ids, images)
                flags = [flag for flag, own in zip(learned, ids_of) for _ in own]
                whole.append(_Row([each for own in ids_of for each in own], flags, images))
        return whole

    def _cut(self, row: _Row) -> _Row | None:
        """Return a row of the length at most; None where that leaves no answer, or not all of its images."""
        end = self.length + 1
        lost = self.config.token_id in row.ids[end:] or not any(row.learned[1:end])
        return None if lost else _Row(row.ids[:end], row.learned[:end], row.images)

    def _vectors(self, number: int) -> tuple[Tensor, Tensor | None]:
        """Return the vectors of the images of a row, NaN where the token table's stand: [T, D]; and axes."""
        row = self.rows[number]
        own = vectors_of(self.loaded, row.ids, ImagePrompt(row.ids, row.images))
        laid = torch.full((len(row.ids), self.loaded.config.d_model), torch.nan)
        if own is not None:
            laid[own.positions] = own.vectors.to(laid)
        if not self.loaded.config.rope_sections:
            return laid[:-1], None
        axes = prompt_axes(row.ids, self.config.token_id, ()) if own is None else own.axes
        return laid[:-1], None if axes is None else axes[:-1]

    def at(self, index: int) -> Batch:
        """See `Batches.at`."""
        epoch, number = divmod(index, self.per_epoch)
        order = np.arange(len(self.rows))
        if self.training:
            order = generator(self.seed, ORDER, epoch).permutation(len(self.rows))
        numbers = order[number * self.size : (number + 1) * self.size].tolist()
        rows = [self.rows[each] for each in numbers]
        ids = [torch.tensor(row.ids) for row in rows]
        targets = [each.where(torch.tensor(row.learned), IGNORE)[1:] for each, row in zip(ids, rows)]
        real = [torch.ones(len(each), dtype=torch.bool) for each in targets]
        mask = pad_sequence(real, batch_first=True)
        vectors, positions = zip(*map(self.vectors, numbers))
        axes = [each for each in positions if each is not None]
        return Batch(
            pad_sequence([each[:-1] for each in ids], True, self.loaded.special.get("pad", 0)),
            pad_sequence(targets, True, IGNORE),
            None if mask.all() else mask,
            vectors=pad_sequence(list(vectors), True, torch.nan),
            axes=pad_sequence(axes, True) if axes else None,
            numbers=torch.tensor(numbers),
        )


class Describe(Chat):
    """Learn what the assistant says of images."""

    name = "describe"
    row = Pictured
    guessed = False
    command = 'chat {folder} "What is this?" --image FILE'

    def read(self, plan: DataPlan, split: bool = True) -> Corpus:
        """Read conversations about images; files of the plan, or every tenth image, are to validate on."""
        refuse(not plan.paths, "no data is named: name a file of rows of image, prompt and answer")
        usual = DataPlan()
        for name in UNREAD:
            value = getattr(plan, name)
            line = f"data.{name} {value!r} is not for describe: leave it out"
            refuse(value != getattr(usual, name), line, ConfigError)
        rows = [row for path in plan.paths for row in read_pictured(path)][: plan.max_examples]
        train, validation = rows, [row for path in plan.validation for row in read_pictured(path)]
        if not split:
            train, validation = [], rows
        elif not validation:
            numbers = {images: n for n, images in enumerate(dict.fromkeys(row.images for row in rows))}
            held_out = [numbers[row.images] % HELD_OUT == HELD_OUT - 1 for row in rows]
            train = [row for row, out in zip(rows, held_out) if not out]
            validation = [row for row, out in zip(rows, held_out) if out]
            refuse(
                not validation,
                f"{plan.paths[0]} has {len(numbers)} images, of which every {HELD_OUT}th is held out: "
                "give more, or name data.validation",
            )
        files = [Path(path) for path in (*plan.paths, *plan.validation)]
        images = dict.fromkeys(image for row in (*rows, *validation) for image in row.images)
        fingerprint = f"1:{digest([*files, *images], self.name, str(plan.max_examples))}"
        size = sum(len(json.dumps(row.messages)) for row in train)
        return Corpus(self.row.PLURAL, train, validation, (), fingerprint, (), size)

    def planned(self, recipe: Recipe) -> Self:
        """Refuse settings of a new tokenizer: the model has its own."""
        own = TokensPlan(template=recipe.tokens.template)
        refuse(
            recipe.tokens != own, "[tokens] is not for describe, but for template: leave it out", ConfigError
        )
        return super().planned(recipe)

    def model_for(self, recipe: Recipe, corpus: Corpus, base: Model | None) -> Model:
        """Return the base, which must read images."""
        if base is None or base.image_encoder is None:
            raise InputError("describe tunes a model that reads images: set model.base to a directory of one")
        more = next((name for name in recipe.model if name != BASE), None)
        refuse(more, f"model.{more} is not for describe, whose model is that of model.base: leave it out")
        return base

    def direct_batches(
        self, loaded: Any, corpus: Corpus, side: Side, plan: DataPlan, seed: int, training: bool = True
    ) -> Batches:
        """See `Task.direct_batches`."""
        rows: Any = getattr(corpus, side)
        return PicturedBatches(loaded, rows, plan, seed, side == "train")

    def settled(self, plan: TrainPlan, loaded: Bundle, corpus: Corpus) -> Self:
        """Refuse what the vectors of images are not made for."""
        refuse(plan.mtp_weight, "train.mtp_weight is not for describe: leave it out", ConfigError)
        return super().settled(plan, loaded, corpus)

    def begin(self, run: Any, recipe: Recipe) -> None:
        """Bring the image encoder to the device of the run."""
        refuse(run.world.size > 1, "describe trains in one process: start it without torchrun", ConfigError)
        run.loaded.image_encoder.to(run.precision.device)

    @property
    def capturable(self) -> bool:
        """See `Task.capturable`: the vectors of a batch are of its own length."""
        return False

    def sample(self, loaded: Model, row: Conversation, plan: GeneratePlan, seed: int) -> str:
        """Return the answer to the first question about an image."""
        assert isinstance(row, Pictured)
        messages = row.shown()
        first = answers(messages)[0]
        reply = self.answer(loaded, messages[:first], None, plan, seed)
        return sampled(" ".join(row.asked()), reply, written(row.messages[first]))
