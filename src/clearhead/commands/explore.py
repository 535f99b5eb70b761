"""The explorer: the page in the browser, or the page in a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

from clearhead.commands.common import Folder


def explore(
    folder: Folder,
    text: Annotated[
        str | None, arg(help="what the page begins with; an image file for a model of images")
    ] = None,
    target: Annotated[
        str | None, arg(help="what the decoder of an encoder-decoder has written; default: its own answer")
    ] = None,
    pair: Annotated[str | None, arg(help="the second text, for an encoder of pairs")] = None,
    compare: Annotated[Path | None, arg(metavar="DIR", help="a second model, to see side by side")] = None,
    tokenizer: Annotated[Path | None, arg(help="where the tokenizer lies, if not with the model")] = None,
    export: Annotated[
        Path | None,
        arg(metavar="FILE.html", help="write one self-contained page with this text, and open nothing"),
    ] = None,
    host: Annotated[
        str, arg(help="address to listen on; others than this machine's own let others in")
    ] = "127.0.0.1",
    port: Annotated[int, arg(help="0: any that is free")] = 8321,
    no_open: Annotated[bool, arg(help="do not open the browser")] = False,
) -> None:
    """A page in which one sees a model think: tokens, every step, attention, lens, next token, ablation, cost. Needs no network.

    For example:
      clearhead explore my-model/
      clearhead explore my-model/ --text "The cat sat on the mat" --export cat.html
      clearhead explore my-model/ --compare other-model/ --port 9000 --no-open
    """
    from clearhead.api import load
    from clearhead.explorer.record import export as write
    from clearhead.explorer.record import record

    if export is not None:
        from clearhead.explorer.session import first_given

        m = load(folder, tokenizer=tokenizer)
        made = write(record(m, folder.name or str(folder), first_given(m, text), target, pair), export)
        print(made)
        return
    _serve(folder, text, target, pair, compare, tokenizer, host, port, not no_open)


def _serve(
    folder: Path,
    text: str | None,
    target: str | None,
    pair: str | None,
    compare: Path | None,
    tokenizer: Path | None,
    host: str,
    port: int,
    browser: bool,
) -> None:
    from clearhead.errors import MissingExtraError

    try:
        import uvicorn

        from clearhead.explorer.app import is_loopback, make_app
    except ImportError:
        raise MissingExtraError(
            "the page needs FastAPI and uvicorn: pip install 'clearhead[serve]'"
        ) from None
    from clearhead.api import load
    from clearhead.explorer.session import Opened, Session, starting_example
    from clearhead.hub.checkpoint import describe

    describe(folder)  # a directory that is none is said at once, not on the page
    example = starting_example(text, target, pair)
    models = [Opened(folder.resolve().name, lambda: load(folder, tokenizer=tokenizer), example)]
    if compare is not None:
        describe(compare)
        models.append(Opened(compare.resolve().name, lambda: load(compare)))
    session = Session(models)
    socket = _bind(host, port)
    address = f"http://{'[' + host + ']' if ':' in host else host}:{socket.getsockname()[1]}/"
    if not is_loopback(host):
        print(
            f"warning: {host} can be reached by others: whoever opens {address} can use this model",
            file=sys.stderr,
        )
    server = uvicorn.Server(uvicorn.Config(make_app(session, host), log_level="warning", server_header=False))
    session.start()
    print(f"clearhead explorer: {address}  (Ctrl-C ends it)", file=sys.stderr, flush=True)
    if browser:
        import webbrowser

        webbrowser.open(address)
    server.run(sockets=[socket])


def _bind(host: str, port: int) -> Any:
    """A socket on the address, before anything is loaded; one that is taken is said in a line."""
    import socket

    from clearhead.errors import InputError

    if not 0 <= port <= 65535:
        raise InputError(f"there is no port {port}: choose --port from 0, any that is free, to 65535")
    try:
        kind = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(kind[0], socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(kind[4])
        made.listen(128)  # who comes before the server is there waits, and is not sent away
    except OSError as error:
        reason = error.strerror or error
        raise InputError(
            f"cannot listen on {host}:{port}: {reason}; choose another --port, or 0 for any that is free"
        ) from None
    return made
