"""Tiny models of every family, one hostile one, and a server for any of them."""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import uvicorn
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

import clearhead as ch
from clearhead.app.explorer.app import make_app
from clearhead.app.explorer.session import Opened, Session
from clearhead.hub.tokenizer import special_ids
from tests.harness import scramble
from tests.tokens.toys import trained

WIDTH = {"d_model": 24, "n_layers": 2, "n_heads": 3, "d_ff": 32, "max_positions": 64}
TEXTS = {
    "decoder": "The king's men, 12 of them.",
    "encoder": "Ein Hund [MASK] speak über England",
    "encoder-decoder": "shall they not speak of England?",
}
FLAG = "window.pwned=1"
HOSTILE = [
    "<script>window.pwned=1;alert(1)</script>",
    "<img src=x onerror=window.pwned=1>",
    '"><svg onload=window.pwned=1>',
    "'><iframe srcdoc='<script>parent.pwned=1</script>'>",
    "</script><script>window.pwned=1</script>",
    "</style><script>window.pwned=1</script>",
    "]]>--><!--<script>",
    "javascript:window.pwned=1",
    "${window.pwned=1}",
    "{{7*7}}",
    "&lt;b&gt;&amp;",
    "\u202eevil\u202c\u2066x\u2069",
    "nul\x00nul",
    "\u2028\u2029line",
    "__proto__",
    "constructor",
    "$&$1$`",
    "\\u003cscript\\u003e",
    "x" * 5000,
]


def _loaded(
    tokenizer: Tokenizer | None,
    seed: int,
    special: dict[str, int] | None = None,
    labels: tuple[str, ...] = (),
    **config: Any,
) -> ch.Model:
    size = {} if tokenizer is None else {"vocab_size": tokenizer.get_vocab_size()}
    model = scramble(ch.Transformer(ch.ModelConfig(**{**WIDTH, **size, **config})), seed).eval()
    found = special_ids(tokenizer, {}, {}, {}) | (special or {})
    return ch.Model(model, tokenizer, special=found, labels=labels)


ENCODER = {"family": "encoder"}
IMAGE = {"input": "patches", "image_size": (12, 12), "patch_size": 4, "class_token": True}
CLASSES = {**ENCODER, "head": "classifier", "n_classes": 3}
# Of each family: the tokenizer's kind and task, the seed, labels, the config.
TOYS: dict[str, tuple[tuple[str, str] | None, int, tuple[str, ...], dict[str, Any]]] = {
    "decoder": (("bpe", "lm"), 1, (), {"n_kv_heads": 1}),
    "encoder": (("bpe", "mlm"), 2, (), {**ENCODER, "head": "mlm", "n_types": 2}),
    "encoder-decoder": (("unigram", "seq2seq"), 3, (), {"family": "encoder-decoder"}),
    "classifier": (("bpe", "classify"), 4, ("good", "bad", "neither"), CLASSES),
    "tagger": (("bpe", "classify"), 9, ("O", "B-PLACE", "I-PLACE"), {**CLASSES, "head": "tagger"}),
    "vectors": (("bpe", "classify"), 8, (), {**ENCODER, "head": "none"}),
    "diffusion": (
        ("bpe", "diffusion"),
        10,
        (),
        {**ENCODER, "head": "lm", "attention": "block-causal(4)"},
    ),
    "vit": (None, 5, ("cat", "dog", "bird", "fish"), {**CLASSES, **IMAGE, "n_classes": 4}),
}


@functools.cache
def toy(family: str) -> ch.Model:
    """A scrambled model of two layers with a tokenizer of its own."""
    kind, seed, labels, config = TOYS[family]
    tokenizer = None if kind is None else trained(*kind)
    special = {}
    if tokenizer is not None and family == "encoder-decoder":
        special = {"bos": tokenizer.token_to_id("<s>"), "eos": tokenizer.token_to_id("</s>")}
        special["decoder_start"] = special["bos"]
    if tokenizer is not None and family == "diffusion":
        special = {"mask": tokenizer.token_to_id("<|mask|>")}
    return _loaded(tokenizer, seed, special, labels, **config)


@functools.cache
def hostile(head: str = "lm") -> ch.Model:
    """A model whose every token, or class, is an attempt to run something; a text is split at the sign ¦."""
    vocabulary = {token: number for number, token in enumerate(["[UNK]", *HOSTILE])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Sequence([])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("¦"), "removed")
    if head == "lm":
        return _loaded(tokenizer, 6)
    return _loaded(tokenizer, 7, labels=tuple(HOSTILE), **{**CLASSES, "n_classes": len(HOSTILE)})


def picture(seed: int = 0, side: int = 20) -> np.ndarray:
    """An image of random colours."""
    return np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)


def unpacked(body: dict[str, Any]) -> np.ndarray:
    """A packed array, as the page reads it."""
    kind = {"f32": np.float32, "i32": np.int32}.get(body["type"], np.uint8)
    values = np.frombuffer(base64.b64decode(body["data"]), kind).reshape(body["shape"])
    if kind is np.uint8:
        values = body["low"] + values.astype(np.float32) * ((body["high"] - body["low"]) / 255)
        return np.asarray(values, dtype=np.float32)
    return values


class Served:
    """A page on a port of this machine."""

    def __init__(self, session: Session, port: int) -> None:
        self.session, self.port, self.url = session, port, f"http://127.0.0.1:{port}"

    def ask(
        self, path: str, body: Any = None, raw: bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and bytes of one answer; a body makes it a POST of JSON."""
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        sent = {"Content-Type": "application/json", **named}
        # As a browser escapes what it is given: spaces, and nothing that is escaped already.
        escaped = urllib.parse.quote(path, safe="/?=&%@,.:+~")
        request = urllib.request.Request(self.url + escaped, data, sent)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, dict(answer.headers), answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, dict(error.headers), error.read()

    def json(self, path: str, body: Any = None) -> Any:
        """The body of an answer that must be good."""
        status, _, raw = self.ask(f"/inside/{path}", body)
        assert status == 200, raw[:300]
        return json.loads(raw)


@contextlib.contextmanager
def serving(*models: Opened, examples: bool = False) -> Iterator[Served]:
    """The page for some models, served on a free port while the block lasts."""
    for opened in models:  # measuring roles and looking for examples take long, and have tests of their own
        opened.roles = {"0.1": "previous token", "1.0": "<b>first</b>"}
        opened.findings = None if examples else []
    session = Session(models)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(make_app(session), log_level="critical", server_header=False))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    session.start()
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield Served(session, listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()
