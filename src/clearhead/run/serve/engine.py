"""The engine: requests in, generations out, all of them a step further at a time.

Each step is one row of chunks: of every decoding sequence its last token, then as much of the prompts as the
budget leaves (chunked prefill). A sequence waits until the pool has room for its prompt. When room runs out,
the latest one is preempted: it gives its blocks back and later computes its tokens anew. Pooling requests,
such as embeddings, wait in a queue of their own and alternate with the steps.

Draft tokens, found in a sequence's own text or proposed by a model, are further rows of a step, so
attention sees the shapes that it sees without them. A token is chosen at each row as it always would be, and
the rows after a rejected draft token are left out: the tokens are those of plain decoding. Whether a draft
token is verified at all depends on how often those of this sequence were right, also those that were not
verified, and on what a further row of a step has cost.
"""

import functools
import sys
import threading
import time
from collections import abc, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from clearhead.errors import BusyError, InputError, RequestError, nearest, refuse
from clearhead.learn.parallel.shards import is_split
from clearhead.learn.tasks.generation import Prompt
from clearhead.learn.tasks.images import ImagePrompt
from clearhead.learn.tasks.reading import fitting
from clearhead.run.api import Model
from clearhead.run.bundle import Bundle
from clearhead.run.generate.sequence import verify
from clearhead.run.quant.cache import check_no_indexer
from clearhead.run.serve import limits as limiting
from clearhead.run.serve.adapters import Adapter, Updates
from clearhead.run.serve.kv_cache import ALL
from clearhead.run.serve.limits import Limits, ServeStats, check_fits, chunk_size, pool_for, window_blocks
from clearhead.run.serve.model_runner import ModelRunner
from clearhead.run.serve.pooling import CHARACTERS, InsideView, PoolingQueue, PoolingRequest, with_model
from clearhead.run.serve.processes import WHOLE, Processes, kv_heads_here
from clearhead.run.serve.sequence import (
    OnUpdate,
    Plan,
    ServedSequence,
    ServeOptions,
    check_served,
    plain_greedy,
    served_options,
)
from clearhead.run.serve.speculation import Speculation
from clearhead.variants.kinds import denoises

KEPT = 64  # requests that are remembered once they have ended
STALLED = 30.0  # seconds without a step, with work to do, after which the engine counts as ill


class ServeEngine:
    """The requests of one model. `submit` and `read` may be called from any thread, `step` from one."""

    def __init__(
        self,
        m: Model,
        limits: Limits | None = None,
        adapters: Mapping[str, Updates] | None = None,
        draft: Bundle | str | None = None,
        processes: Processes | None = None,
    ) -> None:
        """Serve a model; `draft` is a smaller one with the same vocabulary, which proposes draft tokens.

        With draft "mtp", the model's own MTP layers propose them.
        `processes`: those that the model is split over; each builds this engine, and the first steps.
        """
        self.m, self.limits, self.stats = m, limits or Limits(), ServeStats()
        self.split = is_split(m.model)
        refuse(self.split and processes is None, "this model is split over processes: serve it by torchrun")
        for name, value in (
            *(("exact", self.limits.exact), ("cache int8", self.limits.cache), ("adapters", adapters)),
            ("a draft model", draft),
        ):
            refuse(self.split and value, f"{name}: not possible with {WHOLE}")
        if self.limits.cache:
            check_no_indexer(m.config, f'cache "{self.limits.cache}"')
        # A model of speech takes no steps: it reads windows of sound, one request at a time.
        self.hears = m.config.input == "frames"
        # A diffusion model computes each request by itself, a denoising step at a time.
        self.denoises = denoises(m.config)
        alone = self.hears or self.denoises
        self.model_runner = None if alone else ModelRunner(m.model, self.limits)
        if self.denoises:
            m.engine.runner()  # made once, here
        self.adapters: Mapping[str, Adapter] = {}  # by name; another mapping after each change
        self.adapter_names: set[str] = set()  # of all that there ever were: none is taken for the model's
        self.waiting: deque[ServedSequence] = deque()
        self.running: list[ServedSequence] = []  # by arrival
        self.finished: deque[ServedSequence] = deque(maxlen=KEPT)  # for those who look inside them
        self.inside = InsideView(m)
        self.moved = time.monotonic()  # when the last step ended
        self.closed, self._count = False, 0
        self.admitted = 0  # requests that have room and are not submitted yet
        self._wake = threading.Condition()
        for name, updates in (adapters or {}).items():
            self.load_adapter(name, updates)
        self._thread: threading.Thread | None = None
        weight, spec = next(m.model.parameters()), m.model.main.spec
        self.chunk = chunk_size(self.limits, weight.is_cuda)
        self.pooling = PoolingQueue(sys.maxsize if weight.is_cuda else CHARACTERS)
        causal = spec.causal or self.denoises
        self.generates = causal and m.config.head == "lm" and not self.hears
        # A layer that keeps a state has nothing that a later prompt could take up.
        self.shares = spec.causal and self.generates and not any(kind.stateful for kind in spec.kinds)
        self.pool = None
        refuse(
            draft is not None and not self.generates,
            f"this model's head is {m.config.head}: it generates no text, so leave the draft model out",
        )
        refuse(
            self.denoises and (draft is not None or adapters or self.split),
            "a diffusion model is served on one device: leave out draft models, adapters and torchrun",
        )
        own = None if self.model_runner is None else self.model_runner.runner
        self.speculation = Speculation(m, self.limits, draft, own)
        if self.model_runner is not None:
            self.model_runner.observe = self.speculation.observe
        if self.generates and not self.denoises:
            check_served(m.model, self.max_length)
            heads, length = kv_heads_here(m.model) if self.split else None, m.config.max_positions
            self.pool = pool_for(spec, self.limits, length, weight.dtype, weight.device, heads)
        if processes is not None and self.model_runner is not None:
            processes.share(self.model_runner, self.pool)
        self.pooling_model = m if self.model_runner is None else with_model(m, self.model_runner.runner)

    @functools.cached_property
    def exact(self) -> bool:
        """Whether this machine gives a row the same bits whatever else is in the step."""
        runner = self.model_runner
        if self.split:
            return False
        return runner is None or runner.agree(self.limits.tokens + self.limits.running)

    @property
    def max_length(self) -> int:
        """The context length: tokens that a prompt and its answer may have."""
        return self.limits.max_length or self.m.max_length

    @property
    def longest(self) -> int:
        """The most tokens that a prompt and its text may have together."""
        pool = self.pool.blocks.get(ALL) if self.pool is not None else None
        return self.max_length if pool is None else min(self.max_length, pool.count * self.limits.block)

    # Requests ----------------------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """Number of requests that may still come: those that can begin at the next step, and may wait."""
        free = self.limits.running - len(self.running)
        return self.limits.waiting + free - len(self.waiting) - len(self.pooling.waiting) - self.admitted

    def check_room(self, tokens: int = 0, joined: bool = False) -> None:
        """Raise `BusyError` where no more may wait; cheap enough to ask before a prompt is encoded.

        `joined`: one more text of a request that was let in.
        """
        limits, waiting = self.limits, sum(len(seq.tokens) for seq in list(self.waiting))
        requests = len(self.waiting) + len(self.pooling.waiting)
        if self.closed:
            raise BusyError("the server is ending and takes no more requests: try another one")
        if (self.room < 1 and not joined) or (waiting and waiting + tokens > limits.waiting_tokens):
            raise BusyError(
                f"{requests} requests with {waiting} tokens of prompts are waiting, and at most "
                f"{limits.waiting} and {limits.waiting_tokens} may: try again later"
            )

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Keep room for a request while it is encoded; its sequences are submitted with `joined`."""
        with self._wake:
            self.check_room()
            self.admitted += 1
        try:
            yield
        finally:
            with self._wake:
                self.admitted -= 1

    def submit(
        self,
        prompt: Prompt,
        options: Mapping[str, Any] | None = None,
        serving: ServeOptions | None = None,
        on_update: OnUpdate | None = None,
        after: ServedSequence | None = None,
        joined: bool = False,
    ) -> ServedSequence:
        """Queue a sequence to generate; `options` are those of `generate`.

        Of `lookup` and `draft_tokens`, the smaller one bounds its draft tokens.
        """
        refuse(self.hears, f"this model reads sound, and no text: {fitting(self.m)}")
        refuse(not self.generates, f"this model's head is {self.m.config.head}: it generates no text")
        bare = prompt.prompt if isinstance(prompt, ImagePrompt) else prompt
        if self.pool is not None:
            limiting.check_prompt(self.pool, bare, None if self.m.model.main.spec.cross else ALL)
        given, serving = served_options(options or {}, self.limits.cache), serving or ServeOptions()
        refuse(
            serving.inside and isinstance(prompt, ImagePrompt) and prompt.images,
            "inside is given of text alone, and this request has images: leave one out",
        )
        self.check_room(joined=joined)
        seq = ServedSequence(self.m, prompt, given, serving, on_update, self.max_length, after)
        seq.after, needed = after, len(seq.prompt) + seq.most
        if self.pool is not None:
            check_fits(self.pool, needed, ALL)
            check_fits(self.pool, seq.sources, None)
        if adapter := seq.serving.adapter:
            seq.adapter = self.adapters.get(adapter)
            if seq.adapter is None:
                line = f'no adapter is called "{adapter}"'
                raise RequestError(line, "model_not_found", 404, "model")
        if seq.serving.inside:
            refuse(self.split, f"inside is not possible with {WHOLE}")
            refuse(adapter, f'inside is given of the model, and not with an adapter such as "{adapter}"')
            self.inside.check(seq.serving.inside, needed, seq.sources)
        self.check_room(len(seq.tokens), joined)
        with self._wake:
            self.moved = self.moved if self.busy else time.monotonic()  # nothing had to move before
            self._count += 1
            seq.number = self._count
            self.waiting.append(seq)
            self._wake.notify()
        return seq

    def read(
        self,
        inputs: abc.Sequence[Any],
        run: Callable[[Bundle, list[Any]], abc.Sequence[Any]],
        joined: bool = False,
    ) -> PoolingRequest:
        """Queue inputs for `run`, a function of the model and a list; it gives a result for each.

        Requests with the same `run` may share a call. Inputs without a result yet, the last of the list, are
        run again, after other requests. `joined`: the request was let in by `admit`.
        """
        self.check_room(joined=joined)
        request = PoolingRequest(inputs, lambda every: run(self.pooling_model, every), run)
        with self._wake:
            self.moved = self.moved if self.busy else time.monotonic()
            self.pooling.waiting.append(request)
            self._wake.notify()
        return request

    # Adapters ----------------------------------------------------------------------------------------------

    def load_adapter(self, name: str, updates: Updates, replace: bool = False) -> None:
        """Let requests name an adapter from now on."""
        refuse(self.model_runner is None, "models of speech and diffusion models are served without adapters")
        assert self.model_runner is not None
        adapter = self.model_runner.adapted.make(name, updates)
        with self._wake:
            refuse(
                name in self.adapters and not replace,
                f'an adapter is called "{name}" already: unload it first, or replace it (load_inplace)',
            )
            self.adapters = {**self.adapters, name: adapter}
            self.adapter_names.add(name)

    def unload_adapter(self, name: str) -> None:
        """Take no more requests with an adapter; those that are there keep it until they end."""
        with self._wake:
            if name not in self.adapters:
                line = f'no adapter is called "{name}"{nearest(name, self.adapters)}'
                raise RequestError(line, "model_not_found", 404, "lora_name")
            self.adapters = {other: adapter for other, adapter in self.adapters.items() if other != name}

    # Steps -------------------------------------------------------------------------------------------------

    def beat(self) -> None:
        """Tell that work goes on, within a step that takes long."""
        self.moved = time.monotonic()

    @property
    def busy(self) -> bool:
        """Return whether there is work to do."""
        return bool(self.waiting or self.running or self.pooling)

    @property
    def well(self) -> bool:
        """Return False where work waits and nothing moves."""
        return not self.busy or time.monotonic() - self.moved < STALLED

    @torch.inference_mode()
    def step(self) -> None:
        """Take every sequence one step further."""
        for seq in [*self.running, *self.waiting]:
            if (reason := seq.ends.reason()) is not None:
                self._end(seq, reason)
        if self.denoises:
            self._denoise()
        else:
            self._generate()
        self.pooling.step()
        self.stats.steps += 1
        self.moved = time.monotonic()

    def _denoise(self) -> None:
        """Take every request of a diffusion model one denoising step further, each by itself."""
        while self.waiting and len(self.running) < self.limits.running:
            seq = self.waiting.popleft()
            self.running.append(seq)
            seq.placed, seq.times.begun = True, time.monotonic()
            self.stats.prompt_tokens += len(seq.prompt)
        for seq in [*self.running]:
            before = len(seq.ids)
            try:
                goes_on = next(seq.denoising, None) is not None
            except Exception as error:
                self._end(seq, "error", error)
                continue
            self.stats.new_tokens += len(seq.ids) - before
            if not goes_on:
                self._end(seq)

    def _generate(self) -> None:
        """Run a step of chunks: of prompts, and of the last tokens."""
        plan: Plan = []
        self._plan(plan)
        plain = self.speculation.is_plain(plan)
        self.speculation.add(plan)
        alone = [chunk for chunk in plan if not chunk.seq.encoded]
        for chunk in alone:
            self._guarded([chunk])
        before = time.thread_time()
        self._guarded([chunk for chunk in plan if chunk not in alone])
        if plain:
            self.speculation.price.keep(len(plan), time.thread_time() - before)

    def _plan(self, plan: Plan) -> None:
        """Schedule this step: decoding sequences first, then prompts, in the order of arrival."""
        budget = self.limits.tokens
        for seq in [seq for seq in self.running if seq.decoding]:
            budget -= self._add(plan, seq, budget, 1) if seq.placed else 0
        for seq in [seq for seq in self.running if not seq.decoding]:
            budget -= self._add(plan, seq, budget) if seq.placed else 0
        while self.waiting and budget > 0 and len(self.running) < self.limits.running:
            seq = self.waiting[0]
            if (seq.after is not None and seq.after.prefilling) or not self._admit(seq):
                return
            self.waiting.popleft()
            self.running.append(seq)
            seq.placed = True
            budget -= self._add(plan, seq, budget)

    def _add(self, plan: Plan, seq: ServedSequence, budget: int, most: int | None = None) -> int:
        """Add chunks of a sequence up to the budget; return how many tokens they have."""
        added = 0
        for table in seq.tables.values():
            table.trim(seq.read)
        while seq.planned < len(seq.tokens) and (most is None or added < most):
            chunk = seq.next_chunk(self.chunk)
            count = chunk.stop - chunk.start
            if (plan and added + count > budget) or not self._make_room(plan, seq, chunk.stop):
                break
            plan.append(chunk)
            seq.planned, added = chunk.stop, added + count
        return added

    def _make_room(self, plan: Plan, seq: ServedSequence, tokens: int) -> bool:
        """Take the blocks for so many tokens, from the latest requests if need be."""
        for group, table in seq.tables.items():
            while group is not None and table.missing(tokens) > table.blocks.available:
                latest = self.running[-1]
                self._preempt(latest)
                plan[:] = [chunk for chunk in plan if chunk.seq is not latest]
                if latest is seq:
                    return False
            if group is not None:
                table.extend(tokens)
        return True

    def _preempt(self, seq: ServedSequence) -> None:
        seq.restart()
        seq.preempted += 1
        self.stats.preempted += 1
        self.running.remove(seq)
        seq.placed = False
        self.waiting.appendleft(seq)

    def _admit(self, seq: ServedSequence) -> bool:
        """Find the beginning of a prompt in the pool, and whether there is room for the rest."""
        if self.pool is not None and not seq.tables:
            seq.place(self.pool, self.shares)
        size, tables = self.limits.block, seq.tables
        most = (len(seq.prompt) - 1) // size if seq.serving.prompt_logprobs is None else 0
        adopted = seq.adopt(most)
        if None in tables:
            if tables[None].missing(seq.sources) > tables[None].blocks.available:
                return False
            tables[None].extend(seq.sources)
        for group, table in tables.items():
            needed = table.missing(len(seq.tokens) + 1) if group is not None else 0
            if group is not None and group[0] is not None:
                needed = min(needed, window_blocks(group, self.limits))
            if needed > table.blocks.available and self.running:
                for taken in tables.values():
                    taken.clear()
                return False
        seq.read = seq.planned = adopted * size
        if seq.times.begun is None:
            self.stats.prefix_asked += len(seq.prompt)
            self.stats.prefix_found += seq.read
            seq.cached = seq.read
        seq.times.begun = seq.times.begun or time.monotonic()
        return True

    def _guarded(self, plan: Plan) -> None:
        """Run a step; an error of the whole of it ends the requests that are in it, and no other."""
        if not plan:
            return
        try:
            self._run(plan)
        except Exception as error:
            for seq in dict.fromkeys(chunk.seq for chunk in plan if not chunk.seq.done):
                self._end(seq, "error", error)

    def _run(self, plan: Plan) -> None:
        assert self.pool is not None and self.model_runner is not None
        for chunks, last, logits in self.model_runner.run(self.pool, plan):
            for chunk in chunks:
                seq = chunk.seq
                self.stats.prompt_tokens += max(0, min(chunk.stop, len(seq.prompt)) - chunk.start)
                self.stats.prompt_tokens += 0 if seq.encoded else seq.sources
                seq.encoded, seq.read = True, chunk.stop
                seq.name_blocks(chunk.start, chunk.stop, self.limits.block)
            if logits is not None:
                self._choose(last, logits)
            for seq in dict.fromkeys(chunk.seq for chunk in chunks):
                drafted, accepted = seq.end_drafts()
                self.stats.drafted += drafted
                self.stats.accepted += accepted

    def _choose(self, last: Plan, logits: torch.Tensor) -> None:
        """Choose the next token of each sequence, and after each accepted draft token: logits [B, V]."""
        best = plain_greedy([chunk.seq for chunk in last], logits)
        rows: dict[ServedSequence, list[tuple[torch.Tensor, torch.Tensor | None]]] = {}
        for chunk, row, known in zip(last, logits[:, None], best):
            rows.setdefault(chunk.seq, []).append((row, known))
        for seq, own in rows.items():
            if seq.done:
                continue
            goes_on, wrong, before = False, None, len(seq.ids)
            try:
                goes_on = bool(seq.most) and verify(seq.sampler, seq, own, seq.proposal)
            except InputError as error:
                wrong = error
            self.stats.new_tokens += len(seq.ids) - before + (seq.stop_reason == "eos")
            if not goes_on:
                self._end(seq, None if wrong is None else "error", wrong)

    def _end(self, seq: ServedSequence, reason: str | None = None, error: Exception | None = None) -> None:
        if seq.serving.inside and reason is None:
            try:
                seq.inside = self.inside.look(seq.serving.inside, seq.tokens, seq.prompts.source)
            except Exception as wrong:
                error = wrong
        self.finished.append(seq)  # before anyone is told that it has ended
        seq.end(reason, error)
        self.stats.ended[seq.stop_reason] += 1
        if seq.placed:
            self.running.remove(seq)
            seq.placed = False
        elif seq in self.waiting:
            self.waiting.remove(seq)

    # The thread --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Take steps in a thread of its own, until `close`."""
        self._thread = threading.Thread(target=self._loop, name="clearhead-engine", daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        while True:
            with self._wake:
                while not self.busy and not self.closed:
                    self._wake.wait()
            if not self.busy:
                return
            self.step()

    def close(self, drain: float = 0.0) -> None:
        """Take no more requests; end those that are there within so many seconds, or cancel them."""
        with self._wake:
            self.closed = True
            self._wake.notify()
        until = time.monotonic() + drain
        while self.busy and time.monotonic() < until:
            time.sleep(0.01)
        for seq in [*self.running, *self.waiting]:
            seq.cancel()
        self.pooling.close()
        if self._thread is not None:
            self._thread.join(STALLED)
