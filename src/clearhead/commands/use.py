"""Commands that write or weigh text: generate, translate, score."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from clearhead.commands.common import Folder
from clearhead.commands.texts import Input, Options, Text, TextOptions

Prompt = Annotated[
    Positional[str | None],
    arg(
        metavar="PROMPT",
        help="the text to continue (with an encoder: to answer); - or nothing: stdin, one prompt per line",
    ),
]


def generate(
    folder: Folder,
    prompt: Prompt = None,
    max_new_tokens: Annotated[int, arg(help="where the text ends at the latest")] = 100,
    temperature: Annotated[float, arg(help="0 is greedy, 1 the model's own distribution")] = 0.0,
    top_k: Annotated[int, arg(help="keep the k best tokens; 0: all")] = 0,
    top_p: Annotated[float, arg(help="keep the best tokens that hold this much probability; 1: all")] = 1.0,
    min_p: Annotated[
        float, arg(help="keep tokens with this share of the best one's probability; 0: all")
    ] = 0.0,
    typical_p: Annotated[
        float, arg(help="keep the tokens of most usual surprise that hold this much probability; 1: all")
    ] = 1.0,
    repetition_penalty: Annotated[
        float, arg(help="above 1, tokens that have come are made less likely")
    ] = 1.0,
    presence_penalty: Annotated[
        float, arg(help="taken from the logit of every token that was generated")
    ] = 0.0,
    frequency_penalty: Annotated[float, arg(help="the same for each time it was generated")] = 0.0,
    no_repeat_ngram: Annotated[int, arg(help="never write the same n tokens twice; 0: off")] = 0,
    seed: Annotated[int, arg(help="of the draws")] = 0,
    beams: Annotated[int, arg(help="search with this many beams; 1: none")] = 1,
    length_penalty: Annotated[float, arg(help="of beams: above 0 favours long texts")] = 1.0,
    num_return: Annotated[int, arg(help="how many of the best beams to give")] = 1,
    lookup: Annotated[
        int, arg(help="guess this many tokens at a time from the text itself: the same text, sooner; 0: off")
    ] = 0,
    draft: Annotated[Path | None, arg(help="a smaller model that guesses in place of that")] = None,
    stop: Annotated[tuple[str, ...], arg(help="texts that end the generation")] = (),
    stop_token: Annotated[tuple[str, ...], arg(help="tokens that end the generation, by name or id")] = (),
    seconds: Annotated[float | None, arg(help="stop after this time")] = None,
    logprobs: Annotated[
        int | None, arg(help="report log-probabilities, and so many of the best tokens at each step")
    ] = None,
    stream: Annotated[bool, arg(help="print the text as it grows")] = False,
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
    from clearhead.generate.beam import Beams
    from clearhead.generate.sampling import Sampling

    sampling: dict[str, Any] = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "typical_p": typical_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "no_repeat_ngram": no_repeat_ngram,
    }
    search: dict[str, Any] = {"num_beams": beams, "num_return": num_return, "length_penalty": length_penalty}
    Sampling(**sampling), Beams(**search)  # a wrong option is said before the model is read
    live = stream and not options.json and prompt not in (None, "-")
    loaded = options.load(folder)
    more: dict[str, Any] = {"logprobs": True, "alternatives": logprobs} if logprobs is not None else {}
    more |= {"draft": options.load(draft)} if draft is not None else {}
    more |= {"on_text": lambda number, new: print(new, end="", flush=True)} if live else {}
    goes_on = loaded.config.family != "encoder-decoder"  # the new text goes on from the prompt

    def work(batch: list[Input]) -> list[Any]:
        if live and goes_on:
            print(batch[0].fields["prompt"], end="", flush=True)
        made = loaded.generate(
            [item.fields["prompt"] for item in batch],
            max_new_tokens,
            seed=seed,
            stop=stop,
            stop_tokens=stop_token,
            seconds=seconds,
            lookup=lookup,
            **search,
            **sampling,
            **more,
        )
        return list(made)  # type: ignore[arg-type]

    def line(item: Input, made: Any) -> str:
        lead = item.fields["prompt"] if goes_on else ""
        return (
            ""
            if live
            else "\n".join(f"{lead}{one.text}" for one in (made if isinstance(made, list) else [made]))
        )

    options.run({"prompt": prompt}, work, _generated("prompt"), line)


def _generated(name: str) -> Any:
    """The JSON of a generation, or of several for one input."""

    def plain(one: Any) -> dict[str, Any]:
        shown = {"text": one.text, "ids": one.ids, "stop_reason": one.stop_reason}
        extra = {"logprobs": one.logprobs, "alternatives": one.alternatives, "score": one.score}
        return shown | {key: value for key, value in extra.items() if value is not None}

    def body(item: Input, made: Any) -> dict[str, Any]:
        several = isinstance(made, list)
        return {
            name: item.fields[name],
            **({"results": [plain(one) for one in made]} if several else plain(made)),
        }

    return body


def translate(
    folder: Folder,
    text: Text = None,
    max_new_tokens: Annotated[
        int | None, arg(help="where the text ends at the latest; default: the model's own")
    ] = None,
    beams: Annotated[
        int | None, arg(help="search with this many beams; default: the model's own, else 4")
    ] = None,
    length_penalty: Annotated[
        float | None, arg(help="above 0 favours long texts; default: the model's own, else 1")
    ] = None,
    options: Options = TextOptions(),  # noqa: B008
) -> None:
    """Translate, or whatever else an encoder-decoder was trained to make of a text.

    For example:
      clearhead translate my-model/ "Ein Hund läuft."
      clearhead translate my-model/ --file german.txt --output english.txt --batch-size 32
      cat german.txt | clearhead translate my-model/ --beams 1
    """
    loaded = options.load(folder)

    def work(batch: list[Input]) -> list[Any]:
        made: list[Any] = loaded.translate(
            [item.fields["text"] for item in batch], max_new_tokens, beams, length_penalty
        )
        return made

    def body(item: Input, made: Any) -> dict[str, Any]:
        return {"source": item.fields["text"], **_generated("text")(item, made)}

    options.run({"text": text}, work, body, lambda item, made: str(made.text))


def score(
    folder: Folder,
    text: Text = None,
    source: Annotated[str | None, arg(help="what the encoder reads, for an encoder-decoder")] = None,
    options: Options = TextOptions(),  # noqa: B008
) -> None:
    """How probable a model finds a text: log-probability of each token, total, perplexity.

    For example:
      clearhead score my-model/ "The cat sat on the mat"
      clearhead score my-model/ --json < texts.txt
    """
    from clearhead.report import score_table

    loaded = options.load(folder)

    def work(batch: list[Input]) -> list[Any]:
        return [loaded.score(item.fields["text"], item.fields.get("source", source)) for item in batch]

    def body(item: Input, made: Any) -> dict[str, Any]:
        named = {"text": item.fields["text"], "ids": made.ids, "logprobs": made.logprobs}
        return {**named, "total": made.total, "perplexity": made.perplexity}

    def show(made: Any) -> Any:
        return score_table(made, [str(loaded.text_tokenizer.id_to_token(token)) for token in made.ids])

    options.run(
        {"text": text},
        work,
        body,
        lambda item, made: f"{made.total:.4f}\t{made.perplexity:.4f}",
        show,
        {"source": source},
    )
