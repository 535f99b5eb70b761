"""Answers that the model in training samples: drafted with a cache, verified by the trainer's forward pass.

A sampler with a cache computes other shapes than the trainer, and so other last bits. Here each token is
drawn by a uniform number that is fixed beforehand. Decoding with the cache drafts the answers; then the
trainer's forward pass, in the shape that the loss will have, draws every token again by the same numbers. A
token that differs replaces the draft, which goes on from there. What is left are answers drawn from the
trainer's distribution itself, with its log-probabilities, for one forward pass more.

Shapes: B answers, T tokens of a row, N sampled tokens, V vocabulary.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.core.cache import Cache
from clearhead.core.dtypes import wide
from clearhead.errors import refuse
from clearhead.hub.files import write_text
from clearhead.learn.batches.batch import IGNORE, Batch, FixedRows
from clearhead.learn.batches.ragged import Ints, blank
from clearhead.learn.data.examples import Prompt
from clearhead.learn.rewards import reward
from clearhead.learn.tasks.generation import chat_ids
from clearhead.run.api import Model
from clearhead.run.generate.decode import prefill
from clearhead.run.generate.request import Request
from clearhead.run.generate.sequence import distribution, draw
from clearhead.run.kernels.lora import LoraLinear
from clearhead.variants.contexts import evaluating

SAMPLES = "samples.jsonl"  # of a run's folder: every sampled answer with its rewards
EPS = 1e-4  # added to the deviation of a group


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
        self.stops, self.pad = frozenset(loaded.stops), loaded.special.get("pad", 0)
        prompts = [(row, chat_ids(loaded, row.prompt, {})) for row in rows]
        room = loaded.max_length - self.most
        kept = [(row, ids) for row, ids in prompts if len(ids) <= room]
        refuse(
            not kept,
            f"no prompt fits into {loaded.max_length} tokens with {self.most} new ones: lower "
            "generate.max_new_tokens",
        )
        left = len(prompts) - len(kept)
        self.notes = (f"{left:,} of {len(prompts):,} prompts are too long and are left out",) * bool(left)
        self.examples, self.prompts = [row for row, _ in kept], [ids for _, ids in kept]
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
            return self.batch(numbers, [[] for _ in numbers])
        if not self.training:
            answers: list[list[int]] = [[] for _ in numbers]
            self.draft(numbers, answers, rolls)
            batch, rewarded = self.batch(numbers, answers), self.rewarded(numbers, answers)
            return replace(batch, advantages=torch.tensor([line["reward"] for line in rewarded]))
        return self.rollout(numbers, rolls)

    @torch.no_grad()
    def rollout(self, numbers: Ints, rolls: Tensor) -> Batch:
        """Return the batch of sampled answers: their advantages, log-probabilities, and the reference's."""
        lines = self.read()
        if lines:  # a run that goes on between two updates of one batch
            answers = [line["tokens"] for line in lines]
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
        count = {"dapo": sum(map(len, answers)), "grpo": len(answers), "dr_grpo": len(answers) * self.most}
        batch.__dict__["n_targets"] = count[plan.loss]
        measured = {"reward": rewards.mean(), "reward_deviation": deviation.mean()}
        measured |= {name: np.mean([line["rewards"][name] for line in lines]) for name in lines[0]["rewards"]}
        measured |= {"length": np.mean([len(answer) for answer in answers])}
        measured |= {"ended": np.mean([answer[-1] in self.stops for answer in answers])}
        self.task.measure(**{name: float(value) for name, value in measured.items()})
        return batch

    # Sampling -----------------------------------------------------------------------------------------------

    def sample(self, numbers: Ints, rolls: Tensor) -> tuple[list[list[int]], Tensor]:
        """Return answers drawn from the trainer's own distribution, and their log-probabilities [B, T]."""
        answers: list[list[int]] = [[] for _ in numbers]
        redrawn = 0
        while True:
            self.draft(numbers, answers, rolls)
            batch = self.batch(numbers, answers)
            logprobs, drawn = self.verified(batch, rolls)
            wrong = 0
            for answer, own in zip(answers, drawn):
                first = next(
                    (place for place, pair in enumerate(zip(answer, own)) if pair[0] != pair[1]), None
                )
                if first is not None:
                    answer[first:] = own[first : first + 1]
                    wrong += 1
            if not wrong:
                self.task.measure(redrawn=float(redrawn))
                return answers, logprobs
            redrawn += wrong

    def ended(self, answer: list[int]) -> bool:
        """Return whether an answer has its last token."""
        return len(answer) == self.most or (bool(answer) and answer[-1] in self.stops)

    @torch.no_grad()
    def draft(self, numbers: Ints, answers: list[list[int]], rolls: Tensor) -> None:
        """Carry on the answers to their ends, in place, by the inference model and its cache."""
        running = [row for row, answer in enumerate(answers) if not self.ended(answer)]
        if not running:
            return
        with evaluating(self.loaded.model), self.run.precision.autocast():
            model, cache = self.loaded.engine.runner(), Cache()
            texts = [self.prompts[numbers[row]] + answers[row] for row in running]
            logits = prefill(model, texts, cache)
            while True:
                uniform = torch.stack([rolls[row, len(answers[row])] for row in running])
                chosen = draw(distribution(wide(logits), self.request), uniform)
                for row, token in zip(running, chosen.tolist()):
                    answers[row].append(token)
                kept = [place for place, row in enumerate(running) if not self.ended(answers[row])]
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
            logprobs, rows = task.logprobs(run.runner, moved, run.plan.loss_chunk)
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

    def batch(self, numbers: Ints, answers: Sequence[list[int]]) -> Batch:
        """Return prompts with their answers as rows; the targets are the answers."""
        texts = [[*self.prompts[number], *answer] for number, answer in zip(numbers, answers)]
        ids, mask = blank(np.array([max(1, len(text) - 1) for text in texts]), self.pad)
        targets = np.full_like(ids, IGNORE)
        for row, (text, answer) in enumerate(zip(texts, answers)):
            ids[row, : len(text) - 1] = text[:-1]
            targets[row, len(text) - 1 - len(answer) : len(text) - 1] = answer
        return Batch.of(ids=ids, mask=mask, targets=targets, numbers=numbers)

    # Rewards, and the file of samples -----------------------------------------------------------------------

    def rewarded(self, numbers: Ints, answers: Sequence[list[int]]) -> list[dict[str, Any]]:
        """Return a line for each answer: its prompt, text, tokens and rewards."""
        lines = []
        for number, answer in zip(numbers.tolist(), answers):
            said = answer[:-1] if answer[-1] in self.stops else answer
            text, row = self.loaded.text_tokenizer.decode(said), self.examples[number]
            each = {name: reward(name, own, text, row.columns) for name, own in self.task.rewards.items()}
            total = sum(weight * value for weight, value in zip(self.task.weights, each.values()))
            asked = " ".join(row.asked())
            lines.append(
                {"prompt": asked, "answer": text, "reward": total, "rewards": each, "tokens": answer}
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
