"""Tasks of conversations: what the assistant says is learned, or which of two answers is preferred."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from clearhead.errors import ConfigError, nearest, refuse
from clearhead.hub.tokens.chat import answers
from clearhead.hub.tokens.training import GENERATOR
from clearhead.learn.batches import chats, preferences
from clearhead.learn.batches.batch import IGNORE, Batch
from clearhead.learn.batches.batching import Batching
from clearhead.learn.data.chats import CHATS, PREFERENCES, Conversation, Preference
from clearhead.learn.evaluation.judgement import Judgement
from clearhead.learn.evaluation.metrics import METRICS
from clearhead.learn.losses import Answered, Objective
from clearhead.learn.recipe import GeneratePlan, TrainPlan
from clearhead.learn.tasks.chat import chat_ids, set_template
from clearhead.learn.tasks.spec import DECODER, Answers, TaskSpec, sampled
from clearhead.run.api import Model
from clearhead.run.bundle import Bundle

SMOOTHED = ("sigmoid", "robust", "exo_pair")  # losses that take a label smoothing
NORMED = ("ipo", "sigmoid_norm")  # losses of log-probabilities per token
TAU = 0.05  # of discopop


def _answered(loaded: Model, row: Conversation, plan: GeneratePlan, seed: int) -> str:
    first = answers(row.messages)[0]
    asked, wanted = row.messages[:first], row.messages[first]["content"]
    return sampled(" ".join(row.asked()), _said(loaded, asked, row.tools, plan, seed), wanted)


def _preferred(loaded: Model, row: Preference, plan: GeneratePlan, seed: int) -> str:
    wanted = row.chosen[-1]["content"]
    return sampled(" ".join(row.asked()), _said(loaded, row.prompt, row.tools, plan, seed), wanted)


def _said(loaded: Model, asked: Sequence[Any], tools: Any, plan: GeneratePlan, seed: int) -> str | None:
    more: dict[str, Any] = {"template": {"tools": tools}} if tools else {}
    room = loaded.max_length - len(chat_ids(loaded, asked, more.get("template", {})))
    made = loaded.chat(
        asked, max(1, min(plan.max_new_tokens, room)), seed=seed, temperature=plan.temperature,
        top_p=plan.top_p, **more,
    )  # fmt: skip
    return made.text


# Preferences ------------------------------------------------------------------------------------------------


def preference_losses(
    kind: str, chosen: Tensor, rejected: Tensor, beta: float = 0.1, smoothing: float = 0.0
) -> Tensor:
    """Return the loss of each pair [B], from the log-ratios of its answers [B] to those of the reference.

    `smoothing` is the share of labels held to be wrong: conservative DPO for sigmoid.
    """
    margin = beta * (chosen - rejected)
    won, lost = logsigmoid(margin), logsigmoid(-margin)
    match kind:
        case "sigmoid" | "sigmoid_norm":
            return -(1 - smoothing) * won - smoothing * lost
        case "hinge":
            return torch.relu(1 - margin)
        case "ipo":
            return (chosen - rejected - 1 / (2 * beta)) ** 2
        case "robust":
            return (-(1 - smoothing) * won + smoothing * lost) / (1 - 2 * smoothing)
        case "exo_pair":
            wrong = torch.as_tensor(smoothing or 1e-3, dtype=margin.dtype)
            return won.exp() * (won - torch.log1p(-wrong)) + lost.exp() * (lost - wrong.log())
        case "nca_pair":
            up, down, other = (
                logsigmoid(beta * chosen),
                logsigmoid(-beta * chosen),
                logsigmoid(-beta * rejected),
            )
            return -up - 0.5 * down - 0.5 * other
        case "bco_pair":
            return -logsigmoid(beta * chosen) - logsigmoid(-beta * rejected)
        case "sppo_hard":
            return (chosen - 0.5 / beta) ** 2 + (rejected + 0.5 / beta) ** 2
        case "apo_zero":
            return 1 - torch.sigmoid(beta * chosen) + torch.sigmoid(beta * rejected)
        case "apo_down":
            return torch.sigmoid(beta * chosen) + 1 - torch.sigmoid(margin)
        case "discopop":
            share = torch.sigmoid(margin / TAU)
            return -won * (1 - share) + torch.exp(-margin) * share
    raise ValueError(kind)


PREFERENCE = (
    *("sigmoid", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard"),
    *("apo_zero", "apo_down", "discopop", "sigmoid_norm"),
)


def _ratios(logprobs: Tensor, batch: Batch) -> Tensor:
    """Return log-probabilities of the answers minus those of the reference: [B, 2]."""
    return logprobs if batch.reference is None else logprobs - batch.reference


def _counts(batch: Batch) -> Tensor:
    """Return how many tokens each answer has: [B, 2]."""
    assert batch.documents is not None
    asked = batch.targets != IGNORE
    second = (asked & (batch.documents == 1)).sum(1)
    return torch.stack([asked.sum(1) - second, second], 1)


def pair_objective(kind: str = "sigmoid", beta: float = 0.1) -> Objective:
    """Return the objective of a loss of pairs."""

    def rows(logprobs: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
        ratios = _ratios(logprobs, batch)
        ratios = ratios / _counts(batch) if kind in NORMED else ratios
        return preference_losses(kind, ratios[:, 0], ratios[:, 1], beta, smoothing)

    def answers(logprobs: Tensor, batch: Batch) -> Answered:
        """Return the rewards of both answers, beta times their log-ratios, and their tokens: [B, 4]."""
        rewards = beta * _ratios(logprobs, batch)
        return torch.cat([rewards, _counts(batch)], 1).tolist(), [[1]] * len(batch)

    return Objective(lambda *given: rows(*given).sum(), answers, "answers", rows)


def _pair_objective(plan: TrainPlan, loaded: Bundle) -> Objective:
    kind, smoothing = plan.preference, plan.label_smoothing
    refuse(
        kind not in PREFERENCE,
        f'train.preference "{kind}" is no loss of pairs{nearest(kind, PREFERENCE)}: '
        f"choose from {', '.join(PREFERENCE)}",
        ConfigError,
    )
    refuse(
        smoothing and kind not in SMOOTHED,
        f"train.label_smoothing {smoothing} is not taken by {kind}: set it to 0, or choose from "
        f"{', '.join(SMOOTHED)}",
        ConfigError,
    )
    refuse(
        kind == "robust" and smoothing >= 0.5,
        f"train.label_smoothing {smoothing} with robust must be below 0.5: it is the share of wrong labels",
        ConfigError,
    )
    return pair_objective(kind, plan.beta)


def _pair_scores(predicted: Answers, wanted: Answers, labels: Sequence[str]) -> dict[str, float]:
    """Return how often the chosen answer has the larger reward, and by how much: trl's rewards/margins."""
    found = np.array(predicted, dtype=np.float64)
    margins = found[:, 0] - found[:, 1]
    return {"accuracy": float((margins > 0).mean()), "margin": float(margins.mean())}


def _pair_figures(judgement: Judgement) -> list[str]:
    """Add how often the chosen answer is the likelier one: as a whole, and per token."""
    found = np.array(judgement.said, dtype=np.float64)
    whole = (found[:, 0] > found[:, 1]).astype(int).tolist()
    each = (found[:, 0] / found[:, 2] > found[:, 1] / found[:, 3]).astype(int).tolist()
    judgement.figures.notes.append(
        "no reference: accuracy is the share of pairs whose chosen answer is likelier"
    )
    for name, said in (("accuracy", whole), ("accuracy_per_token", each)):
        judgement.figures.add(name, said, [1] * len(said), METRICS["accuracy"])
    return ["chosen" if one else "rejected" for one in whole]


TASKS = (
    TaskSpec(
        name="chat",
        batching=Batching("chat", CHATS, chats.encode_chats, chats.chat_batches),
        tokens=GENERATOR,
        head="lm",
        usual=DECODER,
        chats=True,
        ready=lambda loaded, recipe: set_template(loaded, recipe.tokens.template),
        command="chat {folder} TEXT",
        sample=_answered,
        figures=lambda judgement: [],  # the loss of the answers says it all
    ),
    TaskSpec(
        name="prefer",
        batching=Batching(
            "prefer", PREFERENCES, preferences.encode_preferences, preferences.PreferenceBatches
        ),
        tokens=GENERATOR,
        head="lm",
        usual=DECODER,
        chats=True,
        ready=lambda loaded, recipe: set_template(loaded, recipe.tokens.template),
        objective=pair_objective(),
        objective_for=_pair_objective,
        metrics=("loss", "accuracy", "margin"),
        scores=_pair_scores,
        command="chat {folder} TEXT",
        sample=_preferred,
        figures=_pair_figures,
    ),
)
