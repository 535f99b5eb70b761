"""The page of a server: figures without texts, and finished requests in the explorer."""

from __future__ import annotations

import base64
import http.client
import json
from urllib.parse import parse_qs

from clearhead.run.serve.engine import ServeEngine
from clearhead.run.serve.limits import Limits
from tests.serve import mixes
from tests.serve.served import serving
from tests.serve.test_http import call


def redirect(at: str, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(at.removeprefix("http://"))
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, answer.headers["Location"] or ""


def test_the_page_shows_figures_and_opens_finished_requests(byte_tokenizer):
    models = {"writer": "rope-gqa", "of/two": "translator"}
    engines = {
        name: ServeEngine(mixes.model(shape, byte_tokenizer), Limits(block=8))
        for name, shape in models.items()
    }
    with serving(engines, page=True) as at:
        status, headers, text = call(at, "/")
        assert (status, "script-src 'self'" in headers["Content-Security-Policy"]) == (200, True)
        for file in ("serving.js", "serving.css", "style.css", "dom.js"):
            assert file in text or file == "dom.js"
            assert call(at, f"/page/{file}")[0] == 200
        assert call(at, "/page/../app.py")[0] == call(at, "/open/0/1")[0] == call(at, "/open/7/1")[0] == 404
        bodies = [
            {"model": name, "prompt": "A secret", "max_tokens": 5, "temperature": 0} for name in engines
        ]
        answers = [call(at, "/v1/completions", body)[2] for body in bodies]
        written = [answer["choices"][0]["text"] for answer in answers]
        status, _, state = call(at, "/page/state")
        assert "secret" not in json.dumps(state)
        for place, (name, engine) in enumerate(engines.items()):
            (seq,) = engine.finished
            assert (
                state[name]["finished"][0]["written"]
                == len(seq.row.ids)
                == state[name]["totals"]["new_tokens"]
            )
            read = len("A secret") + place  # the second writes after a token of its own
            assert answers[place]["usage"]["prompt_tokens"] == state[name]["totals"]["prompt_tokens"] == read
            status, where = redirect(at, f"/open/{place}/{seq.number}")
            path, _, asked = where.partition("#")
            read = parse_qs(asked)
            ids = [int(one) for one in read["ids"][0].split()]
            source = seq.prompts.source
            assert (status, ids) == (303, seq.tokens if source is None else source[0].tolist())
            assert read.get("written", [""]) == ["" if source is None else written[place]]
            assert call(at, f"{path}inside/model")[2]["name"] == name
            given = {"ids": ids, **({} if source is None else {"target": written[place]})}
            run = call(at, f"{path}inside/run", given)[2]
            assert run["tokens" if source is None else "source"]["ids"] == ids


def test_the_page_asks_for_a_key_as_browsers_know_it(byte_tokenizer):
    engines = {"m": ServeEngine(mixes.model("learned", byte_tokenizer))}
    with serving(engines, keys=["k"], page=True) as at:
        status, headers, _ = call(at, "/")
        assert (status, headers["WWW-Authenticate"]) == (401, "Basic")
        basic = [f"Basic {base64.b64encode(raw).decode()}" for raw in (b"me:k", b"me:no")]
        assert [call(at, "/page/state", Authorization=one)[0] for one in (*basic, "Basic ?")] == [
            200,
            401,
            401,
        ]
        assert call(at, "/explore/0/inside/model")[0] == 401
    with serving(engines) as at:
        assert call(at, "/")[0] == 404
