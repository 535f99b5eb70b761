"""Commands that write or weigh text: generate, translate, score."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Fixed, Positional, SuppressFixed, arg

from clearhead.commands.common import Folder, option
from clearhead.commands.texts import Input, Options, Text, TextOptions
from clearhead.generate.request import Request
from clearhead.tasks.results import Generation, Score

Prompt = Annotated[
    Positional[str | None],
    option(
        "the text to continue (with an encoder: to answer); - or nothing: stdin, one prompt per line",
        metavar="PROMPT",
    ),
]


@dataclass(frozen=True, kw_only=True)
class CommandRequest(Request):
    """A request as the command's options give it; the help of an option is the comment beside its field."""

    num_beams: Annotated[int, option("search with this many beams; 1: no search", name="beams")] = 1
    stop_tokens: Annotated[
        tuple[str, ...], option("further tokens that end the generation, by name", name="stop-token")
    ] = ()
    logprobs: SuppressFixed[Fixed[bool]] = False
    alternatives: SuppressFixed[Fixed[int]] = 0
    reuse: SuppressFixed[Fixed[bool]] = False  # between the calls of one process


def generate(
    folder: Folder,
    prompt: Prompt = None,
    request: Annotated[CommandRequest, arg(name="")] = CommandRequest(),  # noqa: B008
    draft: Annotated[Path | None, option("a smaller model that guesses tokens, in place of --lookup")] = None,
    best: Annotated[
        int | None,
        option("report log-probabilities, and so many of the best tokens at each step", name="logprobs"),
    ] = None,
    stream: Annotated[bool, option("print the text as it grows")] = False,
    options: Options = TextOptions(),  # noqa: B008
) -> None:
    """Continue a text.

    For example:
      clearhead generate my-model/ "Once upon a time"
      clearhead generate my-model/ "Once upon" --temperature 0.8 --top-p 0.95 --seed 1 --stream
      clearhead generate my-model/ "Once upon" --beams 4 --num-return 2 --json
      clearhead generate my-model/ --file prompts.txt --output texts.txt
      echo "Once upon" | clearhead generate my-model/ -
    """
    from clearhead.tasks.generation import Hooks
    from clearhead.tasks.generation import generate as generate_texts

    asked = request if best is None else replace(request, logprobs=True, alternatives=best)
    live = stream and not options.json and prompt not in (None, "-")
    m = options.load(folder)
    hooks = Hooks(
        (lambda number, new: print(new, end="", flush=True)) if live else None,
        draft=None if draft is None else options.load(draft),
    )
    goes_on = m.config.family != "encoder-decoder"  # the new text goes on from the prompt

    def work(batch: list[Input]) -> list[list[Generation]]:
        if live and goes_on:
            print(batch[0].fields["prompt"], end="", flush=True)
        return generate_texts(m, [item.fields["prompt"] for item in batch], asked, hooks)

    def line(item: Input, made: list[Generation]) -> str:
        lead = item.fields["prompt"] if goes_on else ""
        return "" if live else "\n".join(f"{lead}{one.text}" for one in made)

    def body(item: Input, made: list[Generation]) -> dict[str, Any]:
        found = [_fields(one) for one in made]
        return {**item.fields, **({"results": found} if asked.num_return > 1 else found[0])}

    options.run({"prompt": prompt}, work, body, line)


def _fields(made: Generation) -> dict[str, Any]:
    """Return a generation as JSON."""
    shown = {"text": made.text, "ids": made.ids, "stop_reason": made.stop_reason}
    extra = {"logprobs": made.logprobs, "alternatives": made.alternatives, "score": made.score}
    return shown | {key: value for key, value in extra.items() if value is not None}


def translate(
    folder: Folder,
    text: Text = None,
    max_new_tokens: Annotated[
        int | None, option("where the text ends at the latest; default: the model's own")
    ] = None,
    beams: Annotated[
        int | None, option("search with this many beams; default: the model's own, else 4")
    ] = None,
    length_penalty: Annotated[
        float | None, option("above 0 favours long texts; default: the model's own, else 1")
    ] = None,
    options: Options = TextOptions(),  # noqa: B008
) -> None:
    """Translate, or whatever else an encoder-decoder was trained to make of a text.

    For example:
      clearhead translate my-model/ "Ein Hund läuft."
      clearhead translate my-model/ --file german.txt --output english.txt --batch-size 32
      cat german.txt | clearhead translate my-model/ --beams 1
    """
    m = options.load(folder)

    def work(batch: list[Input]) -> list[Generation]:
        return m.translate([item.fields["text"] for item in batch], max_new_tokens, beams, length_penalty)

    def body(item: Input, made: Generation) -> dict[str, Any]:
        return {"source": item.fields["text"], **_fields(made)}

    options.run({"text": text}, work, body, lambda item, made: str(made.text))


def score(
    folder: Folder,
    text: Text = None,
    source: Annotated[str | None, option("what the encoder reads, for an encoder-decoder")] = None,
    options: Options = TextOptions(),  # noqa: B008
) -> None:
    """How probable a model finds a text: log-probability of each token, total, perplexity.

    For example:
      clearhead score my-model/ "The cat sat on the mat"
      clearhead score my-model/ --json < texts.txt
    """
    from clearhead.report import score_table

    m = options.load(folder)

    def work(batch: list[Input]) -> list[Score]:
        return [m.score(item.fields["text"], item.fields.get("source", source)) for item in batch]

    def body(item: Input, made: Score) -> dict[str, Any]:
        named = {"text": item.fields["text"], "ids": made.ids, "logprobs": made.logprobs}
        return {**named, "total": made.total, "perplexity": made.perplexity}

    def show(made: Score) -> Any:
        return score_table(made, [str(m.text_tokenizer.id_to_token(token)) for token in made.ids])

    options.run(
        {"text": text},
        work,
        body,
        lambda item, made: f"{made.total:.4f}\t{made.perplexity:.4f}",
        show,
        {"source": source},
    )
