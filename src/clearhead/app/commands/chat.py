"""The command that talks with a model in the terminal: history, streaming, a look inside the last answer."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import threading
import webbrowser
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

import clearhead as ch
from clearhead.app.commands.common import Folder, load_model, print_notes
from clearhead.app.commands.models import page_server
from clearhead.app.commands.requests import GroupedRequest, options_with
from clearhead.errors import ClearheadError, InputError, refuse
from clearhead.run.generate.request import ANSWER_TOKENS, make_request

OPTIONS = options_with(max_new_tokens=ANSWER_TOKENS)
ROUNDS = 8  # of answers with calls, to one message
SHOWN = 400  # characters of the result of a call, at most
HELP = """\
/reset         forget the conversation, but not the system message
/system TEXT   set the system message (no text: none), forget the conversation
/save FILE     write the conversation as JSON, as `clearhead train` reads it
/look          open the last answer in the explorer
/image FILE    show the model an image with the next message, where it reads images
/help          show this
/quit          end; so does Ctrl-D. Ctrl-C stops an answer"""


def chat(
    folder: Folder,
    text: str | None = None,
    *,
    system: str | None = None,
    image: tuple[Path, ...] = (),
    tools: Path | None = None,
    yes: bool = False,
    asking: Annotated[GroupedRequest, arg(name="")] = OPTIONS,
    port: int = 0,
    no_open: bool = False,
    device: str = "auto",
    dtype: str | None = None,
) -> None:
    """Talk with a model, by its own chat template. Type /help for what else can be typed.

    Args:
        text (TEXT): what to say first, in place of the lines of stdin
        system: the system message
        image: files of images that belong to the first message, for a model that reads them
        tools: a Python file: the model may call its typed functions, each call once you allow it
        yes: run every call of --tools without asking
        port: of the page that /look opens; 0: any that is free
        no_open: /look prints its address and opens no browser

    For example:
      clearhead chat my-model/
      clearhead chat my-model/ --system "Be brief." --temperature 0.7 --seed 1
      clearhead chat my-model/ --tools weather.py
      clearhead chat llava/ "What is this?" --image cat.jpg
      echo "What is a heron?" | clearhead chat my-model/
    """
    from clearhead.hub.tokens.tools import functions_of

    given = {"max_new_tokens": asking.stopping.max_new_tokens, **asking.given()}
    make_request(given)  # a mistake is reported before the model is loaded
    refuse(yes and tools is None, "--yes belongs to --tools: leave it out")
    functions = {} if tools is None else functions_of(tools, "--tools")
    model = load_model(folder, device=device, dtype=dtype)
    from clearhead.learn.tasks.generation import chat_template

    refuse(
        model.config.family != "decoder" or model.config.head != "lm",
        f"chat needs a decoder with head lm, and this is {model.config.family} with {model.config.head}",
    )
    chat_template(model)  # refuses a model without one
    talk = Talk(model, given, system, port, not no_open, functions, yes)
    for path in image:
        talk.show_image(str(path))
    for line in lines(text):
        try:
            if talk.take(line):
                break
        except ClearheadError as error:
            if not sys.stdin.isatty():
                raise
            print_notes([str(error)])
    if talk.show is not None:  # the page may still compute in threads of C++, which cannot be ended
        sys.stdout.flush()
        os._exit(0)


def lines(first: str | None) -> Iterator[str]:
    """Yield what the user types, and `first` before it; in a terminal with a prompt and line editing."""
    if first is not None:
        yield first
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in (sys.stdin if first is None else ()))
        return
    with suppress(ImportError):
        import readline  # noqa: F401  # arrow keys, and the lines typed before
    print_notes(["/help shows what else can be typed; Ctrl-D ends"])
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()


def asked_to_run() -> bool:
    """Ask in the terminal whether a call may run; without one, it may not."""
    if not sys.stdin.isatty():
        return False
    try:
        return input("run it? [y/N] ").strip().lower() in ("y", "yes")
    except (EOFError, KeyboardInterrupt):
        print()
        return False


class Printed:
    """Text that is printed as it grows; in a terminal, words that do not fit in `width` begin a new line."""

    def __init__(self, width: int | None) -> None:
        self.width, self.column, self.gap, self.word = width, 0, "", ""

    def add(self, text: str) -> None:
        """Print more; of a terminal's line, the last word waits until it is whole."""
        if self.width is None:
            print(text, end="", flush=True)
            return
        *words, self.word = re.split(r"(\s)", self.word + text)
        for word, space in zip(words[::2], words[1::2]):
            self._put(word)
            if space == "\n":
                print()
                self.column, self.gap = 0, ""
            else:
                self.gap += space
        sys.stdout.flush()

    def _put(self, word: str) -> None:
        if not word:
            return
        from rich.cells import cell_len

        if self.column and self.column + cell_len(self.gap + word) > (self.width or 0):
            print()
            self.column, self.gap = 0, ""
        print(self.gap + word, end="")
        self.column, self.gap = self.column + cell_len(self.gap + word), ""

    def end(self) -> None:
        """Print what is left, and end the line."""
        self._put(self.word)
        print(flush=True)


class Talk:
    """A conversation: its messages, and the commands that begin with a slash."""

    def __init__(
        self,
        model: ch.Model,
        options: dict[str, Any],
        system: str | None,
        port: int,
        browser: bool,
        functions: Mapping[str, Callable[..., Any]] | None = None,
        always: bool = False,
    ) -> None:
        """`functions` may be called, with `always` without asking."""
        from clearhead.hub.tokens.tools import tools_of

        self.model, self.options, self.system, self.port, self.browser = model, options, system, port, browser
        self.functions, self.always = functions or {}, always
        self.tools = tools_of([*self.functions.values()])
        self.turns: list[dict[str, Any]] = []
        self.images: list[str] = []  # files that belong to the next message
        self.read: list[int] = []  # the ids of the last answer, after those of what it answers
        self.show: Callable[[list[int]], str] | None = None

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The whole conversation."""
        lead = [{"role": "system", "content": self.system}] if self.system else []
        return [*lead, *self.turns]

    @property
    def _shown(self) -> dict[str, Any]:
        """What the chat template and a line of training data are given besides."""
        return {"tools": [tool.entry for tool in self.tools]} if self.tools else {}

    def take(self, line: str) -> bool:
        """Do what a line says; return True where it ends the conversation."""
        word, _, rest = line.strip().partition(" ")
        commands = {"/reset": self.reset, "/system": self.instruct, "/save": self.save, "/look": self.look}
        commands["/image"] = self.show_image
        if word in ("/quit", "/exit"):
            return True
        if word == "/help":
            print(HELP)
        elif word in commands:
            commands[word](rest.strip())
        elif word.startswith("/"):
            raise InputError(f"there is no {word}: type /help for what there is")
        elif word:
            self.say(line)
        return False

    def say(self, text: str) -> None:
        """Answer a message, and run what the answer calls, as long as it calls anything."""
        shown: list[dict[str, Any]] = [{"type": "image", "image": path} for path in self.images]
        content = [*shown, {"type": "text", "text": text}] if shown else text
        self.turns.append({"role": "user", "content": content})
        attached, self.images = self.images, []
        try:
            for _ in range(ROUNDS):
                answer = self._answer()
                self.turns.append(answer)
                if not answer.get("tool_calls"):
                    return
                for call in answer["tool_calls"]:
                    result = self._run(call["function"]["name"], call["function"]["arguments"])
                    self.turns.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            print_notes([f"the model has called functions {ROUNDS} times in a row: its calls end here"])
        except ClearheadError:
            if self.turns[-1]["role"] == "user":  # nothing was answered
                self.turns.pop()
                self.images = attached
            raise

    def _answer(self) -> dict[str, Any]:
        """Return the next answer, printing its text as it grows; Ctrl-C keeps what is there."""
        from clearhead.hub.tokens.answers import Part
        from clearhead.learn.tasks.generation import chat_ids

        streamed = list[str]()
        out = Printed(shutil.get_terminal_size().columns if sys.stdout.isatty() else None)

        def show(part: Part) -> None:
            if part.kind == "content":
                streamed.append(part.text)
                out.add(part.text)
            elif part.kind == "reasoning" and sys.stderr.isatty():  # the answer alone goes to stdout
                print(f"\033[2m{part.text}\033[0m", end="", file=sys.stderr, flush=True)

        prompt = chat_ids(self.model, self.messages, self._shown)
        options = {"reuse": True, **self.options, **({"tools": self.tools} if self.tools else {})}
        if "overflow" not in options:
            room = self.model.max_length - len(prompt)
            refuse(room < 1, f"the conversation fills the {self.model.max_length:,} tokens: type /reset")
            options["max_new_tokens"] = min(options["max_new_tokens"], room)
        message: dict[str, Any] = {}
        try:
            answer = self.model.chat(self.messages, **options, on_part=show)
            ids, message = answer.ids, answer.message
            cut = answer.stop_reason == "length" and answer.tool_calls
            refuse(cut, f"a call was cut off after {len(ids):,} tokens: raise --max-new-tokens")
        except KeyboardInterrupt:
            ids = self.model.text_tokenizer.encode("".join(streamed), add_special_tokens=False).ids
        finally:
            if streamed or not message.get("tool_calls"):
                out.end()
        self.read = [*prompt, *ids]
        return {"role": "assistant", **message, "content": "".join(streamed).strip()}

    def _run(self, name: str, arguments: str) -> str:
        """Run a call if the user allows it; return its result, or what went wrong, for the model."""
        from clearhead.hub.tokens.tools import call_function

        print_notes([f"call: {name}({arguments})"])
        if not (self.always or asked_to_run()):
            print_notes(["not run" if sys.stdin.isatty() else "not run: --yes runs calls without asking"])
            return "error: the user did not allow this call"
        try:
            result = call_function(self.functions[name], arguments)
        except KeyboardInterrupt:
            result = "error: the user stopped this call"
        print_notes([f"result: {result if len(result) <= SHOWN else f'{result[:SHOWN]}…'}"])
        return result

    def reset(self, rest: str = "") -> None:
        """Forget the conversation."""
        self.turns, self.read, self.images = [], [], []
        print_notes(["a new conversation"])

    def show_image(self, rest: str) -> None:
        """Let the next message have an image."""
        from clearhead.hub.preprocessor import read_image
        from clearhead.learn.tasks.images import encoder_of

        encoder = encoder_of(self.model)
        refuse(not rest, "/image needs a file")
        refuse(not Path(rest).is_file(), f"{rest}: there is no such file")
        read_image(Path(rest), encoder.config.tower.n_channels, rest)  # refuses what is no image
        self.images.append(rest)

    def instruct(self, rest: str) -> None:
        """Set the system message."""
        self.system = rest or None
        self.reset()

    def save(self, rest: str) -> None:
        """Write the conversation to a file that is not there yet."""
        refuse(not rest, "/save needs the name of a file, such as /save talk.jsonl")
        refuse(not self.turns, "there is no conversation to save yet")
        path = Path(rest)
        refuse(path.exists(), f"{path} is there already: name another")
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(json.dumps({"messages": self.messages, **self._shown}, ensure_ascii=False) + "\n")
        except OSError as error:
            raise InputError(f"{path} cannot be written: {error.strerror}") from None
        print_notes([f"saved {path}"])

    def look(self, rest: str = "") -> None:
        """Open the last answer, with all that it answers, in the explorer."""
        refuse(not self.read, "there is no answer to look at yet")
        refuse(
            any(isinstance(turn["content"], list) for turn in self.turns),
            "/look shows text alone, and this conversation has images: type /reset",
        )
        if self.show is None:
            self.show = page(self.model, self.port)
        address = self.show(self.read)
        print_notes([f"the last answer: {address}"])
        if self.browser:
            webbrowser.open(address)


def page(model: ch.Model, port: int) -> Callable[[list[int]], str]:
    """Start the explorer next to the conversation; return a function from ids to the address to open."""
    from clearhead.app.explorer.session import Opened, Session

    opened = Opened(model.folder.resolve().name if model.folder else "model", lambda: model)
    server, listening, address = page_server(Session([opened]), "127.0.0.1", port)
    threading.Thread(target=server.run, args=([listening],), daemon=True).start()

    def show(ids: list[int]) -> str:
        opened.example = {"ids": ids}
        return address

    return show
