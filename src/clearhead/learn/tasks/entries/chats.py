"""Tasks of conversations: what the assistant says is learned, or which of two answers is preferred.

A conversation is rendered and tokenized as a whole, so that training reads the ids that generation reads.
The template writes every special token, and the tokenizer adds none. An answer is learned up to and with the
token that ends the turn. Where the template writes no such token, the eos token is added after the last one.

Shapes: N examples, B rows, T tokens of a row.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer, processors
from torch import Tensor
from torch.nn.functional import logsigmoid

from clearhead.errors import ConfigError, InputError, nearest, refuse
from clearhead.hub.tokens.chat import ChatTemplate, Message, Spans, Turn, answers
from clearhead.hub.tokens.training import GENERATOR
from clearhead.learn.batches.batch import IGNORE, Batch, Batches
from clearhead.learn.batches.buckets import Bucketed, cut_note
from clearhead.learn.batches.encoding import Columns, Encoder, Setting, characters, flat, groups
from clearhead.learn.batches.ragged import Ints, Stretches, blank, lay, pack, ragged, tensor
from clearhead.learn.batches.windows import FixedRows
from clearhead.learn.data.chats import CHATS, PREFERENCES, Conversation, Preference
from clearhead.learn.data.examples import Corpus
from clearhead.learn.evaluation.metrics import METRICS, Judged, Metric
from clearhead.learn.losses import Answered
from clearhead.learn.recipe import GeneratePlan, Recipe, TrainPlan
from clearhead.learn.tasks.chat import chat_ids, set_template
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
        """Return the rows of a conversation; more than one where the template writes earlier turns anew."""
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
        ends = [n for n in inside if encoding.ids[n] in self.special and encoding.offsets[n][0] >= span.said]
        if self.template.marks:  # the template says itself what is learned; the end of the turn goes with it
            after = inside[-1] + 1 if inside else len(encoding.ids)
            ended = after < len(encoding.ids) and encoding.ids[after] in self.special
            return [*inside, after] if ended and encoding.ids[inside[-1]] not in self.special else inside
        if ends:
            return [n for n in inside if n <= ends[0]]
        said = span.first + len(text[span.first : span.last].rstrip())
        return [n for n in inside if encoding.offsets[n][0] < said]


def targets_of(ids: NDArray[Any], learned: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Return ids as targets, IGNORE where they are not learned."""
    return np.where(learned, ids.astype(np.int64), IGNORE).astype(np.int32)


class _Turns:
    """Conversations cut to a length, and those left of which something is to be learned."""

    def __init__(self, setting: Setting) -> None:
        encoded, length = setting.encoded, setting.length
        whole = encoded.stretches("ids")
        rows, learned = setting.cut(whole, length + 1), np.asarray(encoded["learned"])
        counts = np.append(0, np.cumsum(learned))
        ends = rows.starts + rows.lengths
        asked = counts[ends] - counts[np.minimum(rows.starts + 1, ends)]  # the first token is no target
        self.kept = np.flatnonzero(asked > 0)
        empty = len(asked) - len(self.kept)
        refuse(
            not len(self.kept),
            f"no conversation for {setting.side} has an answer within {length:,} tokens: "
            "raise data.max_length",
        )
        self.notes = cut_note(whole.lengths > length + 1, "conversations", length)
        if empty:
            self.notes += (
                f"{empty:,} of {len(asked):,} conversations have no answer within {length:,} tokens "
                "and are left out",
            )
        rows = rows.take(self.kept)
        self.lengths = rows.lengths - 1
        self.inputs = Stretches(rows.values, rows.starts, self.lengths)
        self.targets = Stretches(targets_of(rows.values, learned), rows.starts + 1, self.lengths)


class ChatBatches(Bucketed):
    """A conversation in each row; the targets are what the assistant wrote."""

    def __init__(self, setting: Setting) -> None:
        self.turns = _Turns(setting)
        self.notes = self.turns.notes
        super().__init__(setting, self.turns.lengths)

    def _build(self, numbers: Ints) -> Batch:
        ids, mask = blank(self.sizes[0][numbers], self.setting.pad)
        targets = np.full_like(ids, IGNORE)
        lay(ids, 0, self.turns.inputs.take(numbers))
        lay(targets, 0, self.turns.targets.take(numbers))
        return Batch(tensor(ids), tensor(targets), mask, numbers=tensor(self.turns.kept[numbers]))


class PackedChats(FixedRows):
    """Whole conversations packed into rows of T tokens, none of which sees another."""

    def __init__(self, setting: Setting) -> None:
        self.turns, self.pad, self.width = _Turns(setting), setting.pad, setting.length
        self.notes = self.turns.notes
        row_of, n_rows = pack(self.turns.lengths, self.width)
        self.members = np.argsort(row_of, kind="stable")  # conversations, row after row
        self.row_starts = np.append(0, np.cumsum(np.bincount(row_of, minlength=n_rows)))
        super().__init__(n_rows, setting.rows(self.width), setting.seed, setting.training)
        self.waste = 1 - float(self.turns.lengths.sum()) / (n_rows * self.width)

    def _build(self, starts: Ints, random: np.random.Generator) -> Batch:
        counts = np.diff(self.row_starts)[starts]
        row, number = ragged(counts)
        member = self.members[self.row_starts[starts][row] + number]
        lengths = self.turns.lengths[member]
        before = np.cumsum(lengths) - lengths
        at = before - before[np.cumsum(counts) - counts][row]  # the column at which each begins
        ids = np.full((len(starts), self.width), self.pad, dtype=np.int64)
        targets, documents = np.full_like(ids, IGNORE), np.repeat(counts[:, None] - 1, self.width, axis=1)
        lay(ids, at, self.turns.inputs.take(member), row)
        lay(targets, at, self.turns.targets.take(member), row)
        of_tokens = Stretches(np.repeat(number, lengths), before, lengths)
        lay(documents, at, of_tokens, row)
        real = np.arange(self.width) < np.bincount(row, weights=lengths, minlength=len(starts))[:, None]
        return Batch(
            tensor(ids), tensor(targets), tensor(real), documents=tensor(documents), numbers=tensor(starts)
        )


class ChatTask(Task):
    """A task of conversations."""

    tokens = GENERATOR
    chats = True
    head = "lm"
    usual = DECODER
    command = "chat {folder} TEXT"

    def ready(self, loaded: Bundle, recipe: Recipe) -> str:
        """Give the model its chat template."""
        return set_template(loaded, recipe.tokens.template)

    def answer(
        self, loaded: Model, asked: Sequence[Any], tools: Any, plan: GeneratePlan, seed: int
    ) -> str | None:
        """Return what the model answers to some messages."""
        more: dict[str, Any] = {"template": {"tools": tools}} if tools else {}
        room = loaded.max_length - len(chat_ids(loaded, asked, more.get("template", {})))
        made = loaded.chat(
            asked, max(1, min(plan.max_new_tokens, room)), seed=seed, temperature=plan.temperature,
            top_p=plan.top_p, **more,
        )  # fmt: skip
        return made.text


class Chat(ChatTask):
    """Learn what the assistant says."""

    name = "chat"
    shape = CHATS
    reads = "vocabulary"

    def encode(self, rows: Iterable[Conversation], encoder: Encoder) -> Iterator[Columns]:
        """Encode conversations, and whether each token is learned."""
        encode = ChatEncoder(encoder)
        for group in groups(rows, characters):
            found = [row for chat in group for row in encode(chat.messages, chat.tools, chat.place)]
            yield {
                "ids": flat([ids for ids, _ in found]),
                "learned": np.array([flag for _, flags in found for flag in flags], dtype=np.bool_),
            }

    def batch(self, setting: Setting) -> Batches:
        """Return batches of one conversation in each row, or of several that do not see each other."""
        return PackedChats(setting) if setting.plan.packing == "isolated" else ChatBatches(setting)

    def sample(self, loaded: Model, row: Conversation, plan: GeneratePlan, seed: int) -> str:
        """Return the answer to the first question of a conversation."""
        first = answers(row.messages)[0]
        asked, wanted = row.messages[:first], row.messages[first]["content"]
        return sampled(" ".join(row.asked()), self.answer(loaded, asked, row.tools, plan, seed), wanted)


# Preferences ------------------------------------------------------------------------------------------------


class PreferenceBatches(Bucketed):
    """A prompt with the chosen answer, then with the rejected one, in each row.

    The two are documents of one row, which do not see each other, so that a row is a pair and its loss its
    own. `reference` [N, 2] is filled in before training.
    """

    def __init__(self, setting: Setting) -> None:
        length, encoded = setting.length, setting.encoded
        whole = [encoded.stretches(side) for side in SIDES]
        cut = [setting.cut(side, length + 1) for side in whole]
        lost = np.zeros(len(cut[0].starts), dtype=np.bool_)
        targets = []
        for name, rows in zip(SIDES, cut):
            learned = np.asarray(encoded[f"{name}_learned"])
            counts = np.append(0, np.cumsum(learned))
            lost |= counts[rows.starts + rows.lengths] == counts[rows.starts]
            targets.append(targets_of(rows.values, learned))
        kept = np.flatnonzero(~lost)
        refuse(
            not len(kept),
            f"no pair for {setting.side} has both answers within {length:,} tokens: raise data.max_length",
        )
        longer = np.logical_or(*(side.lengths > length + 1 for side in whole))
        self.notes = cut_note(longer, "pairs", length)
        if lost.any():
            more = f"have an answer that begins after {length:,} tokens and are left out"
            self.notes += (f"{int(lost.sum()):,} of {len(lost):,} pairs {more}",)
        pairs = [side.take(kept) for side in cut]
        self.inputs = [Stretches(side.values, side.starts, side.lengths - 1) for side in pairs]
        self.targets = [
            Stretches(values, side.starts + 1, side.lengths - 1) for values, side in zip(targets, pairs)
        ]
        self.reference = np.zeros((len(kept), 2), dtype=np.float32)
        super().__init__(setting, self.inputs[0].lengths + self.inputs[1].lengths)

    def _build(self, numbers: Ints) -> Batch:
        ids, mask = blank(self.sizes[0][numbers], self.setting.pad)
        targets = np.full_like(ids, IGNORE)
        begin = self.inputs[0].lengths[numbers]  # the column at which the rejected answer's text begins
        for at, inputs, wanted in zip((0 * begin, begin), self.inputs, self.targets):
            lay(ids, at, inputs.take(numbers))
            lay(targets, at, wanted.take(numbers))
        documents = (np.arange(ids.shape[1]) >= begin[:, None]).astype(np.int64)
        return Batch(
            tensor(ids), tensor(targets), mask, documents=tensor(documents), numbers=tensor(numbers),
            reference=tensor(self.reference[numbers]),
        )  # fmt: skip


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


class Prefer(ChatTask):
    """Prefer the chosen of two answers: direct preference optimization and its variants."""

    name = "prefer"
    shape = PREFERENCES
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
                found = []
                for row in group:
                    prompt = [{**message, "weight": 0} for message in row.prompt]
                    found.append(encode([*prompt, *getattr(row, side)], row.tools, row.place)[-1])
                columns[side] = flat([ids for ids, _ in found])
                learned = [flag for _, flags in found for flag in flags]
                columns[f"{side}_learned"] = np.array(learned, dtype=np.bool_)
            yield columns

    def batch(self, setting: Setting) -> Batches:
        """See `Task.batch`."""
        return PreferenceBatches(setting)

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
        asked = batch.targets != IGNORE
        second = (asked & (batch.documents == 1)).sum(1)
        return torch.stack([asked.sum(1) - second, second], 1)

    def score(self, said: Answers, meant: Answers, labels: Sequence[str]) -> dict[str, Scored]:
        """Measure how often the chosen answer has the larger reward, and the mean margin, as trl does."""
        rewards = np.array(said, dtype=np.float64)
        margins = rewards[:, 0] - rewards[:, 1]
        return {"accuracy": (MEAN, margins > 0, margins), "margin": (MEAN, margins, margins)}

    def judge(self, judged: Judged) -> list[str]:
        """Add how often the chosen answer is the likelier one: as a whole, and per token."""
        found = np.array(judged.said, dtype=np.float64)
        whole = (found[:, 0] > found[:, 1]).astype(int).tolist()
        per_token = (found[:, 0] / found[:, 2] > found[:, 1] / found[:, 3]).astype(int).tolist()
        judged.notes.append("no reference: accuracy is the share of pairs whose chosen answer is likelier")
        for name, said in (("accuracy", whole), ("accuracy_per_token", per_token)):
            judged.add(name, said, [1] * len(said), METRICS["accuracy"])
        return ["chosen" if right else "rejected" for right in whole]

    def sample(self, loaded: Model, row: Preference, plan: GeneratePlan, seed: int) -> str:
        """Return the answer to a prompt, and the chosen one."""
        said = self.answer(loaded, row.prompt, row.tools, plan, seed)
        return sampled(" ".join(row.asked()), said, row.chosen[-1]["content"])
