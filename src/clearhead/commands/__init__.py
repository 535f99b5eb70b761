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
        "eval": Command("evaluate:evaluate", "measure a model on data it has not seen"),
    },
    "use": {
        "generate": Command("use:generate", "continue a text"),
        "translate": Command("use:translate", "translate a text, with an encoder-decoder"),
        "classify": Command("read:classify", "find the class of a text, a pair of texts or an image"),
        "predict": Command("read:predict", "predict a number for a text or a pair of texts"),
        "tag": Command("read:tag", "tag each word of a text, and find the spans"),
        "fill": Command("read:fill", "fill in the masked words of a text"),
        "answer": Command("read:answer", "find the answer to a question in a text"),
        "embed": Command("read:embed", "turn a text into one vector"),
        "score": Command("use:score", "measure how probable a text is"),
    },
    "look inside": {
        "explore": Command("explore:explore", "see a model think, in the browser"),
        "tokens": Command("tokens:tokens", "see how a text becomes tokens"),
        "trace": Command("trace:trace", "follow the forward pass, step by step"),
        "attention": Command("attention:attention", "see where each head looks"),
        "heads": Command("heads:heads", "find out what each head does"),
        "lens": Command("lens:lens", "see what the model would say after each layer"),
        "memories": Command("memories:memories", "see what fires each neuron, and what it promotes"),
        "geometry": Command("geometry:geometry", "see where words and positions stand"),
        "probe": Command("probe:probe", "measure what can be read off each layer"),
        "patch": Command("patch:patch", "find the layer and token that carry the answer"),
        "ablate": Command("ablate:ablate", "see what a model does without some of its parts"),
        "prune": Command("prune:prune", "remove heads, and save the smaller model"),
    },
    "prove": {
        "check": Command("models:check", "run the equality suite on a model, here"),
    },
    "models": {
        "cost": Command("models:cost", "count parameters, FLOPs and memory from a config"),
        "convert": Command("models:convert", "save a model in the Hugging Face format"),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
