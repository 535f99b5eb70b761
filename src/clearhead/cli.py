"""The command line.

Results go to stdout, progress and warnings to stderr. The exit code is 0 for success, 1 for a failed check,
and 2 for wrong input.
"""

import importlib
import os
import sys
from typing import Any, NoReturn

import clearhead
from clearhead.commands import COMMANDS, GROUPS
from clearhead.errors import ClearheadError, nearest


def main(arguments: list[str] | None = None) -> None:
    """Run one command. A mistake of the user's is one line on stderr and exit code 2."""
    given = sys.argv[1:] if arguments is None else arguments
    name = given[0] if given else ""
    if name in ("-h", "--help"):
        print(list_commands(bold=sys.stdout.isatty()))
    elif name == "--version":
        print(f"clearhead {clearhead.__version__}")
    elif name in COMMANDS:
        _run(name, given[1:])
    elif not name:
        print(list_commands(bold=sys.stderr.isatty()), file=sys.stderr)
        sys.exit(2)
    elif name.startswith("-"):
        _stop(f'no option is called "{name}": name a command first; clearhead --help lists them')
    else:
        _stop(f'no command is called "{name}"{nearest(name, COMMANDS)}: choose one of {", ".join(COMMANDS)}')


def list_commands(bold: bool = False) -> str:
    """Return the list of commands, grouped by what they are for."""
    lines = ["usage: clearhead COMMAND [ARGUMENTS]", "", "A Transformer you can see through."]
    for group, commands in GROUPS.items():
        lines += ["", f"\x1b[1m{group}\x1b[0m" if bold else group]
        lines += [f"  {name:<12}{command.summary}" for name, command in commands.items()]
    return "\n".join([*lines, "", "`clearhead COMMAND --help` shows its arguments and examples."])


def _run(name: str, arguments: list[str]) -> None:
    """Parse the arguments of one command and run it."""
    import tyro

    module, function = COMMANDS[name].target.split(":")
    config = (tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone)
    try:
        command = getattr(importlib.import_module(f"clearhead.commands.{module}"), function)
        tyro.cli(command, prog=f"clearhead {name}", args=arguments, config=config, registry=_text_options())
    except ClearheadError as error:
        _stop(str(error))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has gone: say no more
        sys.exit(0)
    except OSError as error:  # no permission, no space left, a name too long
        named = error.filename and error.strerror
        _stop(f"{error.filename}: {error.strerror}" if named else " ".join(str(error).split()))
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        sys.exit(130)


def _text_options() -> Any:
    """Return a registry in which an option of type `str` shows as TEXT."""
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

    registry = ConstructorRegistry()

    @registry.primitive_rule
    def text(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[str] | None:
        if info.type is not str:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="TEXT",
            instance_from_str=lambda strings: strings[0],
            is_instance=lambda instance: isinstance(instance, str),
            str_from_instance=lambda instance: [instance],
        )

    return registry


def _stop(line: str) -> NoReturn:
    print(f"clearhead: {line}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
