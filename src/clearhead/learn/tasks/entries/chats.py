"""Tasks of conversations: what the assistant says is learned, or which of two answers is preferred.

A conversation is rendered and tokenized as a whole, so that training reads the ids that generation reads.
The template writes every special token, and the tokenizer adds none. An answer is learned up to and with the
token that ends the turn. Where the template writes no such token, the eos token is added after the last one.

Shapes: N examples, B rows, T tokens of a row.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

import numpy as np
import torch
from tokenizers import Encoding, Tokenizer, processors
from torch import Tensor
from torch.nn.functional import logsigmoid

from clearhead.errors import ConfigError, InputError, nearest, refuse
from clearhead.hub.tokens.chat import ChatTemplate, Message, Spans, Turn, answers
from clearhead.hub.tokens.training import GENERATOR
from clearhead.learn.batches.batch import IGNORE, Batch, Batches, Bucketed, cut_note
from clearhead.learn.batches.encoding import Columns, Encoder, Setting, characters, flat, groups
from clearhead.learn.batches.ragged import Ints, Stretches, lay
from clearhead.learn.batches.windows import PackedRows
from clearhead.learn.data.examples import Conversation, Corpus, Preference
from clearhead.learn.evaluation.metrics import METRICS, Judged, Metric
from clearhead.learn.losses import Answered
from clearhead.learn.recipe import GeneratePlan, Recipe, TrainPlan
from clearhead.learn.tasks.generation import chat_ids, set_template
from clearhead.learn.tasks.task import DECODER, Answers, Scored, Task, sampled
from clearhead.run.api import Model
from clearhead.run.bundle import Bundle

Learned = tuple[list[int], list[bool]]  # ids, and whether each is to be learned
SIDES = ("chosen", "rejected")
SMOOTHED = ("sigmoid", "robust", "exo_pair")  # losses of pairs that take a label smoothing
NORMED = ("ipo", "sigmoid_norm")  # losses of log-probabilities per token
TAU = 0.05  # of discopop
# Of one number for each pair.
MEAN = Metric(
    lambda values, _: np.asarray(values)[:, None],
    lambda sums: float(sums[0]),
    lambda rows, _: rows.T.mean(1),
    None,
)


class ChatEncoder:
    """Turns conversations into ids and what is to be learned of them."""

    def __init__(self, encoder: Encoder) -> None:
        if encoder.template is None:
            raise InputError("conversations need a chat template: name one with tokens.template")
        self.template: ChatTemplate = encoder.template
        # A post-processor may trim white space from the offsets that spans are found by.
        self.tokenizer = Tokenizer.from_str(encoder.tokenizer.to_str())
        self.tokenizer.post_processor = processors.Sequence([])
        added = self.tokenizer.get_added_tokens_decoder().items()
        self.special = frozenset(number for number, token in added if token.special)
        self.eos = self.tokenizer.token_to_id(self.template.tokens.get("eos_token", ""))

    def __call__(self, messages: Sequence[Message], tools: Any = None, place: str = "") -> list[Learned]:
        """Return the rows of a conversation; more than one where the template rewrites earlier turns."""
        try:
            texts = self.template.learned(messages, tools)
        except InputError as error:
            raise InputError(f"{place}: {error}" if place else str(error)) from None
        encodings = self.tokenizer.encode_batch([text for text, _ in texts], add_special_tokens=False)
        return [self._row(*pair) for pair in zip(encodings, texts)]

    def _row(self, encoding: Encoding, learned: tuple[str, Spans]) -> Learned:
        (text, spans), ids = learned, list(encoding.ids)
        turns = [self._turn(text, span, encoding) for span in spans]
        wanted = {position for turn in turns for position in turn}
        if turns and turns[-1] and ids[turns[-1][-1]] not in self.special and self.eos is not None:
            end = turns[-1][-1] + 1  # nothing ends the last turn but the end of the text
            ids, wanted = [*ids[:end], self.eos], {*wanted, end}
        return ids, [position in wanted for position in range(len(ids))]

    def _turn(self, text: str, span: Turn, encoding: Encoding) -> list[int]:
        """Return the positions of a turn's tokens, up to what ends it: the rest is never generated."""
        inside = [
            n for n, (start, end) in enumerate(encoding.offsets) if end > span.first and start < span.last
        ]
        ends = [
            n
            for n in inside
            if encoding.ids[n] in self.special and encoding.offsets[n][0] >= span.content_end
        ]
        if self.template.marks:  # the template says itself what is learned; the end of the turn goes with it
            after = inside[-1] + 1 if inside else len(encoding.ids)
            ended = after < len(encoding.ids) and encoding.ids[after] in self.special
            return [*inside, after] if ended and encoding.ids[inside[-1]] not in self.special else inside
        if ends:
            return [n for n in inside if n <= ends[0]]
        ends_at = span.first + len(text[span.first : span.last].rstrip())
        return [n for n in inside if encoding.offsets[n][0] < ends_at]


class _Learned:
    """Conversations of one column cut to a length: what the model reads, and what is learned of it."""

    def __init__(self, setting: Setting, name: str, flags: str) -> None:
        whole, learned = setting.encoded.stretches(name), np.asarray(setting.encoded[flags])
        rows = setting.cut(whole, setting.length + 1)
        self.longer = whole.lengths > setting.length + 1
        counts, ends = np.append(0, np.cumsum(learned)), rows.starts + rows.lengths
        # The first token is no target.
        self.has_answer = counts[ends] > counts[np.minimum(rows.starts + 1, ends)]
        wanted = np.where(learned, rows.values.astype(np.int64), IGNORE).astype(np.int32)
        self.inputs = rows._replace(lengths=rows.lengths - 1)
        self.targets = Stretches(wanted, rows.starts + 1, self.inputs.lengths)


def _with_answers(setting: Setting, columns: Sequence[_Learned], refusal: str) -> Ints:
    """Return the rows of which every column has something to learn."""
    kept = np.flatnonzero(np.logical_and.reduce([column.has_answer for column in columns]))
    refuse(not len(kept), f"{refusal} within {setting.length:,} tokens: raise data.max_length")
    return kept


class _Turns:
    """Conversations cut to a length, and those left of which something is to be learned."""

    def __init__(self, setting: Setting) -> None:
        whole, length = _Learned(setting, "ids", "learned"), setting.length
        refusal = f"no conversation for {setting.side} has an answer"
        self.kept = _with_answers(setting, [whole], refusal)
        self.notes = cut_note(whole.longer, "conversations", length)
        if empty := len(whole.longer) - len(self.kept):
            self.notes += (
                f"{empty:,} of {len(whole.longer):,} conversations have no answer within {length:,} tokens "
                "and are left out",
            )
        self.inputs, self.targets = whole.inputs.take(self.kept), whole.targets.take(self.kept)
        self.lengths = self.inputs.lengths


class ChatBatches(Bucketed):
    """A conversation in each row; the targets are what the assistant wrote."""

    def __init__(self, setting: Setting) -> None:
        self.turns = _Turns(setting)
        self.notes = self.turns.notes
        super().__init__(setting, self.turns.lengths)

    def _fill(self, ids: Ints, numbers: Ints) -> dict[str, Any]:
        targets = np.full_like(ids, IGNORE)
        lay(ids, 0, self.turns.inputs.take(numbers))
        lay(targets, 0, self.turns.targets.take(numbers))
        return {"targets": targets, "numbers": self.turns.kept[numbers]}


class PackedChats(PackedRows):
    """Whole conversations packed into rows of T tokens, none of which sees another."""

    def __init__(self, setting: Setting) -> None:
        turns = _Turns(setting)
        self.notes = turns.notes
        super().__init__(setting, turns.inputs, turns.targets)


class ChatTask(Task):
    """A task of conversations."""

    tokens = GENERATOR
    chats = True
    head = "lm"
    usual = DECODER
    command = "chat {folder} TEXT"

    def ready(self, loaded: Bundle, recipe: Recipe, corpus: Corpus) -> str:
        """Give the model its chat template."""
        return set_template(loaded, recipe.tokens.template)

    def answer(
        self, loaded: Model, messages: Sequence[Any], tools: Any, plan: GeneratePlan, seed: int
    ) -> str | None:
        """Return what the model answers to some messages."""
        more: dict[str, Any] = {"template": {"tools": tools}} if tools else {}
        room = loaded.max_length - len(chat_ids(loaded, messages, more.get("template", {})))
        generation = loaded.chat(
            messages, max(1, min(plan.max_new_tokens, room)), seed=seed, temperature=plan.temperature,
            top_p=plan.top_p, **more,
        )  # fmt: skip
        return generation.text


def written(message: Message) -> str:
    """Return what a message says and calls, on one line."""
    calls = [json.dumps(call.get("function") or call) for call in message.get("tool_calls") or ()]
    return " ".join(filter(None, (str(message.get("content") or ""), *calls)))


class Chat(ChatTask):
    """Learn what the assistant says."""

    name = "chat"
    row = Conversation
    reads = "vocabulary"

    def encode(self, rows: Iterable[Conversation], encoder: Encoder) -> Iterator[Columns]:
        """Encode conversations, and whether each token is learned."""
        encode = ChatEncoder(encoder)
        for group in groups(rows, characters):
            encoded = [row for chat in group for row in encode(chat.messages, chat.tools, chat.place)]
            yield {
                "ids": flat([ids for ids, _ in encoded]),
                "learned": np.array([flag for _, flags in encoded for flag in flags], dtype=np.bool_),
            }

    def batch(self, setting: Setting) -> Batches:
        """Return batches of one conversation in each row, or of several that do not see each other."""
        return PackedChats(setting) if setting.plan.packing == "isolated" else ChatBatches(setting)

    def sample(self, loaded: Model, row: Conversation, plan: GeneratePlan, seed: int) -> str:
        """Return the answer to the first question of a conversation."""
        first = answers(row.messages)[0]
        messages, wanted = row.messages[:first], written(row.messages[first])
        return sampled(" ".join(row.asked()), self.answer(loaded, messages, row.tools, plan, seed), wanted)


# Preferences ------------------------------------------------------------------------------------------------


class PreferenceBatches(Bucketed):
    """A prompt with the chosen answer, then with the rejected one, in each row.

    The two are documents of one row, which do not see each other, so that a row is a pair and its loss its
    own. `reference` [N, 2] is filled in before training.
    """

    def __init__(self, setting: Setting) -> None:
        length, sides = setting.length, [_Learned(setting, side, f"{side}_learned") for side in SIDES]
        kept = _with_answers(setting, sides, f"no pair for {setting.side} has both answers")
        self.notes = cut_note(sides[0].longer | sides[1].longer, "pairs", length)
        if lost := len(sides[0].longer) - len(kept):
            more = f"have an answer that begins after {length:,} tokens and are left out"
            self.notes += (f"{lost:,} of {len(sides[0].longer):,} pairs {more}",)
        self.inputs = [side.inputs.take(kept) for side in sides]
        self.targets = [side.targets.take(kept) for side in sides]
        self.reference = np.zeros((len(kept), 2), dtype=np.float32)
        super().__init__(setting, self.inputs[0].lengths + self.inputs[1].lengths)

    def _fill(self, ids: Ints, numbers: Ints) -> dict[str, Any]:
        targets = np.full_like(ids, IGNORE)
        begin = self.inputs[0].lengths[numbers]  # the column at which the rejected answer's text begins
        for at, inputs, wanted in zip((0 * begin, begin), self.inputs, self.targets):
            lay(ids, at, inputs.take(numbers))
            lay(targets, at, wanted.take(numbers))
        documents = (np.arange(ids.shape[1]) >= begin[:, None]).astype(np.int64)
        return {"targets": targets, "documents": documents, "reference": self.reference[numbers]}


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
            down, other = logsigmoid(-beta * chosen), logsigmoid(-beta * rejected)
            return -logsigmoid(beta * chosen) - 0.5 * down - 0.5 * other
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


class Prefer(ChatTask):
    """Prefer the chosen of two answers: direct preference optimization and its variants."""

    name = "prefer"
    row = Preference
    batches = PreferenceBatches
    reads = "answers"
    metrics = ("loss", "accuracy", "margin")
    kind = "sigmoid"  # of the loss, see `preference_losses`
    beta = 0.1

    def encode(self, rows: Iterable[Preference], encoder: Encoder) -> Iterator[Columns]:
        """Encode both conversations of each pair, and whether each token is part of the answer.

        What the prompt itself holds of answers is not learned.
        """
        encode = ChatEncoder(encoder)
        for group in groups(rows, characters):
            columns: Columns = {}
            for side in SIDES:
                encoded = []
                for row in group:
                    prompt = [{**message, "weight": 0} for message in row.prompt]
                    encoded.append(encode([*prompt, *getattr(row, side)], row.tools, row.place)[-1])
                columns[side] = flat([ids for ids, _ in encoded])
                learned = [flag for _, flags in encoded for flag in flags]
                columns[f"{side}_learned"] = np.array(learned, dtype=np.bool_)
            yield columns

    def settled(self, plan: TrainPlan, loaded: Bundle, corpus: Corpus) -> Self:
        """Choose the loss of pairs that the recipe names."""
        super().settled(plan, loaded, corpus)
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
            f"train.label_smoothing {smoothing} with robust must be below 0.5: "
            "it is the share of wrong labels",
            ConfigError,
        )
        return self.with_values(kind=kind, beta=plan.beta)

    def loss(self, outputs: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
        """Return the loss of log-probabilities [B, 2], summed over the pairs."""
        return self.row_losses(outputs, batch, smoothing).sum()

    def row_losses(self, outputs: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
        """Return the loss of each pair [B]."""
        ratios = self.ratios(outputs, batch)
        ratios = ratios / self.counts(batch) if self.kind in NORMED else ratios
        return preference_losses(self.kind, ratios[:, 0], ratios[:, 1], self.beta, smoothing)

    def answers(self, outputs: Tensor, batch: Batch) -> Answered:
        """Return the rewards of both answers, beta times their log-ratios, and their tokens: [B, 4]."""
        rewards = self.beta * self.ratios(outputs, batch)
        return torch.cat([rewards, self.counts(batch)], 1).tolist(), [[1]] * len(batch)

    def ratios(self, logprobs: Tensor, batch: Batch) -> Tensor:
        """Return log-probabilities of the answers minus those of the reference: [B, 2]."""
        return logprobs if batch.reference is None else logprobs - batch.reference

    def counts(self, batch: Batch) -> Tensor:
        """Return how many tokens each answer has: [B, 2]."""
        assert batch.documents is not None
        has_target = batch.targets != IGNORE
        second = (has_target & (batch.documents == 1)).sum(1)
        return torch.stack([has_target.sum(1) - second, second], 1)

    def score(self, predicted: Answers, expected: Answers, labels: Sequence[str]) -> dict[str, Scored]:
        """Measure how often the chosen answer has the larger reward, and the mean margin, as trl does."""
        rewards = np.array(predicted, dtype=np.float64)
        margins = rewards[:, 0] - rewards[:, 1]
        return {"accuracy": (MEAN, margins > 0, margins), "margin": (MEAN, margins, margins)}

    def judge(self, judged: Judged) -> list[str]:
        """Add how often the chosen answer is the likelier one: as a whole, and per token."""
        rewards = np.array(judged.predicted, dtype=np.float64)
        whole = (rewards[:, 0] > rewards[:, 1]).astype(int).tolist()
        per_token = (rewards[:, 0] / rewards[:, 2] > rewards[:, 1] / rewards[:, 3]).astype(int).tolist()
        judged.notes.append("no reference: accuracy is the share of pairs whose chosen answer is likelier")
        for name, right in (("accuracy", whole), ("accuracy_per_token", per_token)):
            judged.add(name, right, [1] * len(right), METRICS["accuracy"])
        return ["chosen" if right else "rejected" for right in whole]

    def sample(self, loaded: Model, row: Preference, plan: GeneratePlan, seed: int) -> str:
        """Return the answer to a prompt, and the chosen one."""
        reply = self.answer(loaded, row.prompt, row.tools, plan, seed)
        return sampled(" ".join(row.asked()), reply, written(row.chosen[-1]))
