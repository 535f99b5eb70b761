"""Commands that put a model to use."""

from __future__ import annotations

import sys
from typing import Annotated

from tyro.conf import Positional, arg

from clearhead.commands.common import Folder, Json, show_result


def generate(
    folder: Folder,
    prompt: Annotated[Positional[str], arg(help="the text to continue (with an encoder: to answer); - reads it from stdin")],
    max_new_tokens: Annotated[int, arg(help="where the text ends at the latest")] = 100,
    temperature: Annotated[float, arg(help="0 is greedy, 1 the model's own distribution")] = 0.0,
    top_k: Annotated[int, arg(help="keep the k best tokens; 0: all")] = 0,
    top_p: Annotated[float, arg(help="keep the best tokens that hold this much probability; 1: all")] = 1.0,
    min_p: Annotated[float, arg(help="keep tokens with this share of the best one's probability; 0: all")] = 0.0,
    repetition_penalty: Annotated[float, arg(help="above 1, tokens that have come are made less likely")] = 1.0,
    seed: Annotated[int, arg(help="of the draws")] = 0,
    stop: Annotated[tuple[str, ...], arg(help="texts that end the generation")] = (),
    stream: Annotated[bool, arg(help="print the text as it grows")] = False,
    json: Json = False,
) -> None:
    """Continue a text.

    For example:
      clearhead generate my-model/ "Once upon a time"
      clearhead generate my-model/ "Once upon" --temperature 0.8 --top-p 0.95 --seed 1 --stream
      echo "Once upon" | clearhead generate my-model/ -
    """
    from clearhead.loaded import load

    text = sys.stdin.read() if prompt == "-" else prompt
    live = stream and not json
    loaded = load(folder)
    lead = "" if loaded.config.family == "encoder-decoder" else text  # what the answer goes on from
    if live:
        print(lead, end="", flush=True)
    made = loaded.generate(
        text,
        max_new_tokens,
        seed=seed,
        stop=stop,
        on_text=(lambda number, new: print(new, end="", flush=True)) if live else None,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
    )
    assert not isinstance(made, list)
    body = {"prompt": text, "text": made.text, "ids": made.ids, "stop_reason": made.stop_reason}
    shown = "" if live else f"{lead}{made.text}"
    show_result(body, json, lambda console: print(shown))


def score(
    folder: Folder,
    text: Annotated[Positional[str], arg(help="the text to score; - reads it from stdin")],
    source: Annotated[str | None, arg(help="what the encoder reads, for an encoder-decoder")] = None,
    json: Json = False,
) -> None:
    """How probable a model finds a text: log-probability of each token, total, perplexity.

    For example:
      clearhead score my-model/ "The cat sat on the mat"
      clearhead score my-model/ - --json < text.txt
    """
    from clearhead.loaded import load
    from clearhead.report import score_table

    loaded = load(folder)
    result = loaded.score(sys.stdin.read() if text == "-" else text, source)
    body = {"ids": result.ids, "logprobs": result.logprobs, "total": result.total, "perplexity": result.perplexity}
    words = [str(loaded.tokenizer.id_to_token(token)) if loaded.tokenizer is not None else "" for token in result.ids]
    show_result(body, json, lambda console: console.print(score_table(result, words)))
