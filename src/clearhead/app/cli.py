"""The command line.

Results go to stdout, progress and warnings to stderr. The exit code is 0 for success, 1 for a failed check,
and 2 for wrong input.
"""

import contextlib
import dataclasses
import functools
import gc
import inspect
import io
import os
import re
import shutil
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NoReturn, TextIO, get_args, get_origin, get_type_hints

import clearhead
from clearhead.app.views import COMMANDS, GROUPS
from clearhead.errors import ClearheadError, nearest
from clearhead.learn.parallel import first_here, started

# For bash, and for zsh after bashcompinit: commands, then the options of the command, else files.
COMPLETION = """\
_clearhead() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}"
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{commands}" -- "$word"))
  elif [[ "$word" == -* ]]; then
    local help="$(clearhead "${{COMP_WORDS[1]}}" --help 2>/dev/null)"
    local options="$(grep -o -e '--[a-z][a-z-]*' <<< "$help" | sort -u)"
    COMPREPLY=($(compgen -W "$options" -- "$word"))
  else
    COMPREPLY=($(compgen -f -- "$word"))
  fi
}}
complete -o filenames -F _clearhead clearhead"""

TOGETHER = ("train", "generate", "serve")  # commands that several processes share


def main(arguments: list[str] | None = None) -> None:
    """Run one command. A mistake of the user's is one line on stderr and exit code 2."""
    argv = sys.argv[1:] if arguments is None else arguments
    if " ".join(argv[:2]) in COMMANDS:  # a command of two words
        argv = [" ".join(argv[:2]), *argv[2:]]
    name = argv[0] if argv else ""
    if name in ("-h", "--help"):
        print(list_commands(bold=sys.stdout.isatty()))
    elif name == "--completion":
        print(COMPLETION.format(commands=" ".join(COMMANDS)))
    elif name == "--version":
        print(f"clearhead {clearhead.__version__}")
    elif started() and name in COMMANDS and name not in TOGETHER:
        if not first_here():
            sys.exit(2)
        others = f"{', '.join(TOGETHER[:-1])} and {TOGETHER[-1]}"
        _stop(f"{name} runs in one process: start it without torchrun, which is for {others}")
    elif name in COMMANDS:
        _run(name, argv[1:])
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
        lines += [f"  {name:<15}{command.summary}" for name, command in commands.items()]
    last = (
        "`clearhead COMMAND --help` shows its arguments and examples.",
        '`eval "$(clearhead --completion)"` completes commands in bash and zsh.',
    )
    return "\n".join([*lines, "", *last])


def _run(name: str, arguments: list[str]) -> None:
    """Parse the arguments of one command and run it."""
    try:
        gc.disable()  # reading the options makes many objects and hardly any garbage
        try:
            run = _parsed(name, arguments)
        finally:
            gc.enable()
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            run()
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


def _parsed(name: str, arguments: list[str]) -> Callable[[], None]:
    """Return the command with its arguments, ready to run."""
    import tyro

    from clearhead.app.commands.common import command_of

    config = (tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone)
    command = command_of(name)

    @functools.wraps(command)
    def parsed(*given: Any, **options: Any) -> Callable[[], None]:
        return lambda: command(*given, **options)

    def parse(arguments: list[str], **settings: Any) -> Any:
        settings |= {"prog": f"clearhead {name}", "config": config, "registry": _text_options()}
        settings["description"] = _wrapped(inspect.getdoc(command) or "")
        return tyro.cli(parsed, args=arguments, **settings)

    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            run, unknown = parse(arguments, return_unknown_args=True)
        if unknown:
            raise SystemExit(2)
    except SystemExit:  # help, or a mistake: an option that does not exist is named before anything else
        helping = {"-h", "--help"} & {*arguments} or any(
            argument.startswith("--tyro") for argument in arguments
        )
        if helping:
            return parse(arguments)  # type: ignore[no-any-return]
        _check_options(name, arguments, command)
        told = io.StringIO()
        try:
            with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
                run = parse(arguments)
        except SystemExit:
            _stop(_mistake(name, told.getvalue()))
    return run  # type: ignore[no-any-return]


def _wrapped(text: str) -> str:
    """Break the paragraphs of a docstring at the width of the terminal; examples stay as they are.

    The second line of a paragraph is indented, since tyro joins lines that are not.
    """
    width, lines = shutil.get_terminal_size().columns, re.sub(r"(?<=\S)\n(?=\S)", " ", text).splitlines()
    whole = (
        line if line[:1] == " " else textwrap.fill(line, width, subsequent_indent="  ") for line in lines
    )
    return "\n".join(whole)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning of clearhead's own as one line on stderr, and any other as Python does."""
    own = filename.startswith(os.path.dirname(os.path.dirname(__file__)))
    shown = f"warning: {message}\n" if own else warnings.formatwarning(message, category, filename, lineno)
    sys.stderr.write(shown)


def _mistake(name: str, told: str) -> str:
    """Return as one line what tyro tells in a box."""
    told = told.partition("For full helptext")[0]
    text, more = " ".join(re.sub(r"-{8,}", "", told).split()), f"clearhead {name} --help says more"
    if found := re.search(r"Unrecognized options: (.*)", text.removeprefix("Unrecognized options ")):
        return f"{name} does not take {found[1]}: clearhead {name} --help lists what it takes"
    if "Missing from" in text:
        missing = re.findall(r"^ {6}(\S.*?) *$", told, re.MULTILINE)  # deeper lines describe them
        return f"{name} needs {' and '.join(missing)}: {more}"
    if found := re.search(r"Missing value for argument '(.*?)'", text):
        return f"{found[1]} needs a value: {more}"
    if found := re.search(r"invalid choice '(.*?)' for argument '(.*?)'\. Expected one of \((.*?)\)", text):
        choices = sorted({*re.findall(r"'(.*?)'", found[3])} - {"None"})
        near = nearest(found[1], choices)
        return f'{found[2]} "{found[1]}" is not known{near}: choose from {", ".join(choices)}'
    if found := re.search(r"Error parsing (\S+): .*?'([^']*)'.* Argument helptext: \S+ (\S+)", text):
        wanted = {"INT": "a whole number", "FLOAT": "a number"}.get(found[3], found[3])
        return f'{found[1]} "{found[2]}" is not allowed: it must be {wanted}'
    return text


def _check_options(name: str, arguments: list[str], command: Callable[..., None]) -> None:
    """Stop where the command has no option of a name."""
    known = {"--help", *_options(command)}
    for given in arguments[: arguments.index("--")] if "--" in arguments else arguments:
        option = given.partition("=")[0].replace("_", "-")
        if re.fullmatch(r"--[\w-]+", given.partition("=")[0]) and option not in known:
            near = nearest(option, known)
            _stop(f'{name} has no option "{option}"{near}: clearhead {name} --help lists them')


def _options(described: Any) -> Iterator[str]:
    """Yield the options of a command, or of a dataclass among its parameters, as its help spells them."""
    from tyro.conf import Fixed, Positional

    nameless = [get_args(marked)[1] for marked in (Fixed[str], Positional[str])]
    for name, hint in get_type_hints(described, include_extras=True).items():
        kind, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if dataclasses.is_dataclass(kind):
            yield from _options(kind)
        elif name != "return" and not any(note in nameless for note in notes):
            spelled = next((note.name for note in notes if getattr(note, "name", None)), name)
            yield "--" + spelled.replace("_", "-")
            yield from (alias for note in notes for alias in getattr(note, "aliases", None) or ())


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
