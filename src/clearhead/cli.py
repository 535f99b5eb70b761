"""The command line. Machine output goes to stdout, progress and warnings to stderr; exit codes 0 done, 1 failed, 2 wrong input."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, NoReturn

import tyro
from tyro.conf import FlagCreatePairsOff

from clearhead.commands import (
    attention,
    evaluate,
    explore,
    geometry,
    heads,
    lens,
    memories,
    models,
    patch,
    probe,
    prune,
    read,
    tokens,
    trace,
    train,
    use,
)
from clearhead.errors import ClearheadError, nearest

COMMANDS: dict[str, Callable[..., None]] = {
    "demo": models.demo,
    "train": train.train,
    "eval": evaluate.evaluate,
    "generate": use.generate,
    "translate": use.translate,
    "classify": read.classify,
    "tag": read.tag,
    "fill": read.fill,
    "answer": read.answer,
    "embed": read.embed,
    "score": use.score,
    "tokens": tokens.tokens,
    "trace": trace.trace,
    "attention": attention.attention,
    "memories": memories.memories,
    "geometry": geometry.geometry,
    "ablate": prune.ablate,
    "prune": prune.prune,
    "probe": probe.probe,
    "lens": lens.lens,
    "patch": patch.patch,
    "heads": heads.heads,
    "cost": models.cost,
    "explore": explore.explore,
    "check": models.check,
    "convert": models.convert,
}


def main(arguments: list[str] | None = None) -> None:
    """Run one command; a mistake of the user's is one line on stderr and exit code 2."""
    first = (sys.argv[1:] if arguments is None else arguments)[:1]
    if first == ["--version"]:
        print(f"clearhead {version('clearhead')}")
        return
    if first and not first[0].startswith("-") and first[0] not in COMMANDS:
        _stop(
            f'no command is called "{first[0]}"{nearest(first[0], COMMANDS)}: choose one of {", ".join(COMMANDS)}'
        )
    listing = not first or first[0].startswith("-")
    try:
        tyro.extras.subcommand_cli_from_dict(
            {name: _brief(command) for name, command in COMMANDS.items()} if listing else COMMANDS,
            prog="clearhead",
            description="A Transformer you can see through. `clearhead COMMAND --help` has its options and examples.",
            args=arguments,
            config=(FlagCreatePairsOff,),
        )
    except ClearheadError as error:
        _stop(str(error))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has gone: say no more
        sys.exit(0)
    except OSError as error:  # no permission, no room, a name too long
        _stop(
            f"{error.filename}: {error.strerror}"
            if error.filename and error.strerror
            else " ".join(str(error).split())
        )
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        sys.exit(130)


def _brief(command: Callable[..., None]) -> Callable[..., None]:
    """A command without its examples, for the list of all."""

    @functools.wraps(command)
    def brief(*given: Any, **named: Any) -> None:
        command(*given, **named)

    brief.__doc__ = (command.__doc__ or "").split("\n\n")[0]
    return brief


def _stop(line: str) -> NoReturn:
    print(f"clearhead: {line}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
