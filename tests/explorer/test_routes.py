"""Every route over real HTTP: good answers equal the views, bad questions one line and the right status."""

import base64
import http.client
import io
import json
import time

import numpy as np
import pytest
import torch
from PIL import Image

import clearhead as ch
from clearhead.app.explorer import app as routes
from clearhead.app.explorer.app import HEADERS, is_loopback
from clearhead.app.explorer.interventions import ablated, dictionaries_of, strongest_feature
from clearhead.app.explorer.record import page_files, record
from clearhead.app.explorer.session import KEPT, Opened, Session, named_roles
from clearhead.app.explorer.views import begin
from clearhead.app.views import page_view as view
from clearhead.errors import InputError
from clearhead.hub.tokens.text import labels
from clearhead.inside.attention import attention
from clearhead.inside.features.dictionary import Dictionary
from clearhead.inside.heads import MIXED, head_roles
from clearhead.learn.tasks.generation import asked_for
from clearhead.run.generate.diffusion import Denoiser
from clearhead.run.generate.sequence import Prompts, Sampler
from tests.explorer.toys import TEXTS, picture, serving, toy, unpacked
from tests.harness import build
from tests.llava import directory, sized_directory, tiled_directory

pytestmark = pytest.mark.ledger("F2", "K2")
FAMILIES = ("decoder", "encoder", "encoder-decoder", "classifier", "vit")


@pytest.fixture(scope="module")
def server():
    with serving(Opened("decoder", lambda: toy("decoder")), Opened("vit", lambda: toy("vit"))) as served:
        while served.session.models[1].m is None:
            pass
        yield served


@pytest.fixture
def run(server):
    return server.json("run", {"text": TEXTS["decoder"]})["run"]


def asked(family):
    """An input as the page sends it, and as `begin` takes it."""
    if family != "vit":
        text = TEXTS.get(family, "They shall speak")
        return {"text": text}, text
    image, buffer = picture(2), io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return {"image": "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()}, image


def timeless(body):
    """A body without what a clock says."""
    if isinstance(body, dict):
        return {name: timeless(entry) for name, entry in body.items() if name != "seconds"}
    return [timeless(entry) for entry in body] if isinstance(body, list) else body


def same_heads(got, expected):
    """Equal but for rounding, since a file's layers are recorded in one eager pass, and for roles."""
    for one, other in zip(got.pop("heads"), expected.pop("heads"), strict=True):
        assert one["name"] == other["name"]
        assert one["entropy"] == pytest.approx(other["entropy"], abs=1e-5)
    both = [unpacked(body.pop("pattern")) for body in (got, expected)]
    assert np.abs(both[0] - both[1]).max() <= 1e-5
    assert got == expected


def test_analyses_of_a_prompt_are_shown_as_their_commands_print_them(server, run):
    listed = server.json("analyses")["analyses"]
    assert {"attention", "lens", "trace"} <= set(listed) and "patch" not in listed
    body = server.json(f"run/{run}/analysis/lens")
    (table,) = body["parts"]
    assert table["headings"][0] == "layer" and "<svg" in body["picture"]
    assert table["rows"][0][0] == "embedding"
    assert server.ask(f"/inside/run/{run}/analysis/patch")[0] == 400


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow
def test_live_views_are_recorded_views(family):
    """Path by path: what the server answers is what a recording holds, and what `view` gives."""
    m = toy(family)
    body, given = asked(family)
    recorded = record(m, family, given)
    with serving(Opened(family, lambda: toy(family))) as served:
        while served.session.models[0].m is None:
            pass
        about = served.json("run", body)
        assert {**about, "run": "recorded"} == recorded["run"]
        compared = 0
        for path, expected in recorded["views"].items():
            kind, _, rest = path.partition("/recorded/")
            if kind != "run" or (rest.startswith("step/") and not rest.endswith(("pattern", "embedding"))):
                continue
            got = timeless(served.json(f"run/{about['run']}/{rest}"))
            expected = timeless(json.loads(json.dumps(expected)))
            if rest.startswith("attention/"):
                same_heads(got, expected)
            elif rest.startswith("edge/"):  # a file's edges are cut together, in one batch
                assert got == {
                    key: pytest.approx(value, abs=1e-6) if isinstance(value, float) else value
                    for key, value in expected.items()
                }, rest
            else:
                assert got == expected, rest
            compared += 1
        assert compared >= 10


def test_denoising_is_that_of_the_denoiser(server, run):
    """Each step's positions, tokens and probabilities, block by block; a file has them too."""
    m, text = toy("diffusion"), "The king"
    asked = {"max_new_tokens": 10, "temperature": 0.0, "denoising_steps": 2}
    request, texts, ends = asked_for(m, [text], asked)
    with torch.inference_mode():
        (row,) = Sampler(m.model, request, ends).begin(Prompts(texts))
        steps = list(Denoiser(m.engine.runner(), request, row, m.mask_id).steps())
    assert row.ids == m.generate(text, **asked).ids and len(steps) > 4
    with serving(Opened("diffusion", lambda: toy("diffusion"))) as served:
        while served.session.models[0].m is None:
            pass
        assert served.json("model")["denoises"] and not server.json("model")["denoises"]
        own = f"/inside/run/{served.json('run', {'text': text})['run']}/denoising"
        body = served.json(f"{own[8:]}?tokens=10&steps=2")
        as_it_opens = served.json(own[8:])
        assert served.ask(f"{own}?tokens=300")[0] == served.ask(f"{own}?steps=0")[0] == 400
    assert body["start"] == len(texts[0]) and body["tokens"] == 10
    named = [list(labels(m.tokenizer, step.tokens)) for step in steps]
    assert [step.pop("labels") for step in body["steps"]] == named
    assert body["steps"] == [step._asdict() for step in steps]
    written = [pair for step in body["steps"] for pair in zip(step["positions"], step["tokens"])]
    assert [token for _, token in sorted(written)] == row.ids
    assert record(m, "diffusion", text)["views"]["run/recorded/denoising"] == as_it_opens
    status, _, answer = server.ask(f"/inside/run/{run}/denoising")
    assert status == 400 and b"diffusion models" in answer


def test_good_answers(server, run):
    m = toy("decoder")
    model = server.json("model")
    assert model["ready"]
    assert model["other"]["name"] == "vit"
    assert model["parameters"] == sum(weight.numel() for weight in m.model.parameters())
    assert server.json("roles")["ready"]
    labels = [view(begin(m, [token]), "next")["label"] for token in (1, 2, 3)]
    assert server.json("labels?ids=1,2,3")["labels"] == labels
    cost = json.loads(json.dumps(ch.cost(m.config, 20, 2, "bfloat16").to_dict()))
    assert server.json("cost?length=20&batch=2&dtype=bfloat16") == cost
    longer = server.json(f"run/{run}/extend", {"token": 5})
    assert longer["tokens"]["ids"] == [*begin(m, TEXTS["decoder"]).prepared.tokens.ids, 5]
    off = {"heads": ["0.1"], "layers": [1], "feedforwards": [], "how": "mean", "position": 2}
    made = ablated(begin(m, TEXTS["decoder"]), ["0.1"], ["1"], [], "mean", 2)
    assert server.json(f"run/{run}/ablate", off) == json.loads(json.dumps(made))
    image = server.json("run", {"model": 1})
    assert image["model"] == 1
    status, headers, page = server.ask(f"/inside/export?run={run}")
    assert status == 200
    assert "attachment" in headers["content-disposition"]
    assert "sandbox" in headers["content-security-policy"]
    assert page.startswith(b"<!doctype html>")


BAD = [
    ("run/r999/trace", None, 404, "forgotten"),
    ("run/r999/extend", {"token": 1}, 404, "forgotten"),
    ("run/r999/ablate", {"heads": ["0.0"], "position": 0}, 404, "forgotten"),
    ("export?run=r999", None, 404, "forgotten"),
    ("export", None, 400, "run"),
    ("run/RUN/nothing", None, 400, "no view"),
    ("run/RUN/attention/self", None, 400, "no view"),
    ("run/RUN/attention/self/9", None, 400, ""),
    ("run/RUN/attention/cross/0", None, 400, ""),
    ("run/RUN/attention/self/x", None, 400, "whole number"),
    ("run/RUN/thumbnails/sideways", None, 400, ""),
    ("run/RUN/rollout/cross", None, 400, ""),
    ("run/RUN/next?position=99", None, 400, "no position 99"),
    ("run/RUN/next?position=-99", None, 400, "no position -99"),
    ("run/RUN/next?position=one", None, 400, "whole number"),
    ("run/RUN/contributions?position=0&token=99999", None, 400, "no token 99999"),
    ("run/RUN/step/blocks.9.attention", None, 400, ""),
    ("run/RUN/step/..%2f..%2fetc", None, 400, ""),
    ("labels?ids=1,x", None, 400, "whole numbers"),
    ("labels?ids=1&model=7", None, 400, "no model 7"),
    ("labels", None, 400, "ids"),
    ("labels?ids=99999999999", None, 400, "99999999999"),
    ("labels?ids=1,4294967296", None, 400, "4294967296"),
    ("run/RUN/contributions?position=0&token=99999999999999999999", None, 400, "999"),
    ("run/RUN/ablate", {"heads": ["\ud800"], "position": 0}, 400, "ud800"),
    ("run/RUN/ablate", {"heads": ["0.0"], "how": "\udfff", "position": 0}, 400, "udfff"),
    ("cost?length=-1", None, 400, ""),
    ("cost?length=x", None, 400, "length"),
    ("cost?dtype=int3", None, 400, ""),
    ("run", {}, 400, "text"),
    ("run", {"text": ""}, 400, "empty"),
    ("run", {"text": 5}, 400, "text"),
    ("run", {"text": "x" * 200_001}, 400, "200,000"),
    ("run", {"text": "a", "target": "b"}, 400, "target"),
    ("run", {"text": "a", "pair": 3}, 400, "pair"),
    ("run", {"text": "a", "model": 5}, 400, "no model 5"),
    ("run", {"text": "a", "model": "x"}, 400, "whole number"),
    ("run", {"text": "a", "model": -1}, 400, "no model"),
    ("run", {"ids": [10**9]}, 400, "ids"),
    ("run", {"ids": [True]}, 400, "ids"),
    ("run", {"ids": []}, 400, "ids"),
    ("run", {"ids": [1] * 5000}, 400, "ids"),
    ("run", {"model": 1, "image": "%%%"}, 400, "image"),
    ("run", {"model": 1, "image": "aGVsbG8="}, 400, "image"),
    ("run", {"model": 1, "image": 5}, 400, "image"),
    ("run/RUN/extend", {"token": -1}, 400, "vocabulary"),
    ("run/RUN/extend", {"token": 10**12}, 400, "vocabulary"),
    ("run/RUN/extend", {"token": "5"}, 400, "whole number"),
    ("run/RUN/ablate", {"heads": ["9.9"], "position": 0}, 400, "9.9"),
    ("run/RUN/ablate", {"heads": "0.0", "position": 0}, 400, "list"),
    ("run/RUN/ablate", {"heads": [["0.0"]], "position": 0}, 400, "list"),
    ("run/RUN/ablate", {"heads": ["0.0"], "how": "gone", "position": 0}, 400, "gone"),
    ("run/RUN/ablate", {"heads": ["0.0"], "position": 99}, 400, "99"),
    ("run/RUN/ablate", {"heads": ["0.0"]}, 400, "position"),
    ("run/RUN/ablate", {"position": 0}, 400, "nothing is named"),
]


def test_bad_questions_get_one_line(server, run):
    for path, body, expected, words in BAD:
        status, headers, raw = server.ask(f"/inside/{path.replace('RUN', run)}", body)
        assert status == expected, (path, body, raw)
        said = json.loads(raw)["error"]
        assert words in said, (path, said)
        assert said.strip() and "\n" not in said, (path, said)
        assert headers["content-security-policy"] == HEADERS["Content-Security-Policy"]
    tokens = begin(toy("decoder"), TEXTS["decoder"]).prepared.tokens
    assert server.json(f"run/{run}/next?position=-1")["position"] == len(tokens) - 1


@pytest.mark.parametrize("half", ["\ud800", "a\udfffb", "\ude00\ud83d"])
def test_half_a_surrogate_pair_is_answered(server, half):
    """In a text, a class and the name of a model: the answer is JSON that the page reads."""
    found = server.json("run", {"text": f"The king {half}"})
    for path in ("trace", "next?position=-1", "attention/self/0", "tokens"):
        status, _, raw = server.ask(f"/inside/run/{found['run']}/{path}")
        assert status < 500, (path, raw)
        json.loads(raw)
    m = toy("classifier")
    named = ch.Model(m.model, m.tokenizer, special=m.special, labels=("good", half, "x" * 100_000))
    with serving(Opened(half, lambda: named)) as served:
        while served.session.models[0].m is None:
            pass
        assert served.json("model")["labels"][1] == half
        run = served.json("run", {"text": "a king"})["run"]
        for path in ("next?position=-1", "trace"):
            status, _, raw = served.ask(f"/inside/run/{run}/{path}")
            assert status == 200, (path, raw)
        status, _, raw = served.ask(f"/inside/export?run={run}")
        assert status == 200, raw


def test_bodies_that_are_none(server, monkeypatch):
    for raw in (b"", b"{", b"[1]", b"5", b"\xff\xfe", b"[" * 100_000, b'{"text": NaN'):
        status, _, said = server.ask("/inside/run", raw=raw)
        assert status == 400, (raw[:20], said)
        assert "JSON" in json.loads(said)["error"]
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        status, _, said = server.ask("/inside/run", raw=b'{"text": "a"}', Content_Type=kind)
        assert status == 400, kind
        assert "application/json" in json.loads(said)["error"]
    monkeypatch.setattr(routes, "LARGEST_BODY", 1000)
    status, _, said = server.ask("/inside/run", {"text": "a" * 2000})
    assert status == 400
    assert "larger than 1,000 bytes" in json.loads(said)["error"]


def raw_get(server, target, host=None, method="GET"):
    """A request whose target is sent as it is written."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.putrequest(method, target, skip_host=True)
    if host != "":
        connection.putheader("Host", host or f"127.0.0.1:{server.port}")
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    connection.close()
    return found


def test_only_files_of_the_table(server):
    """Every file of the page is there as it is; nothing beside or above it is."""
    for name, (text, kind) in page_files().items():
        status, headers, raw = raw_get(server, f"/{name}")
        assert (status, raw.decode()) == (200, text)
        assert headers["content-type"].startswith(kind)
    ups = (
        *("../app.py", "..%2fapp.py", "%2e%2e/app.py", "%2e%2e%2fapp.py", "..\\app.py", "..%5capp.py"),
        *("./main.js/../../app.py", "static/main.js", "/etc/passwd", "%2fetc%2fpasswd", "etc/passwd"),
        *("file:///etc/passwd", "main.js%00", "MAIN.JS", ".", "..", "...", "main.js/", "~root"),
        *("inside/../../app.py", "inside/%2e%2e/%2e%2e/app.py", "__init__.py", "openapi.json"),
        *("inside/run/r1/../../../app.py", "a" * 5000, "con", "docs"),
    )
    for target in [f"/{up}" for up in ups]:
        status, headers, raw = raw_get(server, target)
        assert status in (307, 400, 404, 405), (target, status)
        assert b"root:" not in raw
        assert b"make_app" not in raw
        assert headers["content-security-policy"] == HEADERS["Content-Security-Policy"]


def test_it_answers_to_its_own_names_only(server):
    own = ("127.0.0.1", "localhost", "[::1]", "LOCALHOST")
    good = (*own, *(f"{name}:{server.port}" for name in own))
    bad = ("evil.example", f"evil.example:{server.port}", "127.0.0.1.evil.example", "localhost.evil.example")
    bad += ("", "0.0.0.0", "127.0.0.2", "[::2]", "a@127.0.0.1")
    for host in good:
        assert raw_get(server, "/", host)[0] == 200, host
    for host in bad:
        for target in ("/", "/main.js", "/inside/model"):
            status, headers, _ = raw_get(server, target, host)
            assert status in (400, 403), host
            if status == 403:
                assert headers["content-security-policy"] == HEADERS["Content-Security-Policy"]
    assert all(map(is_loopback, ("127.0.0.1", "localhost", "::1", "127.8.8.8")))
    assert not any(map(is_loopback, ("0.0.0.0", "192.168.0.3", "example.org")))


def test_headers_are_on_every_answer(server, run, monkeypatch):
    def fails(*_):
        raise ZeroDivisionError("by <b>zero</b>")

    monkeypatch.setattr(routes, "page_view", fails)
    answers = {
        path: server.ask(path)
        for path in ("/", "/style.css", "/none", "/inside/model", "/inside/none", f"/inside/run/{run}/trace")
    }
    assert answers[f"/inside/run/{run}/trace"][0] == 500
    assert "ZeroDivisionError" in json.loads(answers[f"/inside/run/{run}/trace"][2])["error"]
    for path, (_, headers, _) in answers.items():
        named = {name.lower(): value for name, value in headers.items()}
        for name, value in HEADERS.items():
            assert named[name.lower()] == value, path
        assert "server" not in named
        assert "access-control-allow-origin" not in named
    policy = HEADERS["Content-Security-Policy"]
    assert "unsafe" not in policy
    assert "http" not in policy
    assert "default-src 'none'" in policy


def test_old_runs_are_forgotten():
    """The latest ones stay; one that was asked for counts as new."""
    opened = Opened("decoder", lambda: toy("decoder"))
    opened.open()
    session = Session([opened])
    names = [session.begin({"ids": [1, 2]})["run"] for _ in range(KEPT)]
    session.run(names[0])
    later = session.begin({"ids": [1]})["run"]
    assert session.run(names[0]) and session.run(later)
    with pytest.raises(KeyError, match="forgotten"):
        session.run(names[1])
    loading = Session([Opened("slow", lambda: toy("decoder"))])
    with pytest.raises(ch.InputError, match="still loading"):
        loading.model()


def test_roles_are_those_of_the_heads():
    """The background names exactly the heads with a clear role; a model that cannot be measured has none."""
    found = head_roles(toy("decoder"))
    assert named_roles(toy("decoder")) == {
        str(head): role for head, role in zip(found.heads, found.roles) if role != MIXED
    }
    session = Session([Opened("vit", lambda: toy("vit"))])
    session._prepare()
    assert isinstance(session.models[0].roles, dict)
    broken = Session([Opened("none", lambda: 1 / 0)])
    broken._prepare()
    assert broken.models[0].failed
    assert "ZeroDivisionError" in broken.models[0].view()["says"]


def test_images_of_any_kind(server):
    """Grey, with a palette, with transparency: each is read; one of the model's own size stays unchanged."""
    exact = picture(4, 12)
    for mode in ("RGB", "L", "P", "RGBA", "1"):
        buffer = io.BytesIO()
        Image.fromarray(exact).convert(mode).save(buffer, "PNG")
        sent = {"model": 1, "image": base64.b64encode(buffer.getvalue()).decode()}
        about = server.json("run", sent)
        assert len(about["tokens"]["labels"]) == 10
        if mode == "RGB":
            expected = view(begin(toy("vit"), exact), "next")
            assert server.json(f"run/{about['run']}/next?position=0")["logits"] == expected["logits"]


def test_features_of_a_dictionary_are_nodes_and_are_named(tmp_path):
    """A dictionary in the model's directory is the graph's and the story's; another model's is refused."""
    torch.manual_seed(0)
    folder, ends = tmp_path / "model", ("blocks.1.feedforward.in", "blocks.1.feedforward.out")
    own = Dictionary("transcoder", ends[:1], ends[1:], 24, 24, 16, k=4)
    for weight in own.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    toy("decoder").save(folder)
    own.save(folder / "features")
    with serving(Opened("model", lambda: ch.load(folder))) as served:
        while served.session.models[0].m is None:
            time.sleep(0.01)
        m = served.session.model()
        about = served.json("run", {"text": TEXTS["decoder"]})
        asked = f"run/{about['run']}/%s?position={about['position']}"
        nodes = served.json(asked % "graph")["nodes"]
        run = served.session.run(about["run"])
    found = ch.graph(m, TEXTS["decoder"], nodes=40, candidates=150, features=[own])
    shown = {node["id"] for node in nodes if node["kind"] == "feature"}
    assert shown and shown <= {node.id for node in found.nodes if node.kind == "feature"}
    assert all(node["fired"] for node in nodes if node["kind"] == "feature")
    with torch.no_grad(), ch.record(m.model, own.at) as seen:
        m.model(torch.tensor([run.prepared.tokens.ids]))
        added = own.encode(seen[own.at][0, 5]) * own.W_dec.norm(dim=1)
    strongest = strongest_feature(run, "feedforward:1", 5)
    assert strongest is not None and strongest["name"] == f"1.{int(added.argmax())}" and strongest["fired"]
    assert strongest_feature(run, "feedforward:0", 5) is None
    own.save(tmp_path / "named")
    with pytest.raises(InputError, match="another model"):
        dictionaries_of(ch.Model(build(d_model=16, n_heads=2)), [tmp_path / "named"])
    assert dictionaries_of(ch.Model(build(d_model=16, n_heads=2))) == ()


def test_a_prompt_with_an_image_has_its_picture(tmp_path):
    """Tiles are put together again; places of the picture are labels, and attention is that of the prompt."""
    image = np.random.default_rng(3).integers(0, 256, (32, 48, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    file = base64.b64encode(buffer.getvalue()).decode()
    for made, size, grid in (
        (sized_directory, None, (4, 6)),
        (directory, 16, (4, 4)),
        (tiled_directory, None, (4, 6)),
    ):
        token = "<|image_pad|>" if made is sized_directory else "<image>"
        body = {"text": f"{token}\nWhat is it?", "image": file}
        m = ch.load(made(tmp_path / made.__name__))
        session = Session([Opened("m", lambda m=m: m)])
        session.models[0].m = m
        run = session.begin(body)
        prompt = ch.ImagePrompt(body["text"], [image])
        labels = [label for label in run["tokens"]["labels"] if "," in label and "whole" not in label]
        assert sorted(labels) == [f"{row},{column}" for row in range(grid[0]) for column in range(grid[1])]
        shown = unpacked(run["picture"])
        pixels = image.transpose(2, 0, 1) / 255 if size is None else None
        assert shown.shape == ((3, 32, 48) if size is None else (3, size, size))
        if pixels is not None:  # it needs no resizing: tiles are cut, and put together again
            both = [each - each.min((1, 2), keepdims=True) for each in (shown, pixels)]  # channel by channel
            assert (
                np.abs(np.subtract(*(each / each.max((1, 2), keepdims=True) for each in both))).max() < 0.02
            )
        seen = attention(m, prompt).of("self")[0].pattern[1]
        page = session.run(run["run"]).prepared
        assert np.array_equal(attention(m, page).of("self")[0].pattern[1], seen)
        assert run["tokens"]["text"] == body["text"]
        with pytest.raises(InputError, match="0 images"):
            session.begin({"text": body["text"]})
    session = Session([Opened("m", lambda: toy("decoder"))])
    session.models[0].m = toy("decoder")
    with pytest.raises(InputError, match="reads text alone"):
        session.begin({**body, "text": "They speak"})
