"""What a hostile client may try, each attempt refused, bounded or without effect."""

from __future__ import annotations

import hashlib
import hmac
import io
import json
import logging
import socket
import threading
import time
from contextlib import contextmanager, redirect_stderr, redirect_stdout

import pytest
import uvicorn

from clearhead.app.commands.models import bind
from clearhead.run.serve import server
from clearhead.run.serve.app import make_server
from clearhead.run.serve.embeddings import embedding
from clearhead.run.serve.engine import ServeEngine
from clearhead.run.serve.limits import Limits
from clearhead.run.serve.server import Connection
from tests.serve import mixes
from tests.serve.served import serving
from tests.serve.test_http import call
from tests.tokens.test_chat import EMPTY, ESCAPES

CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
PROMPT = {"prompt": "x", "max_tokens": 1}


@pytest.fixture(scope="module")
def address(writer):
    with serving({"m": ServeEngine(writer, Limits(block=8))}, keys=["one", "two", "schlüssel"]) as at:
        yield at


def raw(address: str, *chunks: bytes, wait: float = 0.0, seconds: float = 30.0) -> bytes:
    """Send chunks, some time apart; return all that is answered until the server closes."""
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), seconds) as line:
        for chunk in chunks:
            line.sendall(chunk)
            time.sleep(wait)
        found = b""
        try:
            while part := line.recv(65536):
                found += part
        except (TimeoutError, ConnectionResetError):
            pass
    return found


KEY = b"Host: 127.0.0.1\r\nAuthorization: Bearer one\r\nConnection: close\r\n"
HEAD = b"POST /v1/completions HTTP/1.1\r\n" + KEY
BODY = json.dumps(PROMPT).encode()


@pytest.mark.parametrize(
    "request_bytes",
    [
        HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n" + BODY,
        HEAD + b"Content-Length: %d, 5\r\n\r\n" % len(BODY) + BODY,
        HEAD + b"Content-Length: 40\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /x HTTP/1.1\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Content-Length: -5\r\n\r\n",
        HEAD + b"Content-Length: +5\r\n\r\n" + BODY,
        HEAD + b"Content-Length : 5\r\n\r\n" + BODY,
        HEAD + b"Host: evil.example\r\n\r\n",
        HEAD + b"X: a\r\n Content-Length: 5\r\n\r\n",
        HEAD + b"X: a\0b\r\n\r\n",
        HEAD + b"A: " + b"x" * 100_000 + b"\r\n\r\n",
        b"GET http://evil.example/v1/models HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 no HTTP at all\r\n\r\n",
    ],
    ids=range(14),
)
def test_headers_that_can_be_read_in_two_ways_are_refused(address, request_bytes):
    found = raw(address, request_bytes)
    assert found.split(b" ")[1][:1] == b"4", found
    assert found.count(b"HTTP/1.1 ") == 1  # nothing was read as a second request


def test_slow_headers_and_slow_bodies_end(address, monkeypatch):
    monkeypatch.setattr(server, "HEADER_SECONDS", 0.2)
    monkeypatch.setattr(server, "BODY_SECONDS", 0.2)
    assert raw(address) == b""  # closed, though nothing was ever sent
    assert raw(address, b"GET /v1/models HTTP/1.1\r\n", b"Host: 127", wait=0.05) == b""
    again = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    assert raw(address, again, b"GET /health HT", wait=0.05).startswith(b"HTTP/1.1 200")
    found = raw(address, HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY), BODY[:3])
    assert found.startswith(b"HTTP/1.1 408")


def test_a_body_without_an_end_is_cut(address, monkeypatch):
    monkeypatch.setattr(server, "LARGEST_BODY", 1000)
    chunk = b"3e8\r\n" + b"x" * 1000 + b"\r\n"
    assert raw(address, HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + 3 * chunk).startswith(b"HTTP/1.1 413")


def test_idle_connections_are_few_and_make_room(address, monkeypatch):
    monkeypatch.setattr(server.Connection, "most", 8)
    host, port = address.removeprefix("http://").split(":")
    idle = [socket.create_connection((host, int(port)), 10) for _ in range(40)]
    try:
        assert call(address, "/health")[0] == 200
        idle[0].settimeout(10)
        assert idle[0].recv(1) == b""  # the one that waited longest is closed
    except ConnectionResetError:
        pass
    finally:
        for one in idle:
            one.close()


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "m/../m", "m\0", "..", "%2e%2e", "", "M", "m ", "http://x/m"]
)
def test_a_model_s_name_is_no_path(address, name):
    status, _, found = call(address, "/v1/completions", PROMPT | {"model": name}, Authorization="Bearer one")
    assert status == 404
    assert "is not here" in found["error"]["message"]


@pytest.mark.parametrize("path", ["/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/v1/models/../x", "//x"])
def test_no_file_is_served(address, path):
    found = raw(address, f"GET {path} HTTP/1.1\r\n".encode() + KEY + b"\r\n")
    assert found.startswith(b"HTTP/1.1 404")


@pytest.mark.parametrize("template", [*ESCAPES[::9], EMPTY[0]])
def test_a_template_cannot_leave_its_sandbox(address, writer, template):
    writer.settings["chat_template"] = template
    try:
        status, _, found = call(address, "/v1/chat/completions", CHAT, Authorization="Bearer one")
    finally:
        writer.settings["chat_template"] = mixes.TEMPLATE
    assert status == 400
    assert "chat template" in found["error"]["message"]


def test_what_a_user_writes_is_never_a_template(address, writer):
    text = "{{ 7 * 7 }}{% for x in messages %}"
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
    found = call(address, "/v1/chat/completions", body, Authorization="Bearer one")[2]
    assert found["usage"]["prompt_tokens"] == len(f"<user>{text}\n<a>")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "enable_thinking"),
        ({"messages": [{"role": "user", "content": "x", "mood": "1"}]}, "messages.0.mood"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "type 'image_url'"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": ["x"]}, "messages.0"),
    ],
)
def test_what_a_template_would_pass_over_is_refused(address, change, named):
    status, _, found = call(address, "/v1/chat/completions", CHAT | change, Authorization="Bearer one")
    assert (status, named in found["error"]["message"]) == (400, True), found


def test_every_key_is_compared_whatever_is_sent(address, monkeypatch):
    compared = []
    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append(b) or compare(a, b))
    for given, status in (("one", 200), ("two", 200), ("o", 401), ("", 401), ("x" * 5000, 401), ("é", 401)):
        compared.clear()
        assert call(address, "/v1/models", Authorization=f"Bearer {given}")[0] == status
        assert compared == [hashlib.sha256(key.encode()).digest() for key in ("one", "two", "schlüssel")]
    assert call(address, "/v1/models")[0] == 401
    assert call(address, "/metrics")[0] == 401


@pytest.mark.parametrize(
    ("given", "status"),
    [
        *((f"{scheme} one", 200) for scheme in ("Bearer", "bearer", "BEARER")),
        ("Bearer  one", 200),
        ("Basic OnR3bw==", 200),  # a browser's, of no name and the key two
        ("basic YW55OnR3bw==", 200),
        *(
            (f"{scheme} one", 401)
            for scheme in ("Foo", "Token", "Basic", "Digest", "Bearer:", "Bearerone", "")
        ),
        *(
            (text, 401)
            for text in ("one", "Bearer", "Bearer ", "Bearer one two", "Bearer one,", "Bearer\tone")
        ),
    ],
)
def test_a_key_comes_by_a_scheme_that_is_known(address, given, status):
    assert call(address, "/v1/models", Authorization=given)[0] == status


def cached(at: str, path: str, body: dict, key: str) -> int:
    status, _, found = call(at, path, body, Authorization=f"Bearer {key}")
    assert status == 200, found
    return found["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_cached_prefixes_are_shared_within_a_key_alone(writer):
    chat = {"messages": [{"role": "user", "content": "a secret of forty letters or somewhat more"}]}
    bodies = {"/v1/completions": {"prompt": chat["messages"][0]["content"]}, "/v1/chat/completions": chat}
    limits = Limits(block=8)
    with serving({"m": ServeEngine(writer, limits)}, keys=["one", "two"]) as at:
        for path, body in bodies.items():
            body = body | {"max_tokens": 1}
            assert cached(at, path, body, "one") == 0
            assert cached(at, path, body, "one") >= 40
            assert cached(at, path, body, "two") == 0  # it tells nothing of what the other one has asked
            assert cached(at, path, body, "two") >= 40
            assert cached(at, path, body | {"cache_salt": "x"}, "one") == 0
    with serving({"m": ServeEngine(writer, limits)}, keys=["one", "two"], share_prefix_cache=True) as at:
        body = bodies["/v1/completions"] | {"max_tokens": 1}
        assert [cached(at, "/v1/completions", body, key) for key in ("one", "two")] == [0, 40]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "localhost"}, 200),
        ({"Host": "127.0.0.1:1"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": "127.0.0.1@evil.example"}, 403),
        ({"Host": ""}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1.evil.example"}, 403),
        ({"Origin": "http://localhost:3000"}, 200),
    ],
)
def test_names_of_the_server_s_own_address_alone(address, headers, status):
    assert call(address, "/v1/models", Authorization="Bearer one", **headers)[0] == status


def test_prompts_are_in_no_log(writer, caplog):
    caplog.set_level(logging.DEBUG)
    out, secret = io.StringIO(), "my-secret-prompt"
    engine = ServeEngine(writer, Limits(block=8))
    with redirect_stdout(out), redirect_stderr(out), serving({"m": engine}) as at:
        for body in ({}, {"stream": True}, {"n": 99}, {"max_tokens": 10**6}, {secret: 1}, {"model": secret}):
            call(at, "/v1/completions", {"prompt": secret, "max_tokens": 2} | body)
        broken, engine.check_room = engine.check_room, lambda tokens=0: [][0]
        assert call(at, "/v1/completions", {"prompt": secret})[0] == 500
        engine.check_room = broken
        raw(at, f"GET /{secret} HTTP/9.9\r\n\r\n".encode())
    assert secret not in caplog.text + out.getvalue()
    with serving({"m": ServeEngine(writer)}, log_prompts=True) as at:
        call(at, "/v1/completions", {"prompt": [f"{secret}\nforged line", "b"], "max_tokens": 2})
        call(at, "/v1/completions", {"prompt": writer.encode(["as ids"])[0], "max_tokens": 2})
    lines = [record.getMessage() for record in caplog.records if record.name == "clearhead.run.serve"]
    assert [json.loads(line)["prompts"] for line in lines] == [[f"{secret}\nforged line", "b"], ["as ids"]]
    assert not any("\n" in line for line in lines)


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"prompt":' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"messages":' + b'[{"role":' * 900 + b"1" + b"}]" * 900 + b"}",
        b'{"json_schema":'
        + b'{"a":' * 900
        + b"1"
        + b"}" * 900
        + b',"messages":[{"role":"u","content":"x"}]}',
        b'{"prompt":"\\ud800","max_tokens":1}',
        b'{"prompt":"x","seed":1e400}',
        b'{"prompt":"x","temperature":NaN}',
        b'{"prompt":"x","max_tokens":' + b"9" * 5000 + b"}",
        b"\xff\xfe{}",
        b"",
        b"null",
        b'"x"',
    ],
    ids=range(12),
)
def test_bodies_that_are_no_request_are_refused(address, body):
    path = b"/v1/chat/completions" if b"messages" in body else b"/v1/completions"
    head = HEAD.replace(b"/v1/completions", path) + b"Content-Type: application/json\r\n"
    found = raw(address, head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    assert found.startswith(b"HTTP/1.1 400"), found[:300]


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/completions", {"prompt": [2**63], "max_tokens": 1}, "prompt.0"),
        ("/v1/completions", {"prompt": [1.5] * 100_000}, "prompt.0"),
        ("/v1/completions", {"prompt": [[True]] * 100_000}, "prompt.0"),
        ("/v1/completions", PROMPT | {"inside": [1] * 100_000}, "inside.0"),
        ("/v1/completions", PROMPT | {f"f{n}": 1 for n in range(50_000)}, "fields: at most 100"),
        (
            "/v1/completions",
            PROMPT | {"structured_outputs": {f"f{n}": 1 for n in range(50_000)}},
            "at most 100",
        ),
        ("/v1/completions", {"prompt": ["x"] * 2000, "n": 2}, "2000 prompts with 2 choices"),
        ("/v1/completions", {"prompt": [65] * 500_000}, "500000 tokens does not fit"),
        ("/detokenize", {"tokens": [-1] * 100_000}, "tokens.0"),
        ("/v1/chat/completions", {"messages": [{f"f{n}": 1 for n in range(50_000)}]}, "at most 100"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "sound": 1}]}]},
            "sound",
        ),
    ],
    ids=range(11),
)
def test_what_is_wrong_many_times_over_is_refused_at_once(address, path, body, named):
    """A body of a megabyte once took seconds of the loop and a gigabyte, for one line each of its faults."""
    start = time.process_time()
    status, _, found = call(address, path, body, Authorization="Bearer one")
    assert (status, named in found["error"]["message"]) == (400, True), found
    assert time.process_time() - start < 3


def test_a_client_that_is_refused_while_it_sends_reads_why(address):
    size = server.LARGEST_BODY + 1_000_000
    found = raw(address, HEAD + b"Content-Length: %d\r\n\r\n" % size + b"x" * size)
    assert found.startswith(b"HTTP/1.1 413")


def test_no_page_fetches_from_elsewhere_and_names_are_not_kept(address, writer):
    for path in ("/docs", "/redoc"):
        assert call(address, path, Authorization="Bearer one")[0] == 404
    for number in range(200):
        embedding(f"name {number}")
    assert embedding.cache_info().currsize <= 64


# Work that there is no room for is refused at once; only work that can be done takes room ----------------


ASK = b'{"prompt": "Hi", "max_tokens": 3, "temperature": 0}'


@contextmanager
def served(tokenizer, monkeypatch, keys=()):
    """A server of an engine that takes no steps by itself."""
    engine = ServeEngine(mixes.model("learned", tokenizer), Limits(running=1, waiting=1))
    engine.start = lambda: None
    app = make_server({"m": engine}, drain=0.0, keys=keys)
    monkeypatch.setattr(Connection, "refusal", app.state.admission.early)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on", http=Connection))
    listening = bind("127.0.0.1", 0)
    server.port, server.engine = listening.getsockname()[1], engine
    thread = threading.Thread(target=server.run, args=[[listening]], daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield server
    server.should_exit = True
    thread.join(30)
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", server.port), 5).close()


def told(port: int, line: str, body: bytes = b"", more: str = "") -> bytes:
    """Send a request, and return all that comes back."""
    head = (
        f"{line} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n{more}"
    )
    with socket.create_connection(("127.0.0.1", port), 20) as one:
        one.sendall(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        found = b""
        while part := one.recv(1 << 16):
            found += part
        return found


def test_health_and_refusals_while_the_engine_is_full(byte_tokenizer, monkeypatch):
    with served(byte_tokenizer, monkeypatch) as server:
        seqs = [server.engine.submit([20, 21], {"max_new_tokens": 2}) for _ in range(2)]
        assert told(server.port, "GET /health").startswith(b"HTTP/1.1 200 ")
        for body in (ASK, ASK + b" " * 3_000_000, b"no JSON"):  # its body is not looked at
            refused = told(server.port, "POST /v1/completions", body)
            assert refused.startswith(b"HTTP/1.1 429 ")
            assert b"retry-after: 1" in refused.lower()
            assert b"try again later" in refused
        while server.engine.busy:
            server.engine.step()
        assert all(seq.wait(0) for seq in seqs)
        server.engine.moved, server.engine.waiting = -1e9, [seqs[0]]
        assert told(server.port, "GET /health").startswith(b"HTTP/1.1 503 ")
        server.engine.waiting = type(server.engine.finished)()


def test_a_request_that_is_being_encoded_takes_room(byte_tokenizer, monkeypatch):
    with served(byte_tokenizer, monkeypatch) as server, stepping(server.engine):
        with server.engine.admit(), server.engine.admit():
            assert told(server.port, "POST /v1/completions", ASK).startswith(b"HTTP/1.1 429 ")
        assert told(server.port, "POST /v1/completions", ASK).startswith(b"HTTP/1.1 200 ")
        assert server.engine.admitted == 0


@contextmanager
def stepping(engine: ServeEngine):
    """Take the engine's steps in a thread."""
    ended = threading.Event()
    stepped = threading.Thread(target=lambda: [engine.step() for _ in iter(lambda: ended.wait(0.005), True)])
    stepped.start()
    yield
    ended.set()
    stepped.join()


def flood(port: int, raw: bytes, count: int = 40) -> list[socket.socket]:
    """Send the same bytes over so many connections, and leave them open."""
    made = [socket.create_connection(("127.0.0.1", port), 20) for _ in range(count)]
    for one in made:
        one.sendall(raw)
    return made


def head_of(body: bytes, *more: str, length: int | None = None) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json", *more]
    return "\r\n".join([*lines, f"Content-Length: {length or len(body)}", "", ""]).encode() + body


KNOWN = "Authorization: Bearer right"
WRONG = {
    "no key": head_of(ASK),
    "wrong key": head_of(ASK, "Authorization: Bearer wrong"),
    "wrong scheme": head_of(ASK, "Authorization: Foo right"),
    "two keys": head_of(ASK, KNOWN, "Authorization: Bearer wrong"),
    "no key, half a body": head_of(ASK[:5], length=50),
    "half a body": head_of(ASK[:5], KNOWN, length=50),
    "half a long body": head_of(ASK[:5], KNOWN, length=1_000_000),
    "no body": head_of(b"", KNOWN, length=50),
    "half a head": head_of(ASK, KNOWN).partition(b"Content-Length")[0],
    "no JSON": head_of(b"x" * 20, KNOWN),
    "no model of this name": head_of(ASK[:-1] + b', "model": "other"}', KNOWN),
    "no such field": head_of(ASK[:-1] + b', "other": 1}', KNOWN),
    "too long": head_of(b'{"prompt": "%s"}' % (b"x" * 1000), KNOWN),
}


def test_only_work_that_can_be_done_takes_room_from_others(byte_tokenizer, monkeypatch):
    """40 of each at once, where 2 requests may be on their way; then one that is right is served."""
    with served(byte_tokenizer, monkeypatch, ["right"]) as server:
        for name, raw in WRONG.items():
            opened = flood(server.port, raw)
            if "half" not in name and name != "no body":
                assert all(one.recv(9) == b"HTTP/1.1 " for one in opened), name  # each of them is answered
            with stepping(server.engine):
                found = told(server.port, "POST /v1/completions", ASK, more=f"{KNOWN}\r\n")
            for one in opened:
                one.close()
            assert found.startswith(b"HTTP/1.1 200 "), (name, found)
        # While there is no room, a wrong key is told that it is wrong, and a right one to come again.
        seqs = [server.engine.submit([20, 21], {"max_new_tokens": 2}) for _ in range(2)]
        assert told(server.port, "POST /v1/completions", ASK).startswith(b"HTTP/1.1 401 ")
        refused = told(server.port, "POST /v1/completions", ASK, more=f"{KNOWN}\r\n")
        assert refused.startswith(b"HTTP/1.1 429 ")
        while server.engine.busy:
            server.engine.step()
        assert all(seq.done for seq in seqs)
