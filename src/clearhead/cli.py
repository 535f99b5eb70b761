"""The command line. Machine output goes to stdout, progress and warnings to stderr; exit codes 0 done, 1 failed, 2 wrong input."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import tyro
from tyro.conf import FlagCreatePairsOff, Positional, arg

from clearhead.errors import ClearheadError

Json = Annotated[bool, arg(help="print one JSON object instead of a table")]


def demo(seed: Annotated[int, arg(help="of the toy model")] = 0) -> None:
    """The tour: learn a toy task live, look at its attention, read a cost table, run the equality checks.

    For example:
      clearhead demo
      clearhead demo --seed 3
    """
    from clearhead.tour import tour

    tour(seed)


def cost(
    model: Annotated[Positional[str], arg(metavar="CONFIG|DIR|PRESET", help="a config's JSON file, a model directory, or a preset")],
    length: Annotated[int | None, arg(help="tokens per row; default: the longest the model takes")] = None,
    batch: Annotated[int, arg(help="rows")] = 1,
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], arg(help="of weights, activations and cache")] = "float32",
    json: Json = False,
) -> None:
    """What a model will take: parameters, FLOPs, memory and cache, from its config alone.

    For example:
      clearhead cost gpt2
      clearhead cost llama-3-8b --length 8192 --dtype bfloat16
      clearhead cost my-model/ --json
    """
    from clearhead.cost import cost as cost_of
    from clearhead.report import cost_table

    figures = cost_of(_config(model), length=length, batch=batch, dtype=dtype)
    _print(figures.to_dict(), json, lambda console: console.print(cost_table(figures, model)))


def check(
    folder: Annotated[Positional[Path], arg(metavar="DIR", help="a model directory, clearhead's or Hugging Face's")],
    reference: Annotated[bool, arg(help="compare with transformers too: logits and 50 greedy tokens")] = False,
    json: Json = False,
) -> None:
    """Prove a model right, here: the equality suite on this model and this machine. Exit code 1 if a row fails.

    For example:
      clearhead check my-model/
      clearhead check my-model/ --reference
      clearhead check my-model/ --json
    """
    from clearhead.inside.checks import check as run
    from clearhead.loaded import load
    from clearhead.report import check_table

    rows = run(load(folder), reference)
    failed = [row for row in rows if not row.passed]
    body = {"checks": [row.to_dict() for row in rows], "passed": not failed}
    _print(body, json, lambda console: console.print(check_table(rows)))
    if failed:
        sys.exit(1)


def convert(
    source: Annotated[Positional[Path], arg(metavar="IN", help="a model directory, clearhead's or Hugging Face's")],
    target: Annotated[Positional[Path], arg(metavar="OUT", help="the directory to write")],
    dtype: Annotated[Literal["float32", "bfloat16", "float16"] | None, arg(help="of the weights; default: as they are")] = None,
    shard_size: Annotated[str, arg(help="largest file, such as 500MB or 5GB")] = "5GB",
    overwrite: Annotated[bool, arg(help="write into OUT although it holds a model already")] = False,
    json: Json = False,
) -> None:
    """Write a model as the Hugging Face architecture that is exactly it; where there is none, say why.

    For example:
      clearhead convert my-model/ out/
      clearhead convert my-model/ out/ --dtype bfloat16 --shard-size 500MB
    """
    import torch

    from clearhead.errors import CheckpointError
    from clearhead.hub.checkpoint import explain_export
    from clearhead.loaded import load

    if (target / "config.json").exists() and not overwrite:
        raise CheckpointError(f"{target} holds a model already: choose another directory, or add --overwrite")
    limit = _bytes(shard_size)
    loaded = load(source)
    loaded.save(target, dtype=getattr(torch, dtype) if dtype else None, shard_size=limit)
    saved_as, note = explain_export(loaded.config, loaded.description)
    body = {"saved": str(target), "architecture": saved_as, "note": note}
    _print(body, json, lambda console: console.print(f"saved {target} as {saved_as}{': ' + note if note else ''}", highlight=False))


def generate(
    folder: Annotated[Positional[Path], arg(metavar="DIR", help="a model directory, clearhead's or Hugging Face's")],
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
    _print(body, json, lambda console: print(shown))


def score(
    folder: Annotated[Positional[Path], arg(metavar="DIR", help="a model directory, clearhead's or Hugging Face's")],
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
    _print(body, json, lambda console: console.print(score_table(result, words)))


COMMANDS: dict[str, Callable[..., None]] = {
    "demo": demo,
    "generate": generate,
    "score": score,
    "cost": cost,
    "check": check,
    "convert": convert,
}


def main(arguments: list[str] | None = None) -> None:
    """Run one command; a mistake of the user's is one line on stderr and exit code 2."""
    try:
        tyro.extras.subcommand_cli_from_dict(
            COMMANDS,
            prog="clearhead",
            description="A Transformer you can see through. `clearhead COMMAND --help` has examples.",
            args=arguments,
            config=(FlagCreatePairsOff,),
        )
    except ClearheadError as error:
        _stop(str(error))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has gone: say no more
        sys.exit(0)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        sys.exit(130)


def _stop(line: str) -> NoReturn:
    print(f"clearhead: {line}", file=sys.stderr)
    sys.exit(2)


def _print(body: dict[str, Any], as_json: bool, show: Any) -> None:
    if as_json:
        print(json.dumps(body, indent=2))
        return
    from rich.console import Console

    show(Console())


def _config(name: str) -> Any:
    """A config from a JSON file, a model directory or a preset's name."""
    from clearhead.config import ModelConfig
    from clearhead.errors import ConfigError, nearest
    from clearhead.hub.checkpoint import describe
    from clearhead.presets import PRESETS

    path = Path(name)
    if path.is_dir():
        return describe(path).config
    if path.is_file():
        try:
            return ModelConfig.from_json(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read as a config: {error}") from None
    if name not in PRESETS:
        raise ConfigError(f'"{name}" is no file, directory or preset{nearest(name, PRESETS)}: presets are {", ".join(PRESETS)}')
    return PRESETS[name]


def _bytes(text: str) -> int:
    """A number of bytes from text such as 500MB."""
    from clearhead.errors import InputError

    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "B": 1}
    upper = text.strip().upper()
    unit = next((unit for unit in sorted(units, key=len, reverse=True) if upper.endswith(unit)), "")
    number = upper.removesuffix(unit).strip()
    try:
        size = int(float(number) * units.get(unit, 1))
    except ValueError:
        size = 0
    if size < 1:
        raise InputError(f'size "{text}" is not understood: write a number and a unit, such as 500MB or 5GB')
    return size


if __name__ == "__main__":
    main()
