"""The state of a page: models that load in the background, and the latest runs.

One forward pass at a time, and one more for what no other view waits for.
"""

import base64
import io
import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from clearhead.app.explorer.findings import best_example, findings, shapes
from clearhead.app.explorer.interventions import dictionaries_of, fired
from clearhead.app.explorer.views import TASKS, OnPart, PageRun, begin, image_token, model_view, tokens_view
from clearhead.app.views import page_view
from clearhead.errors import ClearheadError, InputError, refuse
from clearhead.hub.preprocessor import read_image
from clearhead.inside.features.dictionary import Dictionary
from clearhead.inside.heads import MIXED, head_roles
from clearhead.inside.inputs import prepare_first
from clearhead.inside.memories import ReadCorpus
from clearhead.learn.data.sounds import SUFFIXES
from clearhead.learn.tasks.images import ImagePrompt, encoder_of, ids_of
from clearhead.run.api import Model

KEPT = 16  # runs that are remembered
RECORDED = 4  # of them, those whose pass stays in memory
LONGEST_TEXT = 200_000  # characters
MOST_TOKENS = 4096
MOST_PIXELS = 40_000_000
SWEEP = 16_000  # samples of the tone that a model of speech begins with
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
EXAMPLE = "The cat sat on the mat because it was tired."
OTHER = "A dog slept on the rug, for it was old."
QUESTION = "What is this?"  # of an image without a text
FORGOTTEN = 8.0  # seconds after which a job that nobody asks about ends
KEPT_JOBS = 32


class Opened:
    """One model of the page; it may still be loading."""

    def __init__(
        self,
        name: str,
        opener: Callable[[], Model],
        example: dict[str, Any] | None = None,
        features: Sequence[Path] = (),
    ) -> None:
        self.name, self.opener, self.example, self.named = name, opener, example, tuple(features)
        self.features: tuple[Dictionary, ...] = ()
        self.m: Model | None = None
        self.says, self.failed = f"loading {name}", False
        self.roles: dict[str, str] | None = None
        self.findings: list[dict[str, Any]] | None = None
        self._reading, self._corpus = threading.Lock(), list[ReadCorpus | None]()

    def corpus(self) -> ReadCorpus | None:
        """Return what fires the neurons of the model in some texts, which are read once."""
        with self._reading:
            if not self._corpus:
                assert self.m is not None
                self._corpus.append(fired(self.m))
            return self._corpus[0]

    def open(self) -> None:
        """Load the model; keep what goes wrong as one line."""
        try:
            m = self.opener()
            self.features = dictionaries_of(m, self.named)
            self.example = self.example or first_example(m)
            if m.image_encoder is not None and "image" in self.example:
                self.example["text"] = with_image_token(m, self.example.get("text"))
            self.m = m  # from here on it is ready
        except Exception as error:  # the page must say it, whatever it is
            named = "" if isinstance(error, ClearheadError) else f"{type(error).__name__}: "
            self.says, self.failed = f"{named}{error}", True

    def view(self) -> dict[str, Any]:
        """Return what the page says of it."""
        if self.m is not None:
            return model_view(self.m, self.name, self.example)
        return {
            **{"name": self.name, "ready": False, "failed": self.failed, "says": self.says},
            **{"layers": 0, "parameters": 0},
        }


def first_example(m: Model) -> dict[str, Any]:
    """Return what to begin with: of a few inputs for this task, the one that single heads move most."""
    if m.config.input == "frames":
        return {"sound": None}
    with suppress(ClearheadError):
        best = best_example(m)
        if best is not None:
            return best
    if m.config.input == "patches":
        return {"image": None}
    if m.tokenizer is None:
        return {"ids": list(range(min(12, m.config.vocab_size, m.max_length)))}
    if m.config.head == "mlm" and m.special.get("mask") is not None:
        return {"text": f"The cat {m.tokenizer.id_to_token(m.special['mask'])} on the mat."}
    embeds = m.config.head not in TASKS and m.config.family == "encoder"
    return {"text": EXAMPLE} | ({"pair": OTHER} if embeds else {})


def named_roles(m: Model) -> dict[str, str]:
    """Return what each head does, by its name; heads without a clear role are left out."""
    roles = head_roles(m)
    return {str(head): role for head, role in zip(roles.heads, roles.roles) if role != MIXED}


def first_given(m: Model, text: str | None, image: Path | None = None) -> tuple[Any, str | None]:
    """Return what a recording begins with: the text or file that was named, or an example; and a pair."""
    if image is not None:
        return ImagePrompt(with_image_token(m, text), [image]), None
    if text is not None:
        return text, None
    example = first_example(m)
    if m.config.input == "frames":
        return _sound(None), None
    given = example.get("text") or example.get("ids") or _image(m, example.get("image"))
    return given, example.get("pair")


def with_image_token(m: Model, text: str | None) -> str:
    """Return a text with the token that stands for an image, which goes first where it has none."""
    token, text = str(image_token(m)), QUESTION if text is None else text
    return text if token in text else f"{token}\n{text}"


def starting_example(
    text: str | None, target: str | None, pair: str | None, image: Path | None = None
) -> dict[str, Any] | None:
    """Return what the page begins with, where it was named; an image file becomes its bytes in base64."""
    example: dict[str, Any] = {"text": text, "target": target, "pair": pair}
    if image is not None:
        read_image(image, 3, str(image), MOST_PIXELS)  # refuses what is no image
        example["image"] = _base64(image)
    elif text is None:
        return None
    else:
        path = Path(text)
        kind = {**dict.fromkeys(IMAGES, "image"), **dict.fromkeys(SUFFIXES, "sound")}.get(path.suffix.lower())
        if kind is not None and len(text) < 1000 and path.is_file():
            example = {kind: _base64(path), "target": target if kind == "sound" else None}
    return {name: value for name, value in example.items() if value is not None}


def _base64(file: Path) -> str:
    return base64.b64encode(file.read_bytes()).decode("ascii")


class Ended(Exception):
    """Nobody waits for a job any more."""


class PageJob:
    """Work of many passes, in a thread of its own; it ends where nobody asks about it."""

    def __init__(self, work: Callable[[OnPart], Any]) -> None:
        self.done, self.total, self.polled = 0, 0, time.monotonic()
        self.body: Any = None
        self.part: Any = None  # of the body, what is there already
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run, args=(work,), name="clearhead-job", daemon=True)
        self.thread.start()

    def _run(self, work: Callable[[OnPart], Any]) -> None:
        try:
            self.body = work(self._tell)
        except Exception as error:  # it is raised where the job is asked about
            self.error = error

    def _tell(self, done: int, total: int, part: Any = None) -> None:
        self.done, self.total, self.part = done, total, part
        if time.monotonic() - self.polled > FORGOTTEN:
            raise Ended

    def view(self) -> dict[str, Any]:
        """Return how far it is, and its body once that is there. One that has just ended begins again when
        it is next asked about: to raise that here would tell somebody who asks that nobody does.
        """
        self.polled = time.monotonic()
        if self.error is not None and not isinstance(self.error, Ended):
            raise self.error
        ready = self.body is not None
        body = self.body if ready else self.part
        return {"ready": ready, "done": self.done, "total": self.total, "body": body}


class Session:
    """The models of a page and what was asked of them."""

    def __init__(self, models: Sequence[Opened]) -> None:
        self.models = list(models)
        self.lock = threading.Lock()
        self.aside = threading.Lock()  # of views that take long and hold up no other
        self._runs: OrderedDict[str, PageRun] = OrderedDict()
        self._count = itertools.count(1)
        self._jobs: OrderedDict[str, PageJob] = OrderedDict()  # the latest, by what they compute

    def start(self) -> None:
        """Load the models in the background; then look for what each head does, and for examples."""
        threading.Thread(target=self._prepare, name="clearhead-explorer", daemon=True).start()

    def _prepare(self) -> None:
        for opened in self.models:
            opened.open()
        for opened in self.models:
            if opened.m is not None and opened.roles is None:
                try:  # without the lock: taps are heard in their own thread only
                    opened.roles = named_roles(opened.m)
                except Exception:  # the page works without the names of roles
                    opened.roles = {}
        for opened in self.models[:1]:
            if opened.m is not None and opened.findings is None:
                try:
                    opened.findings = findings(opened.m)
                except Exception:  # the page works without examples
                    opened.findings = []
                with suppress(Exception):  # who asks for neurons hears what is wrong
                    opened.corpus()

    def model(self, number: int = 0) -> Model:
        """Return a model that is ready."""
        count = len(self.models)
        refuse(not 0 <= number < count, f"there is no model {number}: there are {count}")
        opened = self.models[number]
        if opened.m is None:
            raise InputError(
                opened.says if opened.failed else "the model is still loading: try again in a moment"
            )
        return opened.m

    def begin(self, body: dict[str, Any]) -> dict[str, Any]:
        """Start a run from what the page sends."""
        number = body.get("model") or 0
        refuse(type(number) is not int, f"model {number!r:.40} must be a whole number")
        m = self.model(number)
        given, target, pair = given_of(m, body), body.get("target"), body.get("pair")
        for name, text in (("target", target), ("pair", pair)):
            refuse(
                text is not None and not _is_short(text),
                f"{name} must be a text of at most {LONGEST_TEXT:,} characters",
            )
        opened = self.models[number]
        with self.lock:
            run = begin(m, given, target or None, pair or None)
            known = replace(run, number=number, roles=lambda: opened.roles or {}, corpus=opened.corpus)
            known = replace(known, features=lambda: opened.features)
            return self.keep(replace(known, others=self.run))

    def tokens(self, body: dict[str, Any]) -> dict[str, Any] | None:
        """Return the tokens of a text that somebody is typing; nothing is run."""
        m = self.model()
        given, pair = given_of(m, body), body.get("pair")
        refuse(pair is not None and not _is_short(pair), "pair must be a text")
        embeds = TASKS.get(m.config.head or "") is None
        return tokens_view(m, prepare_first(m, given, None if embeds else pair or None).first_tokens)

    def keep(self, run: PageRun) -> dict[str, Any]:
        """Remember a run; of many, forget the oldest."""
        count = len(run.prepared.tokens)
        refuse(count > MOST_TOKENS, f"the text has {count:,} tokens: the page shows at most {MOST_TOKENS:,}")
        name = f"r{next(self._count)}"
        self._runs[name] = run
        if len(self._runs) > KEPT:
            self._runs.popitem(last=False)
        for older in list(self._runs.values())[:-RECORDED]:
            older.prepared.forget()
            older.removed.clear()
        for older in list(self._runs.values())[:-1]:
            older.prepared.forget_graph()
        return run.about(name)

    def job(self, name: str, path: str) -> dict[str, Any]:
        """Return how far a view of many passes is, and its body once that is there.

        It begins when it is first requested. One that failed is forgotten.
        """
        run, job = self.run(name), f"{name}/{path}"
        if job not in self._jobs or isinstance(self._jobs[job].error, Ended):
            self._jobs[job] = PageJob(lambda tell: page_view(replace(run, progress=tell), path))
        while len(self._jobs) > KEPT_JOBS:
            self._jobs.popitem(last=False)
        try:
            return self._jobs[job].view()
        except Exception:
            del self._jobs[job]
            raise

    def run(self, name: str) -> PageRun:
        """Return a run that is remembered."""
        if name not in self._runs:
            raise KeyError(
                f"run {name[:20]} is forgotten: the page keeps the latest {KEPT}; type the text again"
            )
        self._runs.move_to_end(name)
        return self._runs[name]


def given_of(m: Model, body: dict[str, Any]) -> Any:
    """Return what the model is to read: a text, token ids, an image, or a text with an image in it."""
    if m.config.input == "patches":
        return _image(m, body.get("image"))
    if m.config.input == "frames":
        return _sound(body.get("sound"))
    ids, text = body.get("ids"), body.get("text")
    if ids is None:
        refuse(not _is_short(text), f"text must be a string of at most {LONGEST_TEXT:,} characters")
        if (file := body.get("image")) is None:
            if m.image_encoder is not None:
                ids_of(m, text)  # refuses an image token that stands for nothing
            return text
        channels = encoder_of(m).config.tower.n_channels
        return ImagePrompt(str(text), [read_image(_bytes(file, "image"), channels, "the image", MOST_PIXELS)])
    some = isinstance(ids, list) and 1 <= len(ids) <= MOST_TOKENS and all(type(token) is int for token in ids)
    refuse(not some, f"ids must be a list of 1 to {MOST_TOKENS:,} whole numbers")
    last = m.model.main.spec.vocab_size - 1
    refuse(not 0 <= min(ids) <= max(ids) <= last, f"ids must lie between 0 and {last}")
    return ids


def _is_short(text: Any) -> bool:
    return isinstance(text, str) and len(text) <= LONGEST_TEXT


def _image(m: Model, encoded: Any) -> Any:
    """Return the pixels of an image file in base64, or of a ring where none is given."""
    config = m.config
    if encoded is None:
        return shapes(config)["a ring"]
    return read_image(_bytes(encoded, "image"), config.n_channels, "the image", MOST_PIXELS)


def _sound(encoded: Any) -> Any:
    """Return a sound file in base64 as a file, or samples of a tone that rises where none is given."""
    if encoded is not None:
        return _bytes(encoded, "sound")
    rising = np.cumsum(np.linspace(200, 2000, SWEEP)) * 2 * np.pi / SWEEP  # in a second, at the usual rate
    return (0.3 * np.sin(rising)).astype(np.float32)


def _bytes(encoded: Any, name: str) -> io.BytesIO:
    """Return a file that the page sends in base64."""
    refuse(not isinstance(encoded, str), f"{name} must be a file in base64")
    try:
        return io.BytesIO(base64.b64decode(encoded.partition(",")[2] or encoded, validate=True))
    except ValueError as error:
        raise InputError(f"the {name} is not base64: {error}") from None
