"""The list of commands. `cli` prints it, and imports the module of the command that is asked for.

To add a command, add a line here: its name, its module and function, and a summary for the list.
"""

from __future__ import annotations

from typing import NamedTuple


class Command(NamedTuple):
    """Where a command is, as "module:function", and what it does in a few words."""

    target: str
    summary: str


GROUPS: dict[str, dict[str, Command]] = {
    "train": {
        "demo": Command("models:demo", "take the tour: train, generate, look inside, check"),
        "train": Command("train:train", "train a model from your own files"),
        "align": Command("towers:align", "train CLIP or SigLIP from captioned pictures"),
        "eval": Command("train:evaluate", "measure a model on data it has not seen"),
        "long": Command("long:long", "measure a language model on long contexts"),
        "lab": Command("lab:lab", "run an experiment: train, measure, draw, conclude"),
    },
    "use": {
        "generate": Command("use:generate", "continue a text"),
        "chat": Command("chat:chat", "talk with a model in the terminal"),
        "translate": Command("use:translate", "translate a text, with an encoder-decoder"),
        "transcribe": Command("speech:transcribe", "write down what is said in a sound file"),
        "classify": Command("use:classify", "find the class of a text, a pair of texts or an image"),
        "predict": Command("use:predict", "predict a number for a text or a pair of texts"),
        "tag": Command("use:tag", "tag each word of a text, and find the spans"),
        "fill": Command("use:fill", "fill in the masked words of a text"),
        "answer": Command("retrieve:answer", "find the answer to a question in a text"),
        "embed": Command("use:embed", "turn a text or an image into one vector"),
        "rerank": Command("retrieve:rerank", "put the texts first that answer a query best"),
        "score": Command("use:score", "measure how probable a text is"),
        "index": Command("retrieve:index", "index the passages of files, for search"),
        "search": Command("retrieve:search", "find the passages nearest to a query"),
    },
    "serve": {
        "serve": Command("serve:serve", "serve models over HTTP, as OpenAI's API"),
        "batch": Command("serve:batch", "answer a file of requests"),
    },
    "look inside": {
        "explore": Command("models:explore", "see a model think, in the browser"),
        "tokens": Command("steps:tokens", "see how a text becomes tokens"),
        "trace": Command("steps:trace", "follow the forward pass, step by step"),
        "attention": Command("prompts:attention", "see where each head looks"),
        "heads": Command("learned:heads", "find out what each head does"),
        "lens": Command("prompts:lens", "see what the model would say after each layer"),
        "memories": Command("weights:memories", "see what fires each neuron, and what it promotes"),
        "geometry": Command("weights:geometry", "see where words and positions stand"),
        "probe": Command("learned:probe", "measure what can be read off each layer"),
        "patch": Command("prompts:patch", "find the layer and token that carry the answer"),
        "ablate": Command("parts:ablate", "see what a model does without some of its parts"),
        "prune": Command("parts:prune", "remove heads, and save the smaller model"),
    },
    "prove": {
        "check": Command("models:check", "run the equality suite on a model, here"),
    },
    "models": {
        "cost": Command("models:cost", "count parameters, FLOPs and memory from a config"),
        "bench": Command("bench:bench", "time a model here, beside what else is installed"),
        "plan": Command("plan:plan", "find the mesh of devices to train a model on"),
        "quantize": Command("quantize:quantize", "round weights to 8 or 4 bits, and say what that cost"),
        "convert": Command("models:convert", "save a model for Hugging Face, GGUF or ONNX"),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
