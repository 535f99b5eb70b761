"""A server in a thread, on a port of its own."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import uvicorn

from clearhead.serve.app import make_server
from clearhead.serve.engine import ServeEngine


@contextmanager
def serving(engines: dict[str, ServeEngine], **options):
    """Serve these engines; give the server's address, and end it afterwards."""
    config = uvicorn.Config(make_server(engines, **options), port=0, log_level="error", lifespan="on")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)
