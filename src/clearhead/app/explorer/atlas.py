"""Interventions on one run, as the page shows them: parts switched off, and activations of a second text.

Those of every single part take many passes: the page begins them as jobs and asks how far they are.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from clearhead.app.explorer.pack import packed_floats, short
from clearhead.errors import refuse
from clearhead.inside.ablation import How, Means, effect, effect_of_each
from clearhead.inside.inputs import Choices, Prepared, prepare
from clearhead.inside.lens import followed
from clearhead.inside.patch import OnRows, patch
from clearhead.run.api import Model

LISTED = 12  # of the likeliest choices, before and after
FORGOTTEN = 30.0  # seconds after which a job that nobody asks about ends
KEPT_JOBS = 32


class ReadRun(Protocol):
    """What interventions read of a run."""

    @property
    def m(self) -> Model:
        """The model."""

    @property
    def prepared(self) -> Prepared:
        """What it read."""

    @property
    def given(self) -> Any:
        """What `prepare` took."""

    @property
    def target(self) -> Sequence[int] | None:
        """What the decoder had written."""

    @property
    def pair(self) -> str | None:
        """The second text of a pair."""

    @property
    def choices(self) -> Choices:
        """What the head chooses among."""

    @property
    def others(self) -> Callable[[str], ReadRun]:
        """Another run, by its name."""

    @property
    def progress(self) -> OnRows:
        """Who hears how many rows are done."""


def ablated(
    run: ReadRun,
    heads: list[str],
    layers: list[str],
    feedforwards: list[str],
    how: str,
    position: int,
    second: ReadRun | None = None,
) -> dict[str, Any]:
    """Return the scores at one position with parts of the model off, beside those of the whole model.

    How they are off: "zero", "mean", or "second": what they give is taken from the run of a second text.
    """
    kind: Any = "mean" if how == "second" else how
    means = _activations(run, second) if how == "second" else None
    where: dict[str, Any] = {"target": run.target, "pair": run.pair, "position": position}
    seen = effect(run.m, run.given, heads, layers, feedforwards, kind, means, **where, top=LISTED)
    before, after = seen.before.softmax(-1).tolist(), seen.after.softmax(-1).tolist()
    rows = [
        {"id": one.id, "label": one.label, "before": before[one.id], "after": after[one.id]}
        for one in seen.top
    ]
    return {"ablated": list(seen.ablated), "how": how, "kl": seen.kl, "position": position, "rows": rows}


def _activations(run: ReadRun, second: ReadRun | None) -> Means:
    """Return what every part gives in the run of a second text, as `effect` takes means: a row a token."""
    if second is None:
        refuse(True, "there is no second text to take anything from: give one")
    assert second is not None
    _same_model(run, second)
    other = prepare(second.m, second.given, run.target, second.pair)
    for ours, theirs in (
        (run.prepared.first_tokens, other.first_tokens),
        (run.prepared.tokens, other.tokens),
    ):
        refuse(
            len(ours) != len(theirs),
            f"the texts have {len(ours)} and {len(theirs)} tokens: to take something from the second, "
            "give texts of equal length",
        )
    taps = (
        "*.z",
        "*.attention.out",
        "*.feedforward.out",
        *(["*.cross.out"] if run.m.config.main.cross else []),
    )
    return {name: x[0] for name, x in other.record(*taps)[1].items()}


def _same_model(run: ReadRun, second: ReadRun) -> None:
    refuse(
        run.m is not second.m, "the second text was read by another model: nothing of it fits into this one"
    )


def effects(run: ReadRun, how: How, position: int) -> dict[str, Any]:
    """Return what the model says at one position without each of its parts alone; probabilities by id."""
    asked: dict[str, Any] = {"target": run.target, "pair": run.pair, "position": position}
    found = effect_of_each(run.m, run.given, how, **asked, top=LISTED, on_progress=run.progress)
    listed = {one.id: one for seen in found.effects.values() for one in seen.top}
    return {
        "position": position,
        "how": how,
        "labels": {number: one.label for number, one in listed.items()},
        "before": {number: short(one.before) for number, one in listed.items()},
        "parts": {
            name: {
                "says": seen.ablated[0],
                "kl": short(seen.kl),
                "after": {one.id: short(one.after) for one in seen.top},
            }
            for name, seen in found.effects.items()
        },
    }


def patches(
    run: ReadRun, second: str, part: str, position: int, token: int | None, against: int | None
) -> dict[str, Any]:
    """Return what each activation of this run brings back of its answer in the run of a second text."""
    other = run.others(second)
    _same_model(run, other)
    refuse(
        run.pair is not None or other.pair is not None, "patching reads one text, not a pair: run each alone"
    )
    asked: dict[str, Any] = {"parts": (part,), "position": position, "target": run.target}
    found = patch(run.m, run.given, other.given, token, against, **asked, on_progress=run.progress)
    return found.to_dict()


def followed_view(run: ReadRun, token: int, first: int | None, count: int | None) -> dict[str, Any]:
    """Return the probability of one choice after each layer, at each column or at some."""
    last = len(run.choices.columns)
    some = None if first is None else range(first, min(first + (count or 1), last))
    found = followed(run.m, run.prepared, token, columns=some)
    return {"token": token, "label": run.choices.name(token), "p": packed_floats(found.numpy())}


# Jobs -------------------------------------------------------------------------------------------------------


class Ended(Exception):
    """Nobody waits for a job any more."""


class PageJob:
    """Work of many passes, in a thread of its own; it ends where nobody asks about it."""

    def __init__(self, work: Callable[[OnRows], Any]) -> None:
        self.done, self.total, self.asked = 0, 0, time.monotonic()
        self.body: Any = None
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run, args=(work,), name="clearhead-job", daemon=True)
        self.thread.start()

    def _run(self, work: Callable[[OnRows], Any]) -> None:
        try:
            self.body = work(self._tell)
        except Exception as error:  # it is raised where the job is asked about
            self.error = error

    def _tell(self, done: int, total: int) -> None:
        self.done, self.total = done, total
        if time.monotonic() - self.asked > FORGOTTEN:
            raise Ended

    def view(self) -> dict[str, Any]:
        """Return how far it is, and its body once that is there. One that has just ended begins again when
        it is next asked about: to raise that here would tell somebody who asks that nobody does.
        """
        self.asked = time.monotonic()
        if self.error is not None and not isinstance(self.error, Ended):
            raise self.error
        ready = self.body is not None
        return {"ready": ready, "done": self.done, "total": self.total, "body": self.body}


class PageJobs:
    """The latest jobs, by what they compute."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, PageJob] = OrderedDict()

    def ask(self, name: str, work: Callable[[OnRows], Any]) -> dict[str, Any]:
        """Begin a job unless it is there; return how far it is. One that failed is forgotten."""
        if name not in self._jobs or isinstance(self._jobs[name].error, Ended):
            self._jobs[name] = PageJob(work)
        while len(self._jobs) > KEPT_JOBS:
            self._jobs.popitem(last=False)
        try:
            return self._jobs[name].view()
        except Exception:
            del self._jobs[name]
            raise
