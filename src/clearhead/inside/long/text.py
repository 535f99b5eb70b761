"""The long text that a model is measured on, as token ids: a file, the held-out text of a run, or ids."""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from clearhead.errors import refuse
from clearhead.learn.batches.ragged import Ints
from clearhead.learn.evaluation.evaluate import data_plan, run_recipe, task_for
from clearhead.learn.recipe import read_recipe
from clearhead.learn.tasks.table import open_examples, task_named
from clearhead.run.api import Model

NO_TEXT = (
    "no text is named, and the folder knows none: add --text FILE (in Python, text=FILE), "
    "a long text that the model has not seen"
)


@dataclass(frozen=True, eq=False)
class LongText:
    """The ids of a text, and those that the tokenizer puts in front of every text."""

    name: str
    ids: Ints  # N
    prefix: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()  # what was guessed, a short sentence each

    @property
    def room(self) -> int:
        """The longest row that the text gives, prefix included."""
        return len(self.prefix) + len(self.ids)

    def starts(self, length: int, rows: int) -> list[int]:
        """Return where up to `rows` rows of `length` tokens begin, none over another, all over the text."""
        refuse(
            length > self.room,
            f"{self.name} has {self.room:,} tokens and rows need {length:,}: give a longer text, "
            "or choose a smaller length",
        )
        own = length - len(self.prefix)
        count = min(rows, len(self.ids) // own)
        return [int(place) for place in np.linspace(0, len(self.ids) - own, count)]

    def rows(self, length: int, rows: int) -> Iterator[list[int]]:
        """Give those rows, each with the prefix."""
        for start in self.starts(length, rows):
            stop = start + length - len(self.prefix)
            yield [*self.prefix, *self.ids[start:stop].tolist()]


def read_text(m: Model, text: Any) -> LongText:
    """Return a text as ids.

    `text` names files, folders, globs or an embedded corpus, or is a sequence of token ids. Where it is
    empty, the run that made the model says what text it held out.
    """
    named = [text] if isinstance(text, str | Path) else list(text)
    if named and not isinstance(named[0], str | Path):
        ids = m.prompt_ids(text)
        outside = next((token for token in ids if not 0 <= token < m.config.vocab_size), None)
        refuse(
            outside is not None,
            f"{outside} is no token id of this model: ids go from 0 to {m.config.vocab_size - 1}",
        )
        return LongText("the text", np.array(ids))
    recipe, notes = run_recipe(m.folder), []
    if named:
        plan = replace(data_plan(m.folder, named), paths=tuple(map(str, named)), validation=())
    else:
        plan = read_recipe(recipe).data
        refuse(not plan.paths, NO_TEXT)
        notes.append(f"text: what the run held out of {_listed(plan.validation or plan.paths)}")
    plan = replace(plan, task=task_for(m, plan.task))
    corpus, task = open_examples(plan, split=not named)
    with tempfile.TemporaryDirectory() as folder:
        own = task_named(task)
        found = own.encode_corpus(corpus, "validation", m.text_tokenizer, (), folder, special=m.special)
        encoded, prefix = np.array(found["ids"], np.int64), tuple(found.frame.special[0])
    name = _listed(named) if named else "the text that the run held out"
    return LongText(name, encoded, prefix, (*notes, *corpus.notes, *found.notes))


def _listed(names: Sequence[str | Path]) -> str:
    return ", ".join(map(str, names))
