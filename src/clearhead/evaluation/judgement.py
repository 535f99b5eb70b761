"""`Judgement`: what an evaluation knows of a model and its examples when a task adds its figures."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from clearhead.api import Model
from clearhead.data.plan import DataPlan
from clearhead.evaluation.figures import Figures

OnProgress = Callable[[str, int, int], None]  # what is being done, how much of it is done, how much there is
SOURCES = 32  # sources to be translated at a time, where no number of rows is asked for


@dataclass(frozen=True)
class Options:
    """What a caller of `evaluate` chooses."""

    tokenize: str | None = None  # sacreBLEU's tokenizer
    lowercase: bool = False
    generation: dict[str, Any] = field(default_factory=dict)  # options of `translate`
    on_progress: OnProgress = lambda stage, done, total: None


@dataclass
class Judgement:
    """One evaluation."""

    loaded: Model
    labels: tuple[str, ...]  # names of the model's classes
    plan: DataPlan
    rows: Any  # the examples
    figures: Figures
    options: Options
    asked: Sequence[tuple[str, ...]] = ()  # where answers are texts: the distinct questions or sources
    references: Sequence[list[str]] = ()  # and all right answers to each
    written: list[str] = field(default_factory=list)  # what the model generates for each
    said: list[list[Any]] = field(default_factory=list)  # of each row, as `Objective.answers` has it
    meant: list[list[Any]] = field(default_factory=list)
    tokens: int = 0  # of the text
    unknown: int = 0  # of these, unknown to the tokenizer

    def write(self) -> list[str]:
        """Generate an output for each source; those of similar length share a batch."""
        loaded, options, written = self.loaded, self.options.generation, [""] * len(self.asked)
        ids = loaded.encode([source for (source,) in self.asked], loaded.max_length)
        order = sorted(range(len(ids)), key=lambda place: len(ids[place]))
        size = self.plan.batch_size if self.plan.batch_tokens is None else SOURCES
        for start in range(0, len(order), size):
            some = order[start : start + size]
            given: Any = [ids[place] for place in some]
            for place, one in zip(some, loaded.translate(given, **options)):
                written[place] = one.text or ""
            self.options.on_progress("writing", min(start + size, len(order)), len(order))
        return written
