"""The list of commands. `cli` prints it, and imports the module of the command that is asked for.

A command is a line here: its name, its module and function, and a summary for the list. An analysis is a row
of `clearhead.app.views`.
"""

from __future__ import annotations

from typing import NamedTuple

from clearhead.app.views import ANALYSES, Analysis


class Command(NamedTuple):
    """Where a command is, as "module:function" in clearhead.app, and what it does in a few words."""

    summary: str
    target: str


GROUPS: dict[str, dict[str, Command | Analysis]] = {
    "train": {
        "demo": Command("take the tour: train, generate, look inside, check", "commands.models:demo"),
        "train": Command("train a model from your own files", "commands.train:train"),
        "align": Command("train CLIP or SigLIP from captioned pictures", "commands.train:align"),
        **ANALYSES["train"],
        "lab": Command("run an experiment: train, measure, draw, conclude", "commands.models:lab"),
    },
    "use": {
        "generate": Command("continue a text", "commands.use:generate"),
        "chat": Command("talk with a model in the terminal", "commands.chat:chat"),
        "translate": Command("translate a text, with an encoder-decoder", "commands.use:translate"),
        "transcribe": Command("write down what is said in a sound file", "commands.speech:transcribe"),
        "classify": Command("find the class of a text, a pair of texts or an image", "commands.use:classify"),
        "predict": Command("predict a number for a text or a pair of texts", "commands.use:predict"),
        "tag": Command("tag each word of a text, and find the spans", "commands.use:tag"),
        "fill": Command("fill in the masked words of a text", "commands.use:fill"),
        "answer": Command("find the answer to a question in a text", "commands.retrieve:answer"),
        "embed": Command("turn a text or an image into one vector", "commands.use:embed"),
        "rerank": Command("put the texts first that answer a query best", "commands.retrieve:rerank"),
        "score": Command("measure how probable a text is", "commands.use:score"),
        "index": Command("index the passages of files, for search", "commands.retrieve:index"),
        "search": Command("find the passages nearest to a query", "commands.retrieve:search"),
    },
    "serve": {
        "serve": Command("serve models over HTTP, as OpenAI's API", "commands.serve:serve"),
        "batch": Command("answer a file of requests", "commands.serve:batch"),
    },
    "look inside": {
        "explore": Command("see a model think, in the browser", "commands.models:explore"),
        **ANALYSES["look inside"],
    },
    "prove": {**ANALYSES["prove"]},
    "models": {
        **ANALYSES["models"],
        "convert": Command("save a model for Hugging Face, GGUF or ONNX", "commands.models:convert"),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
