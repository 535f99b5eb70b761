"""Let clients that others wrote talk to a server: litellm, lm_eval and schemathesis.

    python benchmarks/serve_clients.py litellm=PYTHON lm_eval=PYTHON schemathesis=PYTHON

PYTHON is an interpreter that has the package; each pulls much, so give each an environment of its own.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from benchmarks.serve_mixes import bytes_tokenizer
from tests.serve import mixes
from tests.serve.served import serving
from tests.serve.test_http import TEMPLATE

from clearhead.run.serve.engine import ServeEngine

RESULT = pathlib.Path(__file__).parent / "results" / "serve_clients.json"
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


def ask(python: str, name: str, base: str, folder: str) -> dict:
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


def main(pythons: dict[str, str]) -> None:
    tokenizer = bytes_tokenizer()
    writer = mixes.model("rope-gqa", tokenizer)
    writer.settings["chat_template"] = TEMPLATE
    reader = mixes.model("learned", tokenizer, family="encoder", head="none")
    body = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    engines = {"writer": ServeEngine(writer), "reader": ServeEngine(reader)}
    with tempfile.TemporaryDirectory() as folder, serving(engines, keys=["k"]) as base:
        writer.save(folder)
        for name, python in pythons.items():
            if name == "schemathesis":
                body[name] = schemathesis(python, base)
            else:
                body[name] = globals()[name](writer, reader, ask(python, name, base, folder))
            print(name, body[name], flush=True)
    body["openai"] = {"version": version("openai"), "see": "tests/serve/test_openai_client.py"}
    RESULT.write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main(dict(one.split("=", 1) for one in sys.argv[1:]))
