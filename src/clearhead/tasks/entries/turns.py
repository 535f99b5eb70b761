"""Tasks of conversations: what the assistant says is learned, and nothing else."""

from typing import Any

from clearhead.api import Model
from clearhead.batches import chats
from clearhead.batches.batching import Batching
from clearhead.data.chats import CHATS, Conversation
from clearhead.recipe import GeneratePlan
from clearhead.tasks.chat import chat_ids
from clearhead.tasks.spec import DECODER, TaskSpec, sampled
from clearhead.tokens.chat import answers
from clearhead.tokens.training import GENERATOR


def _answered(loaded: Model, row: Conversation, plan: GeneratePlan, seed: int) -> str:
    first = answers(row.messages)[0]
    asked, wanted = row.messages[:first], row.messages[first]["content"]
    more: dict[str, Any] = {"template": {"tools": row.tools}} if row.tools else {}
    room = loaded.max_length - len(chat_ids(loaded, asked, more.get("template", {})))
    made = loaded.chat(
        asked, max(1, min(plan.max_new_tokens, room)), seed=seed, temperature=plan.temperature,
        top_p=plan.top_p, **more,
    )  # fmt: skip
    return sampled(" ".join(row.asked()), made.text, wanted)


TASKS = (
    TaskSpec(
        name="chat",
        batching=Batching("chat", CHATS, chats.encode_chats, chats.chat_batches),
        tokens=GENERATOR,
        head="lm",
        usual=DECODER,
        chats=True,
        command="chat {folder} TEXT",
        sample=_answered,
        figures=lambda judgement: [],  # the loss of the answers says it all
    ),
)
