"""The server behind its door: it starts the door, tells it how the engines are, takes connections from it."""

import asyncio
import json
import math
import mmap
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import uvicorn

from clearhead.app.explorer.app import allowed_names
from clearhead.run.serve.door import ENGINE, key_digest
from clearhead.run.serve.engine import STALLED, ServeEngine

DOOR = Path(__file__).with_name("door.py")


class ServerBehind(uvicorn.Server):
    """uvicorn's server, whose connections are accepted by a process of its own where the system allows it."""

    def __init__(
        self,
        config: uvicorn.Config,
        host: str,
        listening: socket.socket,
        engines: Sequence[ServeEngine],
        keys: Collection[str] = (),
    ) -> None:
        super().__init__(config)
        self.keys = keys
        self.host, self.listening, self.engines = host, listening, engines
        self.control: socket.socket | None = None
        self.door: subprocess.Popen[bytes] | None = None
        self.tasks: set[asyncio.Task[Any]] = set()  # the loop itself keeps none alive

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, and the door in front of it."""
        self.loop = asyncio.get_running_loop()
        self.listening.listen(self.config.backlog)
        if not hasattr(socket, "send_fds"):  # no process can take another's connections here
            await super().startup([self.listening])
            return
        await super().startup([])
        self.control, theirs = socket.socketpair()
        self.control.setblocking(False)
        with tempfile.TemporaryFile() as file:
            file.write(ENGINE.pack(math.inf, 0.0, 0.0) * len(self.engines))
            file.flush()
            memory = mmap.mmap(file.fileno(), 0)
            for number, engine in enumerate(self.engines):
                engine.sign = Sign(memory, number, engine)
            given = (self.listening.fileno(), theirs.fileno(), file.fileno())
            names = allowed_names(self.host)
            keys = [key_digest(key.encode()).hex() for key in self.keys]
            settings = {"names": None if names is None else sorted(names), "keys": keys}
            command = [sys.executable, "-I", "-S", str(DOOR), *map(str, given)]
            self.door = subprocess.Popen(
                command, stdin=subprocess.PIPE, pass_fds=given, start_new_session=True
            )
            assert self.door.stdin is not None
            with self.door.stdin as pipe:
                pipe.write(json.dumps(settings).encode())
        theirs.close()
        self.loop.add_reader(self.control, self._take)

    def _take(self) -> None:
        """Take the connections that the door has handed over; without a door, accept them here."""
        assert self.control is not None
        try:
            while True:
                got, found, _, _ = socket.recv_fds(self.control, 1, 1)
                for number in found:
                    one = socket.socket(fileno=number)
                    self._begin(self.loop.connect_accepted_socket(self._protocol, one))
                if not got:
                    break
        except BlockingIOError:
            return
        except OSError:
            pass
        self.loop.remove_reader(self.control)
        if not self.should_exit:
            self._begin(self._listen())

    async def _listen(self) -> None:
        self.servers.append(await self.loop.create_server(self._protocol, sock=self.listening))

    def _begin(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: Any) -> None:
        self.tasks.discard(task)
        if not task.cancelled():
            task.exception()  # a client that is gone already

    def _protocol(self) -> Any:
        kind: Any = self.config.http_protocol_class
        return kind(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the door, and then end as uvicorn does."""
        if self.control is not None:
            self.loop.remove_reader(self.control)
            self.control.close()  # the door ends with it
        await super().shutdown([self.listening])
        if self.door is not None:
            await asyncio.to_thread(self.door.wait)


class Sign:
    """What the door may know of one engine: until when it counts as well, and its room."""

    def __init__(self, memory: mmap.mmap, number: int, engine: ServeEngine) -> None:
        self.memory, self.place, self.engine = memory, number * ENGINE.size, engine
        self._lock = threading.Lock()
        self()

    def __call__(self) -> None:
        """Write it down."""
        engine = self.engine
        with self._lock:  # what is written last is what was seen last
            until = engine.moved + STALLED if engine.busy else math.inf
            ENGINE.pack_into(self.memory, self.place, until, engine.room, engine.decided)
