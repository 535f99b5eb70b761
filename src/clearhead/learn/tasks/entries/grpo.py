"""Tuning by reward: group relative policy optimization (GRPO) of the answers that the model samples itself.

Shapes: B answers, T tokens of a row, N sampled tokens, D model.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from clearhead.core.heads import LanguageHead
from clearhead.core.transformer import Transformer
from clearhead.errors import ConfigError, refuse
from clearhead.hub.tokens.tools import functions_of, tools_of
from clearhead.learn import losses
from clearhead.learn.batches.batch import IGNORE, Batch, Batches
from clearhead.learn.data.examples import Corpus, Prompt
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.recipe import BASE, GeneratePlan, GrpoPlan, Recipe, TrainPlan
from clearhead.learn.rewards import Reward, rewards_named
from clearhead.learn.tasks.entries.chats import MEAN, ChatTask
from clearhead.learn.tasks.rollouts import Rollouts
from clearhead.learn.tasks.task import Answers, Scored, Side, sampled
from clearhead.run.api import Model, load
from clearhead.run.bundle import Bundle
from clearhead.variants.contexts import evaluating


def divergence(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Estimate the divergence from a reference at each token, never below 0 (Schulman's k3)."""
    apart = reference - logprobs
    return apart.exp() - apart - 1


def policy_losses(
    logprobs: Tensor, sampled: Tensor, advantages: Tensor, reference: Tensor | None, plan: GrpoPlan
) -> Tensor:
    """Return the loss of each token [B, T] from its log-probability now, and when it was sampled."""
    ratio, better = (logprobs - sampled).exp(), advantages[:, None]
    high = plan.clip if plan.clip_high is None else plan.clip_high
    each = -torch.min(ratio * better, ratio.clamp(1 - plan.clip, 1 + high) * better)
    return each if reference is None else each + plan.kl * divergence(logprobs, reference)


class Grpo(ChatTask):
    """Raise the reward of answers: sampled in groups, each is compared with the others to its prompt."""

    name = "grpo"
    row = Prompt
    guessed = False
    sampled = True
    reads = "states"
    metrics = ("reward", "loss")
    metric = "reward"
    plan = GrpoPlan()
    generate = GeneratePlan()
    rewards: Mapping[str, Reward] = {}
    weights: Sequence[float] = ()
    tools: Mapping[str, Callable[..., Any]] = {}  # functions that answers may call
    measured: dict[str, list[float]]  # figures since they were last taken; of a copy for a run
    reference: Transformer | None = None  # the model before training; None: the frozen weights under LoRA

    def planned(self, recipe: Recipe) -> Self:
        """Take the settings of the recipe, and the rewards that it names."""
        plan, train, generate = recipe.grpo, recipe.train, recipe.generate
        refused = {
            f"generate.top_p {generate.top_p}: answers come from the whole distribution; set it to 1": (
                generate.top_p != 1
            ),
            "generate.temperature 0: answers to a prompt would all be the same; set it to 1": (
                not generate.temperature
            ),
            f"generate.num_beams {generate.num_beams}: answers are sampled; leave it out": generate.num_beams
            > 1,
            f"train.label_smoothing {train.label_smoothing}: sampled tokens are no labels; set it to 0": (
                train.label_smoothing
            ),
            "train.compile: sampling and training share the model's modules; leave it out": train.compile,
            "train.checkpointing: leave it out": train.checkpointing,
            "no [model] base: it tunes a model that answers already; set model.base=DIR": BASE
            not in recipe.model,
        }
        for line, wrong in refused.items():
            refuse(wrong, f"grpo does not work with {line}", ConfigError)
        rewards = rewards_named(plan.reward)
        count = len(plan.weights) or len(rewards)
        refuse(
            count != len(rewards),
            f"grpo.weights has {count} numbers, and the rewards are {', '.join(rewards)}: give one for each",
            ConfigError,
        )
        weights = plan.weights or (1.0,) * count
        tools = functions_of(Path(plan.tools), "grpo.tools") if plan.tools else {}
        return self.with_values(
            plan=plan, generate=generate, rewards=rewards, weights=weights, tools=tools, measured={}
        )

    def direct_batches(
        self, loaded: Any, corpus: Corpus, side: Side, plan: DataPlan, seed: int, training: bool = True
    ) -> Batches:
        """See `Task.direct_batches`."""
        refuse(
            not self.rewards,
            "rewards are measured in training: judge the model by another task, such as --set data.task=chat",
        )
        rows: Any = getattr(corpus, side)
        return Rollouts(self, loaded, rows, plan.batch_size, seed, side == "train")

    def begin(self, run: Any, recipe: Recipe) -> None:
        """Give the rollouts the model in training, and the loss the model before it."""
        refuse(run.world.size > 1, "grpo samples in one process: start it without torchrun", ConfigError)
        if run.task.plan.kl and not run.plan.lora:
            base = load(recipe.model[BASE], dtype=torch.float32).model
            run.task.reference = base.eval().requires_grad_(False).to(run.precision.device)
        for batches in (run.train, run.validation):
            batches.run, batches.task = run, run.task

    def settled(self, plan: TrainPlan, loaded: Bundle, corpus: Corpus) -> Self:
        """Return a copy for a run, which measures on its own."""
        return super().settled(plan, loaded, corpus).with_values(measured={})

    # Loss ---------------------------------------------------------------------------------------------------

    def logprobs(self, model: Any, batch: Batch, chunk: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the log-probability of each target [B, T], without dropout, and their states [N, D].

        Verification, training and the reference call this, so that the same weights give the same bits.
        """
        with evaluating(model):
            hidden = model(**losses.arguments_for(model, batch), logits="none").hidden  # B T D
        assert isinstance(model.head, LanguageHead)
        chunk = losses.default_chunk(model.config.vocab_size, hidden.device) if chunk is None else chunk
        temperature = self.generate.temperature
        positions, each = losses.token_losses(model.head, hidden, batch.targets, chunk, temperature)
        laid = each.new_zeros(batch.targets.numel()).index_put((positions,), -each)
        return laid.view(batch.targets.shape), hidden.reshape(-1, hidden.shape[-1])[positions]

    def outputs_of(self, model: Transformer, batch: Batch, chunk: int | None = None) -> Tensor:
        """Return the log-probability of each target: [B, T]."""
        return self.logprobs(model, batch, chunk)[0]

    def loss(self, outputs: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
        """Return the loss of sampled answers, of which `n_targets` is the divisor: []."""
        assert batch.sampled is not None and batch.advantages is not None
        where, plan = batch.targets != IGNORE, self.plan
        each = policy_losses(outputs, batch.sampled, batch.advantages, batch.reference, plan)
        each = each.masked_fill(~where, 0.0)
        self.note(outputs.detach()[where], batch, where)
        return (each.sum(1) / where.sum(1)).sum() if plan.loss == "grpo" else each.sum()

    def note(self, logprobs: Tensor, batch: Batch, where: Tensor) -> None:
        """Measure how far log-probabilities [N] are from those of sampling, and from the reference's."""
        assert batch.sampled is not None
        apart = logprobs - batch.sampled[where]
        high = self.plan.clip if self.plan.clip_high is None else self.plan.clip_high
        ratio = apart.exp()
        self.measure(logprob_difference=float(apart.abs().max()))
        self.measure(clipped=float(((ratio < 1 - self.plan.clip) | (ratio > 1 + high)).float().mean()))
        if batch.reference is not None:
            self.measure(kl=float(divergence(logprobs, batch.reference[where]).mean()))

    def measure(self, **figures: float) -> None:
        """Add figures of a batch to those of the step."""
        for name, value in figures.items():
            self.measured.setdefault(name, []).append(value)

    def take_figures(self) -> dict[str, float]:
        """See `Task.take_figures`: means over the batches of a step, and the largest difference."""
        figures = {
            name: max(values) if name == "logprob_difference" else sum(values) / len(values)
            for name, values in self.measured.items()
        }
        self.measured.clear()
        return figures

    # Score --------------------------------------------------------------------------------------------------

    def row_losses(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return minus the reward of each answer [B], as it is validated."""
        assert batch.advantages is not None
        return -batch.advantages

    def answers(self, outputs: Tensor, batch: Batch) -> losses.Answered:
        """Return the rewards."""
        return (-self.row_losses(outputs, batch)[:, None]).tolist(), [[1]] * len(batch)

    def score(self, predicted: Answers, expected: Answers, labels: Sequence[str]) -> dict[str, Scored]:
        """Return the mean reward."""
        rewards = [value for (value,) in predicted]
        return {"reward": (MEAN, rewards, rewards)}

    def sample(self, loaded: Model, row: Prompt, plan: GeneratePlan, seed: int) -> str:
        """Return the answer to a prompt, and the right one where the row has one."""
        tools = [tool.entry for tool in tools_of([*self.tools.values()])] or None
        reply = self.answer(loaded, row.prompt, tools, plan, seed)
        return sampled(" ".join(row.asked()), reply, row.columns.get("answer", ""))
