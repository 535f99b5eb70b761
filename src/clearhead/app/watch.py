"""A page that shows a training run while it trains: losses, lr, gradient norm, samples, warnings.

It reads log.jsonl, so that it shows finished runs and those of other processes too.
"""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

from clearhead.errors import InputError, plain, refuse
from clearhead.learn.data.files import RECIPE
from clearhead.learn.recipe import SECTIONS, read_recipe
from clearhead.learn.training.events import read_log, warnings_of

HOST = "127.0.0.1"
NAMES = (HOST, "localhost")  # that a browser may ask for: no other page can read a run
PORT = 8322
PAGE = "watch.html"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def address(server: ThreadingHTTPServer) -> str:
    """Return what to open in a browser."""
    return f"http://{HOST}:{server.server_port}/"


def watch(folder: Path, port: int = 0) -> ThreadingHTTPServer:
    """Serve the page of a run's folder from a thread of its own; `port` 0 is any free one."""
    refuse(not 0 <= port < 2**16, f"port {port} must lie between 0 and {2**16 - 1}")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            route = urlsplit(self.path).path
            if (self.headers.get("Host") or "").rsplit(":", 1)[0] not in NAMES:
                self.send_error(403)
            elif route == "/":
                page = resources.files("clearhead.app").joinpath(PAGE).read_bytes()
                self.answer(page, "text/html; charset=utf-8")
            elif route == "/run":
                self.answer(json.dumps(state_of(folder)).encode(), "application/json")
            else:
                self.send_error(404)

        def answer(self, body: bytes, kind: str) -> None:
            self.send_response(200)
            for name, value in (HEADERS | {"Content-Type": kind, "Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            """Write nothing about requests."""

    try:
        server = ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        raise InputError(f"port {port} cannot be used: {error.strerror}; choose another --port") from None
    server.daemon_threads = True
    Thread(target=server.serve_forever, daemon=True).start()
    return server


def state_of(folder: Path) -> dict[str, object]:
    """Return what the page shows of a run: its log, its recipe and its warnings."""
    log = read_log(folder)
    recipe = read_recipe(folder / RECIPE) if (folder / RECIPE).is_file() else None
    return {
        "name": folder.resolve().name,
        "log": log,
        "warnings": [warned._asdict() for warned in warnings_of(log)],
        "recipe": {} if recipe is None else {name: plain(getattr(recipe, name)) for name in SECTIONS},
    }
