"""The command `explore`: the page in the browser, or the page in a file."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from clearhead.commands.common import Folder, check_inputs, load_model, option, print_notes
from clearhead.errors import InputError, MissingExtraError, refuse

if TYPE_CHECKING:
    from clearhead.explorer.session import Session


def explore(
    folder: Folder,
    text: Annotated[
        str | None, option("what the page begins with; an image file for a model of images")
    ] = None,
    target: Annotated[
        str | None, option("what the decoder of an encoder-decoder has written; default: its own answer")
    ] = None,
    pair: Annotated[str | None, option("the second text, for an encoder of pairs")] = None,
    compare: Annotated[Path | None, option("a second model, to see side by side", metavar="DIR")] = None,
    tokenizer: Annotated[Path | None, option("where the tokenizer lies, if not with the model")] = None,
    export: Annotated[
        Path | None,
        option("write one self-contained page with this text, and open nothing", metavar="FILE.html"),
    ] = None,
    host: Annotated[
        str, option("address to listen on; others than this machine's own let others in")
    ] = "127.0.0.1",
    port: Annotated[int, option("0: any that is free")] = 8321,
    no_open: Annotated[bool, option("do not open the browser")] = False,
) -> None:
    """See a model think, on a page: tokens, steps, attention, lens, next token, ablation, cost.

    For example:
      clearhead explore my-model/
      clearhead explore my-model/ --text "The cat sat on the mat" --export cat.html
      clearhead explore my-model/ --compare other-model/ --port 9000 --no-open
    """
    check_inputs(folder)
    from clearhead.explorer.session import Opened, Session, first_given, starting_example

    if export is not None:
        from clearhead.explorer.record import export as write
        from clearhead.explorer.record import record

        model = load_model(folder, tokenizer)
        name = folder.name or str(folder)
        print(write(record(model, name, first_given(model, text), target, pair), export))
        return
    from clearhead.hub.checkpoint import describe

    describe(folder)  # a directory without a model is refused at once, not on the page
    example = starting_example(text, target, pair)
    models = [Opened(folder.resolve().name, lambda: load_model(folder, tokenizer), example)]
    if compare is not None:
        describe(compare)
        models.append(Opened(compare.resolve().name, lambda: load_model(compare)))
    _serve(Session(models), host, port, browser=not no_open)


def _serve(session: Session, host: str, port: int, browser: bool) -> None:
    """Serve the page until Ctrl-C."""
    try:
        import uvicorn

        from clearhead.explorer.app import is_loopback, make_app
    except ImportError:
        raise MissingExtraError(
            "the page needs FastAPI and uvicorn: pip install 'clearhead[serve]'"
        ) from None
    listening = _bind(host, port)
    address = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}/"
    if not is_loopback(host):
        print_notes([f"warning: {host} can be reached by others: whoever opens {address} can use this model"])
    server = uvicorn.Server(uvicorn.Config(make_app(session, host), log_level="warning", server_header=False))
    session.start()
    print_notes([f"clearhead explorer: {address}  (Ctrl-C ends it)"])
    if browser:
        import webbrowser

        webbrowser.open(address)
    server.run(sockets=[listening])


def _bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens on the address, before anything is loaded."""
    refuse(
        not 0 <= port <= 65535, f"there is no port {port}: choose --port from 0, any that is free, to 65535"
    )
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(128)  # a browser that comes before the server waits, and is not refused
    except OSError as error:
        raise InputError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; "
            "choose another --port, or 0 for any that is free"
        ) from None
    return made
