"""A server in a thread, on a port of its own."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import uvicorn

from clearhead.run.serve.app import make_server
from clearhead.run.serve.engine import ServeEngine
from clearhead.run.serve.server import Connection


@contextmanager
def serving(engines: dict[str, ServeEngine], **options):
    """Serve these engines; give the server's address, and end it afterwards."""
    app = make_server(engines, **options)
    config = uvicorn.Config(app, port=0, log_level="error", lifespan="on", http=Connection)
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
