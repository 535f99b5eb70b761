"""Time a model on this machine next to what else is installed, job by job, the programs alternating.

A program is a function from a job to what runs it once, or None where it has no such job. What a run returns
shows that it did the job (`check_answer`): rows of the tokens that were written, or how many where a program
does not say which; one entry for each text or picture that was read; the loss of a training step. A program
that cannot open the model says why in one line.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.errors import ClearheadError, first_line, refuse, refuse_unknown
from clearhead.inside.checks.independent import their_class
from clearhead.inside.long_text import timed
from clearhead.inside.results import Result
from clearhead.labs.speed.jobs import (
    KINDS,
    Kind,
    Machine,
    SpeedJob,
    SpeedSizes,
    bytes_read,
    jobs_of,
    measure_machine,
)
from clearhead.labs.speed.llama import Llama
from clearhead.run.api import Model, load
from clearhead.run.quant.layers import quantized_parts
from clearhead.variants.contexts import evaluating

Run = Callable[[], Any]
Program = Callable[[SpeedJob], Run | None]
OURS = "clearhead"
BATCH = 32  # texts at a time, where a program is left to its usual way of reading


class Rival(NamedTuple):
    """A program with the model open, and how it is closed."""

    name: str
    runs: Program
    close: Callable[[], None] = lambda: None


def ours(m: Model) -> Rival:
    """Return clearhead by its usual calls."""
    device = next(m.model.parameters()).device

    def runs(job: SpeedJob) -> Run | None:
        if job.kind == "train":
            return training(
                m.model, job.ids.to(device), lambda ids: answer_of(m.model(**training_arguments(m, ids)))
            )
        if job.kind != "read":
            rows = job.ids.tolist()
            return lambda: [generation.ids for generation in m.generate(rows, job.new, stop_tokens=[])]
        if not job.texts:
            pictures = list(job.ids.numpy())
            return lambda: (
                m.classify(pictures) if m.config.head == "classifier" else answer_of(m.model(job.ids))
            )
        read = m.classify if m.config.head == "classifier" else m.embed
        return lambda: read(list(job.texts))

    return Rival(OURS, runs)


def training_arguments(m: Model, ids: Tensor) -> dict[str, Tensor]:
    """Return the arguments of a pass that learns: an encoder-decoder reads the same row on both sides."""
    return {"ids": ids, "source": ids} if m.config.family == "encoder-decoder" else {"ids": ids}


def answer_of(out: Any) -> Tensor:
    """Return the logits of a model's answer, or its states where it has no head."""
    names = ("logits", "hidden", "last_hidden_state")
    return next(x for name in names if isinstance(x := getattr(out, name, None), Tensor))


def training(model: nn.Module, ids: Tensor, answer: Callable[[Tensor], Tensor]) -> Run:
    """Return a step of AdamW whose rate is zero: all is computed, and the weights stay as they are."""
    learned = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=0.0, weight_decay=0.0)

    def step() -> float:
        before = model.training
        model.train()
        output = answer(ids)
        if output.shape[:2] == ids.shape and output.shape[-1] > int(ids.max()):
            loss = nnf.cross_entropy(output.float().flatten(0, 1), ids.flatten())
        else:
            loss = output.float().pow(2).mean()
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        model.train(before)
        return float(loss.detach())

    return step


def check_answer(job: SpeedJob, answer: Any) -> None:
    """Refuse the answer of a run that did less than the job: its seconds are no speed."""
    if job.kind == "train":
        refuse(not math.isfinite(answer), f"its loss is {answer}")
        return
    refuse(
        job.kind != "read" and not isinstance(answer, list), f"its answer is no list of rows: {answer!s:.80}"
    )
    wanted = len(job.texts) or len(job.ids)
    things = "rows" if job.kind != "read" else "texts" if job.texts else "pictures"
    refuse(len(answer) != wanted, f"it answered {len(answer)} of {wanted} {things}")
    if job.kind != "read":
        lengths = [row if isinstance(row, int) else len(row) for row in answer]
        wrong = next((length for length in lengths if length != job.new), None)
        refuse(wrong is not None, f"it wrote {wrong} tokens where {job.new} were asked for")


def transformers(m: Model, folder: Path, longest: int) -> Rival:
    """Open the directory in transformers, in the same dtype, with its usual attention."""
    import transformers as there

    there.logging.disable_progress_bar()
    weight = next(m.model.parameters())
    named = {} if folder.is_dir() else {"gguf_file": folder.name}
    where = folder if folder.is_dir() else folder.parent
    model = their_class(m).from_pretrained(where, dtype=weight.dtype, **named).to(weight.device).eval()
    twice = m.config.family == "encoder-decoder"

    def runs(job: SpeedJob) -> Run | None:
        ids = job.ids.to(weight.device)
        if job.kind == "train":
            more = {"decoder_input_ids": ids} if twice else {}
            quiet = {} if m.config.family == "encoder" else {"use_cache": False}
            return training(model, ids, lambda ids: answer_of(model(input_ids=ids, **more, **quiet)))
        if job.kind == "read":
            return _read_there(m, model, job, ids)
        options = {"max_new_tokens": job.new, "min_new_tokens": job.new, "do_sample": False, "num_beams": 1}
        mask, before = torch.ones_like(ids), 1 if twice else ids.shape[1]  # a decoder has its start there
        return lambda: model.generate(ids, attention_mask=mask, pad_token_id=0, **options)[
            :, before:
        ].tolist()

    return Rival("transformers", runs)


def _read_there(m: Model, model: Any, job: SpeedJob, pictures: Tensor) -> Run:
    """Return reading as its documents show it: texts in batches of 32, padded, and the mean of the states."""
    if not job.texts:
        return torch.no_grad()(lambda: answer_of(model(pixel_values=pictures)))

    @torch.no_grad()
    def read() -> list[Tensor]:
        vectors: list[Tensor] = []
        for start in range(0, len(job.texts), BATCH):
            rows = m.encode(list(job.texts[start : start + BATCH]), m.max_length)
            ids, mask = m.batch(rows)
            out = model(input_ids=ids, attention_mask=mask.long())
            if "last_hidden_state" in out:
                weights = mask[..., None].to(out.last_hidden_state.dtype)
                vectors += (out.last_hidden_state * weights).sum(1) / weights.sum(1)
            else:
                vectors += answer_of(out)
        return vectors

    return read


def sentence_transformers(m: Model, folder: Path, longest: int) -> Rival:
    """Open a sentence encoder in sentence-transformers."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device=str(next(m.model.parameters()).device))

    def runs(job: SpeedJob) -> Run | None:
        if job.kind != "read":
            return None
        return lambda: model.encode(list(job.texts), show_progress_bar=False)

    return Rival("sentence-transformers", runs)


def ctranslate2(m: Model, folder: Path, longest: int) -> Rival:
    """Convert the directory for CTranslate2, in float32."""
    there = importlib.import_module("ctranslate2")

    refuse(m.config.head != "lm" or m.config.family == "encoder", "only models that write are compared")
    refuse(not folder.is_dir(), "it opens directories only")
    converted = tempfile.TemporaryDirectory()
    there.converters.TransformersConverter(str(folder)).convert(converted.name, force=True)
    device = next(m.model.parameters()).device.type
    kept = {"device": device, "compute_type": "float32", "intra_threads": torch.get_num_threads()}
    twice = m.config.family == "encoder-decoder"
    model = (there.Translator if twice else there.Generator)(converted.name, **kept)
    tokenizer = m.text_tokenizer

    def runs(job: SpeedJob) -> Run | None:
        if job.kind not in ("first", "decode"):
            return None
        rows = [[tokenizer.id_to_token(token) for token in row] for row in job.ids.tolist()]
        if twice:
            lengths = {"max_decoding_length": job.new, "min_decoding_length": job.new, "beam_size": 1}
            return lambda: [result.hypotheses[0] for result in model.translate_batch(rows, **lengths)]
        lengths = {"max_length": job.new, "min_length": job.new, "include_prompt_in_result": False}
        return lambda: [result.sequences_ids[0] for result in model.generate_batch(rows, **lengths)]

    return Rival("CTranslate2", runs, converted.cleanup)


def llama_cpp(m: Model, folder: Path, longest: int) -> Rival:
    """Write a GGUF file, of as many bits as the model has, and open it in llama.cpp, one row at a time."""
    weight = next(m.model.parameters())
    bits = {part.grid.bits for part in quantized_parts(m.model).values()}
    exact = "float32" if weight.dtype == torch.float32 else "float16"
    refuse(weight.device.type != "cpu", "it is compared on a CPU only")
    refuse(m.tokenizer is None, "it opens no model without a tokenizer")
    with tempfile.TemporaryDirectory() as written:
        path = Path(written) / "model.gguf"
        whole = load(folder) if bits else m
        whole.tokenizer = m.tokenizer
        whole.save(path, "Q4_0" if 4 in bits else "Q8_0" if bits else exact)
        there = Llama(path, longest, torch.get_num_threads())

    def runs(job: SpeedJob) -> Run | None:
        if job.kind not in ("first", "decode") or len(job.ids) > 1:
            return None
        ids = job.ids[0].tolist()
        return lambda: [there.write(ids, job.new)]

    return Rival("llama.cpp", runs, there.close)


# By the name that people type: the package it needs, and how it opens a directory for rows of so many tokens.
PEERS: dict[str, tuple[str, Callable[[Model, Path, int], Rival]]] = {
    "transformers": ("transformers", transformers),
    "sentence-transformers": ("sentence_transformers", sentence_transformers),
    "ctranslate2": ("ctranslate2", ctranslate2),
    "llama.cpp": ("xllamacpp", llama_cpp),
}


def opened(m: Model, names: tuple[str, ...] | None, longest: int) -> Iterator[Rival | str]:
    """Open the model in each program that is installed, or in those named; else say why not.

    `longest`: the most tokens of a row, the prompt and what is written after it.
    """
    for name in PEERS if names is None else names:
        package, open_there = PEERS[name]
        if importlib.util.find_spec(package) is None:
            refuse(names is not None, f"{name} is not installed: pip install {package.replace('_', '-')}")
            continue
        if names is None and name == "sentence-transformers" and m.sentences is None:
            continue
        if m.folder is None:
            yield f"{name} is left out: the model has no directory"
            continue
        try:
            chatter = io.StringIO()  # bars and greetings of other programs
            with contextlib.redirect_stdout(chatter), contextlib.redirect_stderr(chatter):
                rival = open_there(m, m.folder, longest)
            yield rival
        except ClearheadError as error:
            yield f"{name} is left out: {error}"
        except Exception as error:  # whatever another program says of a model it does not know
            yield f"{name} is left out: {first_line(error)}"


PATIENCE = 20.0  # seconds of a first run after which one more is enough
ABOVE_LIMIT = "above the limit"
ABOVE = 1.1  # times the limit: programs and the limit are measured, and so much may be chance


@dataclass(frozen=True)
class Timing(Result):
    """A program's seconds of one job, the median of its rounds.

    Where it did not do the job, or took less time than the machine needs, it has no speed: `fault` says so.
    """

    program: str
    seconds: float | None
    per_second: float | None  # tokens, or pictures
    ours_over_this: float | None  # above 1: clearhead is quicker
    same_tokens: float | None = None  # of what clearhead wrote, the share that this program wrote too
    fault: str = ""

    @property
    def above_limit(self) -> bool:
        """Whether its time was measured, and is less than the machine needs."""
        return self.fault.startswith(ABOVE_LIMIT)


@dataclass(frozen=True)
class JobTimes(Result):
    """One job in every program that has it, clearhead first, with the least time it could take."""

    name: str
    kind: str
    least_seconds: float
    limit: float  # tokens or pictures a second in that time
    share_of_limit: float | None  # the least divided by clearhead's
    bound_by: str  # "reading" or "arithmetic"
    timings: tuple[Timing, ...]


@dataclass(frozen=True)
class SpeedReport(Result):
    """Every job of a model on this machine."""

    machine: Machine
    jobs: tuple[JobTimes, ...]
    notes: tuple[str, ...]


def compare(
    m: Model,
    kinds: Sequence[Kind] = KINDS,
    sizes: SpeedSizes | None = None,
    peers: Sequence[str] | None = None,
    rounds: int = 3,
    on_progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> SpeedReport:
    """Time the jobs that suit a model.

    Args:
        m: the model, on the device and in the dtype to be measured.
        kinds: "first" (token), "decode", "read", "train".
        sizes: tokens of the prompt, new tokens, rows of a batch.
        peers: names of `PEERS`; None: all that are installed.
        rounds: runs of each program, alternating, after one to warm up; the median counts.
        on_progress: called with a stage, how much of it is done, and how much there is.
    """
    sizes = sizes or SpeedSizes()
    refuse(rounds < 1, f"rounds is {rounds}: at least one is needed")
    refuse(min((sizes.prompt, sizes.new, *sizes.batches)) < 1, "prompt, new and batches are 1 at least")
    for name in peers or ():
        refuse_unknown("program", name, PEERS)
    weight = next(m.model.parameters())
    with evaluating(m.model):
        jobs = jobs_of(m, tuple(kinds), sizes)
        longest = max(job.ids.shape[1] + job.new for job in jobs)
        programs, notes = [ours(m)], []
        for opened_or_why in opened(m, None if peers is None else tuple(peers), longest):
            if isinstance(opened_or_why, Rival):
                programs.append(opened_or_why)
            else:
                notes.append(opened_or_why)
        measured = partial(measure_machine, weight.device, weight.dtype, bytes_read(m))
        machine, tried = measured(), []
        try:
            for number, job in enumerate(jobs):
                on_progress("measuring", number, len(jobs))
                tried.append(_warmed_up(programs, job, weight.device))
                _repeat(tried[-1], rounds)
            on_progress("measuring", len(jobs), len(jobs))
        finally:
            for program in programs:
                program.close()
        machine = machine.best(measured())
    rows = tuple(_judged(job, attempts, machine) for job, attempts in zip(jobs, tried))
    return SpeedReport(machine, rows, tuple(notes))


@dataclass
class Attempt:
    """One program at one job: what it answered first, and the seconds of every round; or what went wrong."""

    program: str
    run: Run
    job: SpeedJob
    device: torch.device
    answer: object = None
    seconds: list[float] = field(default_factory=list)
    fault: str = ""

    def time(self) -> None:
        """Add the seconds of one run, whose answer shows that it did the job.

        What another program raises is its fault, and the others go on.
        """
        answers: list[object] = []
        try:
            took = timed(lambda: answers.append(self.run()), self.device)
            check_answer(self.job, answers[0])
        except Exception as error:
            if self.program == OURS:
                raise
            self.fault = first_line(error)
        else:
            self.answer = answers[0]
            self.seconds.append(took)


def _warmed_up(programs: Sequence[Rival], job: SpeedJob, device: torch.device) -> list[Attempt]:
    """Run each program that has such a job once."""
    runs = ((program.name, program.runs(job)) for program in programs)
    attempts = [Attempt(name, run, job, device) for name, run in runs if run is not None]
    for attempt in attempts:
        attempt.time()
    return attempts


def _repeat(attempts: Sequence[Attempt], rounds: int) -> None:
    """Run all programs alternately, so many times; the time of the first run, which warmed up, goes."""
    able = [attempt for attempt in attempts if not attempt.fault]
    slow = max(attempt.seconds.pop() for attempt in able) > PATIENCE
    for _ in range(1 if slow else rounds):
        for attempt in able:
            if not attempt.fault:
                attempt.time()


def _judged(job: SpeedJob, attempts: list[Attempt], machine: Machine) -> JobTimes:
    """Return the times of a job; a time below the roofline limit is a wrong measurement and left out."""
    least = machine.least(job.read, job.flops)
    reading = job.read / machine.bandwidth >= job.flops / machine.arithmetic
    medians = [None if attempt.fault else statistics.median(attempt.seconds) for attempt in attempts]
    for number, (attempt, took) in enumerate(zip(attempts, medians)):
        if took is not None and took * ABOVE < least:
            attempt.fault = f"{ABOVE_LIMIT}: a run took {took:.2g} s, and the machine needs {least:.2g} s"
            medians[number] = None
    mine = medians[0]
    timings = tuple(
        Timing(
            attempt.program,
            took,
            None if took is None else job.tokens / took,
            None if took is None or mine is None else took / mine,
            None if attempt.fault else _same(attempts[0].answer, attempt.answer),
            attempt.fault,
        )
        for attempt, took in zip(attempts, medians)
    )
    share = None if mine is None else least / mine
    bound = "reading" if reading else "arithmetic"
    return JobTimes(job.name, job.kind, least, job.tokens / least, share, bound, timings)


def _same(ours: object, theirs: object) -> float | None:
    """Return the share of tokens that are the same, where both are rows of ids."""
    if not isinstance(ours, list) or not isinstance(theirs, list) or ours is theirs:
        return None
    if not all(isinstance(row, list) and row and isinstance(row[0], int) for row in (*ours, *theirs)):
        return None
    pairs = [pair for row, other in zip(ours, theirs) for pair in zip(row, other)]
    return sum(bool(token == other) for token, other in pairs) / len(pairs)
