"""Serving checked: kills, idle connections, clients of other libraries, generated schemas."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import re
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from importlib.metadata import version

from benchmarks.common import case_parser, save
from benchmarks.serve import ask, bytes_tokenizer, small, started
from tests.serve import kills, mixes
from tests.serve.served import serving
from tests.serve.test_http import call

import clearhead as ch
from clearhead.errors import InputError
from clearhead.run.generate.grammar import check_constraint
from clearhead.run.serve import server
from clearhead.run.serve.answers import choices_of
from clearhead.run.serve.engine import ServeEngine
from clearhead.run.serve.limits import Limits
from clearhead.run.serve.protocol import CompletionBody

# serve_kills ----------------------------------------------------------------------------------------------


BROKEN = (ConnectionError, asyncio.IncompleteReadError, OSError)


async def one(port: int, number: int, m: ch.Model, seen: Counter[str]) -> None:
    """Ask until there is a whole answer, and compare it with the same request alone."""
    body = {"prompt": f"Request {number}", "max_tokens": 40, "temperature": 0, "stream": number % 2 == 1}
    wanted = m.generate(body["prompt"], 40, num_beams=1).text
    while True:
        try:
            answer = await asyncio.wait_for(ask(port, "/v1/completions", body), 120)
        except TimeoutError:
            seen["hung"] += 1
            return
        except BROKEN as error:
            seen[f"try again: {type(error).__name__}"] += 1
        else:
            text = _text(answer.text, body["stream"])
            if answer.status == 200 and text is not None:
                seen["answers"] += 1
                seen["different"] += text != wanted
                return
            seen[f"try again: {'cut short' if answer.status == 200 else answer.status}"] += 1
        await asyncio.sleep(0.2)


def _text(raw: str, stream: bool) -> str | None:
    """Return the text of an answer; None where it is not whole."""
    if not stream:
        try:
            return json.loads(raw)["choices"][0]["text"]
        except ValueError:
            return None
    events = [line[6:].strip() for line in raw.split("\n") if line.startswith("data: ")]
    if not events or events[-1] != "[DONE]":
        return None
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


async def serve_killed(folder: pathlib.Path, times: int, clients: int) -> dict[str, object]:
    """Kill the server so often under load; return what clients saw."""
    m, seen, ended = ch.load(folder), Counter(), False
    process, port = started(folder)

    async def client(number: int) -> None:
        turn = 0
        while not ended:
            await one(port, 1000 * turn + number, m, seen)
            turn += 1

    tasks = [asyncio.create_task(client(number)) for number in range(clients)]
    downs = []
    for turn in range(times):
        before = seen["answers"]
        while seen["answers"] < before + clients:  # it works again
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.1 * (turn % 5))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        down = time.monotonic()
        process, _ = await asyncio.to_thread(started, folder, port=port)
        downs.append(round(time.monotonic() - down, 1))
    ended = True
    await asyncio.gather(*tasks)
    process.terminate()
    process.communicate()
    return {"kills": times, "seconds down": downs, **dict(seen), "hung": seen["hung"]}


def run_serve_kills() -> None:
    """Kill a batch and a server under load, start them again, and look for what is lost.

        python benchmarks/run.py serve_kills [--kills 20] [--servers 5] [--clients 8] [--save]

    `batch`: each of the kills comes at a random moment or within the write of a line
    (`tests/serve/kills.py`). `server`: clients ask without pause, half of them for streams, while SIGKILL
    ends the server and another one takes its port. What a client gets is a whole answer, equal to
    `m.generate` alone, or an error that it can try again: no connection, one that breaks off, or a stream
    without its end.
    """
    parser = case_parser(run_serve_kills)
    for name, value in (("kills", 20), ("servers", 5), ("clients", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    results: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as work:
        folder = pathlib.Path(work)
        m = mixes.model("rope-gqa", bytes_tokenizer())
        results.append({"title": "batch", **kills.killed(m, folder, given.kills, 0)})
        print(results[-1], flush=True)
        tiny = small(folder, "tiny", d_model=64, n_layers=2, n_heads=2, max_positions=512)
        found = asyncio.run(serve_killed(tiny, given.servers, given.clients))
        results.append({"title": "server under load", **found})
        print(results[-1], flush=True)
    if given.save:
        save("serve_kills", results)


# serve_idle -----------------------------------------------------------------------------------------------


RESULT = pathlib.Path(__file__).parent / "results" / "serve_idle.json"
KEPT = 1000  # connections that the server keeps in this run


def health(address: str) -> dict[str, float]:
    """Return how long the health route takes, in milliseconds."""
    took = []
    for _ in range(50):
        start = time.perf_counter()
        assert call(address, "/health")[0] == 200
        took.append(1000 * (time.perf_counter() - start))
    return {"median ms": round(statistics.median(took), 2), "largest ms": round(max(took), 2)}


def memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def run_serve_idle() -> None:
    """Open thousands of connections that say nothing, and see what others notice.

    python benchmarks/run.py serve_idle [COUNT]
    """
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 3000
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(files, 4 * count), files))
    server.Connection.most = KEPT
    with serving({"m": ServeEngine(mixes.model("learned", bytes_tokenizer()))}) as address:
        host, port = address.removeprefix("http://").split(":")
        body = {"connections": count, "kept at most": KEPT, "before": health(address), "MiB before": memory()}
        idle = [socket.create_connection((host, int(port)), 60) for _ in range(count)]
        body["while they are open"] = health(address)
        closed = 0
        for one in idle:
            one.setblocking(False)
            try:
                closed += one.recv(1) == b""
            except ConnectionResetError:
                closed += 1
            except BlockingIOError:
                pass
        body |= {"closed by the server": closed, "MiB after": memory()}
        asked = {"prompt": "x", "max_tokens": 5, "temperature": 0}
        assert call(address, "/v1/completions", asked)[0] == 200
        for one in idle:
            one.close()
    assert count - closed <= KEPT
    RESULT.write_text(json.dumps(body, indent=1) + "\n")
    print(body)


# serve_clients --------------------------------------------------------------------------------------------


SERVE_CLIENTS_RESULT = pathlib.Path(__file__).parent / "results" / "serve_clients.json"
PAIRS = [("Once upon", " a time"), ("a", "b"), ("To be or not", " to be, that is"), ("x" * 60, "yz")] * 5
CLIENTS = {
    "litellm": """
import json, sys, importlib.metadata
import litellm
base, _ = sys.argv[1:]
given = dict(api_base=base + "/v1", api_key="k", temperature=0)
messages = [{"role": "user", "content": "Hi"}]
whole = litellm.completion("openai/writer", messages, max_tokens=12, **given)
chunks = list(litellm.completion("openai/writer", messages, max_tokens=12, stream=True, **given))
schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
          "additionalProperties": False}
form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
held = litellm.completion("openai/writer", messages, max_tokens=40, response_format=form, **given)
del given["temperature"]
vectors = litellm.embedding("openai/reader", ["a", "b c"], **given)
print(json.dumps({
    "version": importlib.metadata.version("litellm"),
    "whole": whole.choices[0].message.content,
    "streamed": "".join(one.choices[0].delta.content or "" for one in chunks),
    "held": held.choices[0].message.content,
    "vectors": [one["embedding"] for one in vectors.data],
}))
""",
    "lm_eval": """
import json, sys, importlib.metadata
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
import lm_eval.models
base, folder = sys.argv[1:]
pairs = json.load(sys.stdin)
asked = f"base_url={base}/v1/completions,model=writer,tokenizer={folder},max_length=128"
asked += ",tokenizer_backend=huggingface"
lm = get_model("local-completions").create_from_arg_string(asked)
rows = [Instance("loglikelihood", {}, tuple(pair), n) for n, pair in enumerate(pairs)]
print(json.dumps({"version": importlib.metadata.version("lm_eval"), "found": lm.loglikelihood(rows)}))
""",
}


def serve_clients_ask(python: str, name: str, base: str, folder: str) -> dict:
    """Run a client's program; return what it prints."""
    environment = os.environ | {"OPENAI_API_KEY": "k", "HF_HUB_OFFLINE": "1"}
    environment |= {"PYTHONPATH": os.pathsep.join(one for one in sys.path if one.endswith("site-packages"))}
    command = [python, "-c", CLIENTS[name], base, folder]
    made = subprocess.run(
        command, input=json.dumps(PAIRS), capture_output=True, text=True, env=environment, timeout=900
    )
    assert made.returncode == 0, made.stderr[-3000:]
    return json.loads(made.stdout.splitlines()[-1])


def litellm(writer, reader, found: dict) -> dict:
    """Compare what litellm got with the library."""
    wanted = writer.generate(writer.tokenizer.encode("<user>Hi\n<a>").ids, 12, num_beams=1).text
    assert found["whole"] == found["streamed"] == wanted
    assert type(json.loads(found["held"])["a"]) is bool
    rows = zip(found["vectors"], reader.embed(["a", "b c"]).tolist())
    apart = max(abs(a - b) for row, mine in rows for a, b in zip(row, mine, strict=True))
    assert apart < 1e-5
    return {"version": found["version"], "texts": "equal", "largest difference of vectors": apart}


def lm_eval(writer, reader, found: dict) -> dict:
    """Compare the log-likelihoods of lm_eval with `score`."""
    apart = 0.0
    for (context, text), (value, _) in zip(PAIRS, found["found"], strict=True):
        scored = writer.score(context + text).logprobs[len(context) :]
        apart = max(apart, abs(value - sum(scored)))
    assert apart < 1e-4
    return {"version": found["version"], "pairs": len(PAIRS), "largest difference of log-likelihoods": apart}


def schemathesis(python: str, base: str) -> dict:
    """Send data that is right and wrong by our own description, and look for a 500."""
    command = [python, "-m", "schemathesis.cli", "run", f"{base}/openapi.json", "--mode", "all"]
    command += ["--checks", "not_a_server_error", "--max-examples", "40", "--seed", "1", "--no-color"]
    command += ["--header", "Authorization: Bearer k", "--generation-database", "none"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=3000)
    print(made.stdout[-4000:], made.stderr[-2000:])
    assert made.returncode == 0, "schemathesis found a failure"
    cases = re.search(r"(\d+) generated", made.stdout)
    return {"cases": int(cases[1]) if cases else None, "server errors": 0}


def run_serve_clients() -> None:
    """Let clients that others wrote talk to a server: litellm, lm_eval and schemathesis.

        python benchmarks/run.py serve_clients litellm=PYTHON lm_eval=PYTHON schemathesis=PYTHON

    PYTHON is an interpreter that has the package; each pulls much, so give each an environment of its own.
    """
    pythons = dict(argument.split("=", 1) for argument in sys.argv[1:])
    tokenizer = bytes_tokenizer()
    writer = mixes.model("rope-gqa", tokenizer)
    writer.settings["chat_template"] = mixes.TEMPLATE
    reader = mixes.model("learned", tokenizer, family="encoder", head="none")
    body = json.loads(SERVE_CLIENTS_RESULT.read_text()) if SERVE_CLIENTS_RESULT.exists() else {}
    engines = {"writer": ServeEngine(writer), "reader": ServeEngine(reader)}
    with tempfile.TemporaryDirectory() as folder, serving(engines, keys=["k"]) as base:
        writer.save(folder)
        for name, python in pythons.items():
            if name == "schemathesis":
                body[name] = schemathesis(python, base)
            else:
                body[name] = globals()[name](writer, reader, serve_clients_ask(python, name, base, folder))
            print(name, body[name], flush=True)
    body["openai"] = {"version": version("openai"), "see": "tests/serve/test_openai_client.py"}
    SERVE_CLIENTS_RESULT.write_text(json.dumps(body, indent=1) + "\n")


# serve_schemas ----------------------------------------------------------------------------------------------


SERVE_SCHEMAS_RESULT = pathlib.Path(__file__).parent / "results" / "serve_schemas.json"
SMALL = {"type": "integer", "minimum": 0, "maximum": 6}
NUMBER = {"type": "integer", "minimum": -1000, "maximum": 1000}
TEXT = {"type": "string", "maxLength": 8, "pattern": '^[a-zA-Z0-9 _"\\\\\\u00e9-]*$'}
SCALAR = {"anyOf": [TEXT, NUMBER, {"type": "boolean"}, {"type": "null"}, {"type": "number"}]}


def table(kind: str, **keywords: object) -> dict:
    """Return the schema of schemas of one type."""
    named = {"type": {"const": kind}, **keywords}
    return {"type": "object", "properties": named, "required": ["type"], "additionalProperties": False}


def schemas(depth: int) -> dict:
    """Return the schema of schemas so many levels deep."""
    patterns = {"enum": ["^[a-z]+$", "^\\d{2,4}$", "(foo|bar)", "^[^x]*$", "^(a|b)*c$", "[A-Z]{2}-\\d"]}
    formats = {"enum": ["date", "time", "date-time", "email", "uuid", "ipv4", "ipv6", "hostname", "uri"]}
    kinds = [
        table("string", minLength=SMALL, maxLength={"type": "integer", "minimum": 6, "maximum": 30}),
        table("string", pattern=patterns),
        table("string", format=formats),
        table("integer", minimum=NUMBER, exclusiveMaximum={**NUMBER, "minimum": 1001, "maximum": 10**9}),
        table("integer", multipleOf={"enum": [2, 3, 7, 10, 25]}),
        table("number", minimum=NUMBER),
        table("boolean"),
        table("null"),
        {
            "type": "object",
            "properties": {"enum": {"type": "array", "items": SCALAR, "minItems": 1, "maxItems": 5}},
            "required": ["enum"],
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {"const": SCALAR},
            "required": ["const"],
            "additionalProperties": False,
        },
    ]
    if depth:
        below = schemas(depth - 1)
        named = {"type": "object", "additionalProperties": below, "propertyNames": TEXT, "maxProperties": 5}
        several = {"type": "array", "items": below, "minItems": 1, "maxItems": 3}
        names = {"type": "array", "items": TEXT, "maxItems": 3, "uniqueItems": True}
        more = {"anyOf": [{"type": "boolean"}, below]}
        kinds += [
            table("object", properties=named, required=names, additionalProperties=more),
            table("object", properties=named, additionalProperties={"const": False}),
            table("array", items=below, minItems=SMALL, maxItems={"type": "integer", "minimum": 6}),
            table("array", prefixItems=several, items={"const": False}),
            {
                "type": "object",
                "properties": {"anyOf": several},
                "required": ["anyOf"],
                "additionalProperties": False,
            },
        ]
    return {"anyOf": kinds}


def drawn(count: int) -> list[dict]:
    """Draw so many schemas, the same ones each time."""
    from hypothesis import HealthCheck, Phase, given, seed, settings
    from hypothesis_jsonschema import from_schema
    from jsonschema import Draft202012Validator

    found: dict[str, dict] = {}
    for depth, most in ((0, count // 2), (1, count), (2, count // 4)):

        @seed(depth)
        @settings(
            max_examples=most,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(from_schema(schemas(depth)))
        def keep(schema: dict) -> None:
            Draft202012Validator.check_schema(schema)
            found.setdefault(json.dumps(schema), schema)

        keep()
    return list(found.values())


def run_serve_schemas() -> None:
    """Hold texts to generated JSON schemas, and validate every one: valid, or cut off at its length.

        pip install hypothesis-jsonschema 'hypothesis<6.130'
        python benchmarks/run.py serve_schemas [COUNT]

    Schemas are drawn by hypothesis-jsonschema from a schema of schemas. A model of random weights, which
    would write anything, writes 200 tokens at temperature 1. A schema that llguidance cannot follow is
    refused by name, which is counted, and another is drawn in its place.
    """
    from jsonschema import Draft202012Validator

    count = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    warnings.simplefilter("ignore")
    m = mixes.model("rope-gqa", bytes_tokenizer(), max_positions=512)
    engine, figures, refused = ServeEngine(m, Limits(waiting=10_000)), Counter(), Counter()
    every = drawn(count)
    every = every[:: max(1, len(every) // count)] + every[1 :: max(1, len(every) // count)]
    asked = []
    for schema in every:
        if len(asked) == count:
            break
        try:
            check_constraint(("json_schema", json.dumps(schema)))
        except InputError as error:
            refused[re.sub(r"^.*JSON schema: |[\d\"'].*$", "", str(error))] += 1
            continue
        stated = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        body = {"prompt": "x", "max_tokens": 200, "seed": len(asked), "response_format": stated}
        asked.append((schema, choices_of(engine, "m", CompletionBody.model_validate(body))))
        asked[-1][1].submit()
    while engine.busy:
        engine.step()
    for schema, served in asked:
        (choice,) = served.answer()["choices"]
        text, reason = choice["text"], choice["finish_reason"]
        figures[reason] += 1
        assert not re.search(r"\s{20}", text), f"{schema}: white space again and again: {text!r}"
        if reason == "stop":
            checker = Draft202012Validator.FORMAT_CHECKER
            Draft202012Validator(schema, format_checker=checker).validate(json.loads(text))
            figures["valid"] += 1
            assert not re.search(r"[:,{\[]\s", re.sub(r'"(\\.|[^"\\])*"', '""', text)), text
    body = {"schemas": len(asked), **figures, "refused by name": dict(refused), "invalid": 0}
    SERVE_SCHEMAS_RESULT.write_text(json.dumps(body, indent=1) + "\n")
    print(body)
