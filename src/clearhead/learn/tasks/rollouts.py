"""Answers that the model in training samples: drafted with a cache, verified by the trainer's forward pass.

A sampler with a cache computes other shapes than the trainer, and so other last bits. Here each token is
drawn by a uniform number that is fixed beforehand. Decoding with the cache drafts the answers; then the
trainer's forward pass, in the shape that the loss will have, draws every token again by the same numbers. A
token that differs replaces the draft, which goes on from there. What is left are answers drawn from the
trainer's distribution itself, with its log-probabilities, for one forward pass more.

Where the recipe names tools, an answer may have several turns: what the model calls is run, the results are
added to the tokens, which no loss has, and the model goes on.

Shapes: B answers, T tokens of a row, N sampled tokens, V vocabulary.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.core.cache import Cache
from clearhead.core.dtypes import wide
from clearhead.errors import refuse
from clearhead.hub.files import write_text
from clearhead.hub.tokens.answers import ReadAnswer
from clearhead.hub.tokens.text import clean
from clearhead.hub.tokens.tools import call_function, tools_of
from clearhead.learn.batches.batch import IGNORE, Batch, FixedRows
from clearhead.learn.batches.ragged import Ints, blank
from clearhead.learn.data.examples import Prompt
from clearhead.learn.rewards import reward
from clearhead.learn.tasks.generation import ChatTurn, ToolChoice, chat_template, turn_end, turn_of
from clearhead.run.api import Model
from clearhead.run.generate.decode import prefill
from clearhead.run.generate.request import Request
from clearhead.run.generate.sequence import distribution, draw
from clearhead.run.kernels.lora import LoraLinear
from clearhead.variants.contexts import evaluating

SAMPLES = "samples.jsonl"  # of a run's folder: every sampled answer with its rewards
EPS = 1e-4  # added to the deviation of a group


@dataclass
class Answer:
    """Tokens of an answer: those that were sampled and, between turns, those that tools have added."""

    tokens: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)  # of each token
    turns: list[dict[str, Any]] = field(default_factory=list)  # messages: calls and their results
    starts: list[int] = field(default_factory=list)  # where each turn of the model but the first begins

    @property
    def count(self) -> int:
        """The number of sampled tokens."""
        return sum(self.sampled)

    def add(self, tokens: Sequence[int], sampled: bool) -> None:
        """Add tokens."""
        self.tokens += tokens
        self.sampled += [sampled] * len(tokens)

    def replace(self, number: int, token: int) -> None:
        """Put another token in place of a sampled one; forget what follows."""
        place = [place for place, sampled in enumerate(self.sampled) if sampled][number]
        self.tokens[place:], self.sampled[place:] = [token], [True]
        kept = sum(start <= place for start in self.starts)
        results = [n for n, turn in enumerate(self.turns) if turn["role"] == "assistant"][kept:]
        self.starts = self.starts[:kept]
        self.turns = self.turns[: results[0]] if results else self.turns


class ToolUse:
    """Runs what answers call, and writes the results as the chat template has them."""

    def __init__(self, m: Model, functions: Mapping[str, Callable[..., Any]], turns: int) -> None:
        self.m, self.functions, self.most = m, functions, turns
        self.tools = tools_of([*functions.values()])
        end = turn_end(m)
        refuse(
            end is None,
            "grpo.tools needs a chat template that ends turns with a token of its own: set tokens.template",
        )
        assert end is not None
        self.end, self.ends = end, str(m.text_tokenizer.id_to_token(end))

    def begin(self, messages: Sequence[Any]) -> ChatTurn:
        """Return the first turn of an answer."""
        return turn_of(self.m, messages, {}, {}, ToolChoice(self.tools))

    def follow(self, messages: Sequence[Any], turn: ChatTurn, answer: Answer, room: int) -> None:
        """Add the results of what the last turn of an answer calls, where there are turns left and room."""
        if answer.tokens[-1] != self.end or len(answer.starts) + 1 >= self.most:
            return
        reply = self.read(turn, answer)
        if not reply.calls:
            return
        results = [
            {
                "role": "tool",
                "tool_call_id": call.id,
                "name": call.name,
                "content": self.call(call.name, call.arguments),
            }
            for call in reply.calls
        ]
        added = self.after([*messages, *answer.turns, reply.message], results)
        if len(answer.tokens) + len(added) < room:
            answer.turns += [reply.message, *results]
            answer.add(added, False)
            answer.starts.append(len(answer.tokens))

    def read(self, turn: ChatTurn, answer: Answer) -> ReadAnswer:
        """Return the last turn of an answer, divided into what it says and calls."""
        tokens = answer.tokens[answer.starts[-1] if answer.starts else 0 :]
        tokens = tokens[:-1] if tokens and tokens[-1] == self.end else tokens
        parser = turn.parser()
        assert parser is not None
        keep = turn.options.get("skip_special_tokens", True)
        parts = [
            *parser.push(self.m.text_tokenizer.decode(tokens, skip_special_tokens=keep)),
            *parser.finish(),
        ]
        return ReadAnswer.of(parts, lambda call: f"{len(answer.turns) + call:09d}")

    def call(self, name: str, arguments: str) -> str:
        """Run a call; return its result, or what went wrong, for the model."""
        if name not in self.functions:
            return f"error: there is no {name}: call {', '.join(self.functions)}"
        return call_function(self.functions[name], arguments)

    def after(self, messages: Sequence[Any], results: Sequence[Any]) -> list[int]:
        """Return the tokens between the end of a turn and the beginning of the next, with results between."""
        template, tools = chat_template(self.m), [tool.entry for tool in self.tools]
        before = clean(template.render(messages, False, tools=tools))
        whole = clean(template.render([*messages, *results], True, tools=tools))
        refuse(
            not whole.startswith(before),
            "grpo.tools: the chat template rewrites a turn once others follow it: set tokens.template",
        )
        tail = before.rpartition(self.ends)[2] + whole[len(before) :]
        return list(self.m.text_tokenizer.encode(tail, add_special_tokens=False).ids)


class Rollouts(FixedRows):
    """Prompts, and answers sampled to them when a batch is asked for: a batch follows from the weights."""

    def __init__(
        self, task: Any, loaded: Model, rows: Sequence[Prompt], size: int, seed: int, training: bool
    ) -> None:
        refuse(
            loaded.image_encoder is not None,
            "answers are sampled to prompts of text alone: this model reads images too; set model.base to "
            "the folder text in its own",
        )
        self.task, self.loaded, plan = task, loaded, task.plan
        self.most, self.group = task.generate.max_new_tokens, plan.group if training else 1
        self.request = Request(temperature=task.generate.temperature, max_new_tokens=self.most)
        self.tools: ToolUse | None = ToolUse(loaded, task.tools, plan.turns) if task.tools else None
        ends = () if self.tools is None else (self.tools.end,)
        self.stops, self.pad = frozenset((*loaded.stops, *ends)), loaded.special.get("pad", 0)
        begin = self.tools.begin if self.tools else lambda prompt: turn_of(loaded, prompt, {}, {})
        prompts = [(row, begin(row.prompt)) for row in rows]
        room = loaded.max_length - self.most
        kept = [(row, turn) for row, turn in prompts if len(turn.ids) <= room]
        refuse(
            not kept,
            f"no prompt fits into {loaded.max_length} tokens with {self.most} new ones: lower "
            "generate.max_new_tokens",
        )
        left = len(prompts) - len(kept)
        self.notes = (f"{left:,} of {len(prompts):,} prompts are too long and are left out",) * bool(left)
        self.examples, self.first = [row for row, _ in kept], [turn for _, turn in kept]
        self.prompts = [turn.ids for turn in self.first]
        self.uses = plan.updates if training else 1
        self.run: Any = None  # of training, see `Task.begin`
        self.recent: dict[int, Batch] = {}  # by round
        self.round = 0
        self.stored: dict[int, list[dict[str, Any]]] | None = None  # of a run that goes on, by round
        super().__init__(len(kept), size, seed, training)

    def at(self, index: int) -> Batch:
        """See `Batches.at`; a batch is sampled once for all of its `updates`."""
        if self.run is None or not self.training:
            return super().at(index)
        size = self.run.plan.accumulate
        step, part = divmod(index, size)
        self.round = step // self.uses * size + part
        if self.round not in self.recent:
            self.recent = {number: kept for number, kept in self.recent.items() if number > self.round - size}
            self.recent[self.round] = super().at(self.round)
        return self.recent[self.round]

    def _build(self, positions: Ints, random: np.random.Generator) -> Batch:
        numbers = np.repeat(positions, self.group)
        rolls = torch.from_numpy(random.random((len(numbers), self.most)))
        if self.run is None:  # before training: the prompts alone, for their sizes
            return self.batch(numbers, [Answer() for _ in numbers])
        if not self.training:
            answers = [Answer() for _ in numbers]
            self.draft(numbers, answers, rolls)
            batch, rewarded = self.batch(numbers, answers), self.rewarded(numbers, answers)
            return replace(batch, advantages=torch.tensor([line["reward"] for line in rewarded]))
        return self.rollout(numbers, rolls)

    @torch.no_grad()
    def rollout(self, numbers: Ints, rolls: Tensor) -> Batch:
        """Return the batch of sampled answers: their advantages, log-probabilities, and the reference's."""
        lines = self.read()
        if lines:  # a run that goes on between two updates of one batch
            flags = (line.get("sampled", [True] * len(line["tokens"])) for line in lines)
            answers = [Answer(line["tokens"], own) for line, own in zip(lines, flags)]
            batch = self.batch(numbers, answers)
            where = batch.targets != IGNORE
            values = [value for line in lines for value in line["logprobs"]]
            sampled = torch.zeros(where.shape).masked_scatter(where, torch.tensor(values))
        else:
            answers, sampled = self.sample(numbers, rolls)
            batch = self.batch(numbers, answers)
            lines = self.rewarded(numbers, answers)
            self.write(lines, sampled, batch)
        plan = self.task.plan
        rewards = np.array([line["reward"] for line in lines]).reshape(-1, self.group)
        better, deviation = rewards - rewards.mean(1, keepdims=True), rewards.std(1, ddof=1, keepdims=True)
        advantages = better / (deviation + EPS) if plan.scale_rewards else better
        reference = self.reference(batch) if plan.kl else None
        of_answers = torch.tensor(advantages.reshape(-1), dtype=torch.float32)
        batch = replace(batch, sampled=sampled, advantages=of_answers, reference=reference)
        count = {
            "dapo": sum(answer.count for answer in answers),
            "grpo": len(answers),
            "dr_grpo": len(answers) * self.most,
        }
        batch.__dict__["n_targets"] = count[plan.loss]
        measured = {"reward": rewards.mean(), "reward_deviation": deviation.mean()}
        measured |= {name: np.mean([line["rewards"][name] for line in lines]) for name in lines[0]["rewards"]}
        measured |= {"length": np.mean([answer.count for answer in answers])}
        measured |= {"ended": np.mean([answer.tokens[-1] in self.stops for answer in answers])}
        if self.tools:
            measured |= {
                "calls": np.mean([sum(turn["role"] == "tool" for turn in line["turns"]) for line in lines])
            }
        self.task.measure(**{name: float(value) for name, value in measured.items()})
        return batch

    # Sampling -----------------------------------------------------------------------------------------------

    def sample(self, numbers: Ints, rolls: Tensor) -> tuple[list[Answer], Tensor]:
        """Return answers drawn from the trainer's own distribution, and their log-probabilities [B, T]."""
        answers = [Answer() for _ in numbers]
        redrawn = 0
        while True:
            self.draft(numbers, answers, rolls)
            batch = self.batch(numbers, answers)
            logprobs, drawn = self.verified(batch, rolls)
            wrong = 0
            for number, answer, own in zip(numbers, answers, drawn):
                chosen = [token for token, sampled in zip(answer.tokens, answer.sampled) if sampled]
                first = next(
                    (place for place, pair in enumerate(zip(chosen, own)) if pair[0] != pair[1]), None
                )
                if first is not None:
                    answer.replace(first, own[first])
                    self.follow(number, answer)
                    wrong += 1
            if not wrong:
                self.task.measure(redrawn=float(redrawn))
                return answers, logprobs
            redrawn += wrong

    def ended(self, number: int, answer: Answer) -> bool:
        """Return whether an answer has its last token."""
        stopped = bool(answer.tokens) and answer.sampled[-1] and answer.tokens[-1] in self.stops
        return stopped or answer.count == self.most or len(answer.tokens) >= self.room(number)

    def room(self, number: int) -> int:
        """Return how many tokens an answer to a prompt may have, with those of tools."""
        return self.loaded.max_length - len(self.prompts[number])

    def follow(self, number: int, answer: Answer) -> None:
        """Add the results of what an answer calls, where a turn of it has ended."""
        if self.tools is not None and answer.count < self.most:
            self.tools.follow(self.examples[number].prompt, self.first[number], answer, self.room(number))

    @torch.no_grad()
    def draft(self, numbers: Ints, answers: list[Answer], rolls: Tensor) -> None:
        """Carry on the answers to their ends, in place, by the inference model and its cache."""
        with evaluating(self.loaded.model), self.run.precision.autocast():
            while running := [row for row, n in enumerate(numbers) if not self.ended(n, answers[row])]:
                self.turn(numbers, answers, rolls, running)

    def turn(self, numbers: Ints, answers: list[Answer], rolls: Tensor, running: list[int]) -> None:
        """Carry on some of the answers to the ends of their turns, in place."""
        model, cache = self.loaded.engine.runner(), Cache()
        logits = prefill(model, [self.prompts[numbers[row]] + answers[row].tokens for row in running], cache)
        while True:
            uniform = torch.stack([rolls[row, answers[row].count] for row in running])
            chosen = draw(distribution(wide(logits), self.request), uniform)
            for row, token in zip(running, chosen.tolist()):
                answers[row].add([token], True)
                self.follow(numbers[row], answers[row])
            kept = [
                place
                for place, row in enumerate(running)
                if answers[row].sampled[-1] and not self.ended(numbers[row], answers[row])
            ]
            if not kept:
                return
            if len(kept) < len(running):
                index = torch.tensor(kept, device=chosen.device)
                cache.reorder(index)
                running, chosen = [running[place] for place in kept], chosen[index]
            logits = model(chosen[:, None], cache=cache, logits="last").logits[:, -1]

    def verified(self, batch: Batch, rolls: Tensor) -> tuple[Tensor, list[list[int]]]:
        """Return the trainer's log-probabilities of a batch [B, T], and the tokens that it draws itself."""
        run, task, where = self.run, self.task, batch.targets != IGNORE
        counts = where.sum(1).tolist()
        uniform = torch.cat([roll[:count] for roll, count in zip(rolls, counts)])
        moved = batch.to(run.precision.device)
        with run.precision.autocast(), run.attention():
            with torch.enable_grad():  # kernels of a GPU differ where no gradient is to come
                logprobs, rows = (x.detach() for x in task.logprobs(run.runner, moved, run.plan.loss_chunk))
            head, chunk = run.model.head, run.plan.loss_chunk or len(rows)
            drawn = [
                draw(distribution(wide(head(some, None)), self.request), rolled)
                for some, rolled in zip(torch.split(rows, chunk), torch.split(uniform, chunk))
            ]
        return logprobs.cpu(), [part.tolist() for part in torch.split(torch.cat(drawn).cpu(), counts)]

    @torch.no_grad()
    def reference(self, batch: Batch) -> Tensor:
        """Return the log-probabilities of a batch [B, T] under the model before training."""
        run, model = self.run, self.task.reference
        updates = (
            [part for part in run.model.modules() if isinstance(part, LoraLinear)] if model is None else []
        )
        scales = [part.scale for part in updates]
        for part in updates:  # the frozen weights alone are the model before training
            part.scale = 0.0
        try:
            with run.precision.autocast(), run.attention():
                moved = batch.to(run.precision.device)
                logprobs: Tensor = self.task.logprobs(model or run.runner, moved, run.plan.loss_chunk)[0]
                return logprobs.cpu()
        finally:
            for part, scale in zip(updates, scales):
                part.scale = scale

    def batch(self, numbers: Ints, answers: Sequence[Answer]) -> Batch:
        """Return prompts with their answers as rows; the targets are the sampled tokens."""
        texts = [[*self.prompts[number], *answer.tokens] for number, answer in zip(numbers, answers)]
        ids, mask = blank(np.array([max(1, len(text) - 1) for text in texts]), self.pad)
        targets = np.full_like(ids, IGNORE)
        for row, (text, answer) in enumerate(zip(texts, answers)):
            ids[row, : len(text) - 1] = text[:-1]
            own = np.where(np.array(answer.sampled, dtype=bool), answer.tokens, IGNORE)
            targets[row, len(text) - 1 - len(own) : len(text) - 1] = own
        return Batch.of(ids=ids, mask=mask, targets=targets, numbers=numbers)

    # Rewards, and the file of samples -----------------------------------------------------------------------

    def rewarded(self, numbers: Ints, answers: Sequence[Answer]) -> list[dict[str, Any]]:
        """Return a line for each answer: its prompt, text, tokens and rewards.

        With tools the text is that of its last turn; rewards find the turns before it in the column `turns`.
        """
        lines = []
        for number, answer in zip(numbers.tolist(), answers):
            row, more = self.examples[number], {}
            if self.tools is None:
                tokens = answer.tokens[:-1] if answer.tokens[-1] in self.stops else answer.tokens
                text = self.loaded.text_tokenizer.decode(tokens)
            else:
                text = self.tools.read(self.first[number], answer).content
                more = {"turns": answer.turns, "sampled": answer.sampled}
            columns = {**row.columns, "turns": answer.turns} if self.tools else row.columns
            each = {name: reward(name, own, text, columns) for name, own in self.task.rewards.items()}
            total = sum(weight * value for weight, value in zip(self.task.weights, each.values()))
            prompt = " ".join(row.asked())
            lines.append(
                {
                    "prompt": prompt,
                    "answer": text,
                    "reward": total,
                    "rewards": each,
                    "tokens": answer.tokens,
                    **more,
                }
            )
        return lines

    def write(self, lines: list[dict[str, Any]], sampled: Tensor, batch: Batch) -> None:
        """Add the answers of a round to the file of samples."""
        of_rows = [row[where].tolist() for row, where in zip(sampled, batch.targets != IGNORE)]
        with (self.run.folder / SAMPLES).open("a", encoding="utf-8") as file:
            for line, values in zip(lines, of_rows):
                step = self.run.state.step + 1
                file.write(json.dumps({"step": step, "round": self.round, **line, "logprobs": values}) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """Return the answers of this round that the run has sampled before; those of later steps are removed.

        Only a run that goes on has any, and it needs them where the weights have moved since.
        """
        if self.stored is None:
            self.stored, path, done = {}, self.run.folder / SAMPLES, self.run.state.step
            lines = path.read_text(encoding="utf-8").splitlines() if done and path.is_file() else []
            kept = [line for line in map(json.loads, lines) if line["step"] <= done]
            if lines:
                write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
            for line in kept:
                self.stored.setdefault(line["round"], []).append(line)
        return self.stored.get(self.round, [])
