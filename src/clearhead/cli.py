"""The command line. Machine output goes to stdout, progress and warnings to stderr; exit codes 0 done, 1 failed, 2 wrong input."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn

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
from clearhead.errors import ClearheadError

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
    except OSError as error:  # no permission, no room, a name too long
        _stop(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else " ".join(str(error).split()))
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        sys.exit(130)


def _stop(line: str) -> NoReturn:
    print(f"clearhead: {line}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
