"""The page's files and the one file made of them, packed arrays, the notebook, and the command.

Interventions of the page: every single part off, patches from a second text, and their jobs.
"""

import base64
import hashlib
import html
import json
import re
import socket
import subprocess
import sys
import urllib.request
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from clearhead.app.commands.models import bind
from clearhead.app.explorer.interventions import _activations, ablated
from clearhead.app.explorer.record import (
    modules,
    page_files,
    record,
    record_run,
    script,
    show,
    single_file,
    stored_record,
)
from clearhead.app.explorer.session import Ended, Opened, Session, first_given
from clearhead.app.explorer.views import begin, finite, packed_bytes, packed_floats
from clearhead.app.views import page_view as view
from clearhead.errors import InputError
from clearhead.inside.ablation import effect
from clearhead.inside.interventions import single_parts
from clearhead.inside.lens import followed, lens
from clearhead.inside.names import attentions
from clearhead.inside.patch import patch
from tests import fresh, llava
from tests.explorer.toys import HOSTILE, TEXTS, hostile, serving, toy, unpacked

pytestmark = pytest.mark.ledger("F2", "K3")
FORBIDDEN = [
    *("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"),
    *("setHTML", "createContextualFragment", "DOMParser"),
]
DECLARED = re.compile(
    r"^(?:export )?(?:async )?(?:function\*?|class|const|let|var) (\w+|\{[^}]*\}|\[[^\]]*\])", re.MULTILINE
)
IMPORT = re.compile(
    r"^\s*(?:import|export)\b[^;]*?from\s*[\"']([^\"']+)[\"']|^\s*import\s*[\"']([^\"']+)[\"']|import\(",
    re.MULTILINE,
)


def test_every_module_is_reached_and_no_two_share_a_name():
    files = page_files()
    scripts = {name for name in files if name.endswith(".js")}
    order = modules()
    assert set(order) == scripts
    assert len(order) == len(set(order))
    names: dict[str, str] = {}
    for name in order:
        text = files[name][0]
        for declared in DECLARED.findall(text):
            assert declared.isidentifier(), f"{name}: {declared}"
            assert declared not in names, f"{declared} is in {name} and in {names.get(declared)}"
            names[declared] = name
        found = IMPORT.findall(text)
        assert len(found) == len(re.findall(r"^import ", text, re.MULTILINE)), (
            f"{name} imports in a way that one file cannot"
        )
        for wanted in re.findall(r'^import \{([^}]*)\} from "\./([\w-]+\.js)";$', text, re.MULTILINE):
            assert order.index(wanted[1]) < order.index(name)
            for part in wanted[0].split(","):
                exported = rf"^export (?:async )?(?:function|class|const|let) {part.strip()}\b"
                assert re.search(exported, files[wanted[1]][0], re.MULTILINE), (name, part)
    whole = script()
    assert not re.search(r"^\s*(?:import|export)\b", whole, re.MULTILINE)
    assert "</script" not in whole.lower()
    assert "<!--" not in whole


def test_the_sheet_closes_what_it_opens():
    """A brace too few would put all rules after it into one for phones."""
    depth = 0
    for line in page_files()["style.css"][0].splitlines():
        assert depth == 0 or not line.startswith((".", "#", "@")), line
        depth += line.count("{") - line.count("}")
        assert depth >= 0, line
    assert depth == 0


def test_no_file_reads_text_as_markup_or_names_another_machine():
    for name, (text, _) in page_files().items():
        if name.endswith(".json"):
            continue
        for word in FORBIDDEN:
            assert word not in text, f"{name} holds {word}"
        addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"'`)]*", text)) - {
            "http://www.w3.org/2000/svg"
        }
        assert not addresses, f"{name} names {addresses}"
        assert "@import" not in text
        assert "url(" not in text or not name.endswith((".css", ".html"))
    assert not re.search(r"\son\w+=|javascript:|<style|style=", page_files()["index.html"][0])


def test_one_file_holds_all_and_nothing_gets_out_of_its_record():
    made = record(hostile(), HOSTILE[4], "¦".join(HOSTILE))
    page = single_file(made)
    assert page.count("<script") == page.count("</script>") == 2
    assert not re.search(r"<link(?! rel=\"icon\" href=\"data:)|src=\"|@import", page)
    assert stored_record(page) == json.loads(json.dumps(made))
    code = re.search(r'<script type="module">(.*?)</script>', page, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "connect-src 'none'" in policy


def test_packed_arrays():
    """A byte is off by 1/510 of the range at most; floats are exact; what is not finite keeps its order."""
    values = np.random.default_rng(0).random((3, 17, 11)).astype(np.float32)
    assert np.abs(unpacked(packed_bytes(values)) - values).max() <= 1 / 510 + 1e-7
    wide = values * 12 - 5
    assert np.abs(unpacked(packed_bytes(wide, -5, 7)) - wide).max() <= 12 / 510 + 1e-6
    assert np.array_equal(unpacked(packed_floats(wide)), wide)
    assert unpacked(packed_bytes(np.float32([[0, 1, np.nan, 2, -1]]))).tolist() == [[0, 1, 0, 1, 0]]
    odd = unpacked(packed_floats(np.float32([1, -np.inf, np.inf, np.nan])))
    assert np.isfinite(odd).all() and (odd.argmin(), odd.argmax()) == (1, 2)
    assert unpacked(packed_bytes(np.zeros((0, 4)))).shape == (0, 4)
    told = finite({"a": [float("nan"), (1.5, float("inf"))], 3: None})
    assert told == {"a": [None, [1.5, None]], "3": None}


def test_cells_of_a_small_file(monkeypatch):
    """However little room there is, patterns fit: rows sum to 1, the heads are all there, and it is said."""
    monkeypatch.setattr("clearhead.app.explorer.record.PATTERN_BYTES", 4 * 6 * 20 * 20)
    made = record(toy("decoder"), "m", list(range(60)))
    for kind, layer, heads in attentions(toy("decoder").config):
        body = made["views"][f"run/recorded/attention/{kind}/{layer}"]
        pattern = unpacked(body["pattern"])
        assert pattern.shape == (heads, 20, 20)
        assert body["aggregated"] == 3
        assert np.abs(pattern.sum(-1) - 1).max() <= 1e-5
    assert "cells of 3 tokens" in made["says"]


@pytest.mark.parametrize("family", ["decoder", "vit"])
def test_notebook(family, tmp_path):
    m = toy(family)
    given = np.zeros((12, 12, 3), np.uint8) if family == "vit" else TEXTS[family]
    made = show(m, given, height=500)
    frame = made._repr_html_()
    assert re.match(
        r'<iframe sandbox="allow-scripts allow-downloads" srcdoc="[^"<>]*" '
        r'style="[^"]*height:500px[^"]*" title="[^"]+"></iframe>$',
        frame,
    )
    inner = html.unescape(re.search(r'srcdoc="([^"]*)"', frame)[1])
    assert inner == single_file(made.recorded, notebook=True)
    saved = made.save(tmp_path / "new" / "page.html")
    assert saved.read_text(encoding="utf-8") == single_file(made.recorded)
    with pytest.raises(InputError, match=r"\.html"):
        made.save(tmp_path / "page.png")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        made.save(tmp_path / "file" / "page.html")
    assert not list(tmp_path.glob("**/*.part"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("models") / "my-model"
    toy("decoder").save(where)
    return where


def test_a_page_of_a_model_that_reads_images_is_served(folder, tmp_path, clearhead, monkeypatch):
    """By the command up to the server: alone, and compared with another."""
    sessions, server = [], SimpleNamespace(run=lambda sockets: None)

    def page_server(session, host, port):
        sessions.append(session)
        return server, None, "ADDRESS"

    monkeypatch.setattr("clearhead.app.commands.models.page_server", page_server)
    pictured = llava.sized_directory(tmp_path / "pictured")
    for places in ((pictured,), (folder, "--compare", pictured)):
        ran = clearhead("explore", *places, "--no-open")
        assert (ran.code, "ADDRESS" in ran.err) == (0, True), ran.err
        assert sessions[-1].models[-1].opener().image_encoder is not None
    file, other = tmp_path / "some.png", tmp_path / "words.png"
    Image.fromarray(llava.image(3)).save(file)
    other.write_text("no image")
    mark = "<|image_pad|>"
    for words, text in (
        ([], f"{mark}\nWhat is this?"),
        (["--text", "A dog?"], f"{mark}\nA dog?"),
        (["--text", f"See {mark}."], f"See {mark}."),
    ):
        assert clearhead("explore", pictured, "--no-open", "--image", file, *words).code == 0
        session = sessions[-1]
        session.models[0].open()
        example = session.models[0].view()["example"]
        assert example == {"text": text, "image": base64.b64encode(file.read_bytes()).decode()}
        assert session.begin(example)["picture"]["shape"] == [3, 16, 32]  # to whole squares of 8 pixels
    given, _ = first_given(session.model(), "A dog?", file)
    assert (given.prompt, given.images) == (f"{mark}\nA dog?", [file])
    clearhead.refuses(
        "--image is for models that read an image with a text", "explore", folder, "--image", file
    )
    for words in ([other], [tmp_path / "none.png"], [other, f"--export {tmp_path}/x.html"]):
        clearhead.refuses("", "explore", pictured, "--no-open", "--image", *words)


@pytest.mark.slow
def test_command(folder, tmp_path, clearhead):
    assert "--export" in clearhead("explore", "--help").out
    ran = clearhead("explore", folder, "--text", TEXTS["decoder"], f"--export {tmp_path}/out.html")
    assert (ran.code, ran.out.strip()) == (0, str(tmp_path / "out.html"))
    page = (tmp_path / "out.html").read_text(encoding="utf-8")
    stored = stored_record(page)
    expected = record(toy("decoder"), "my-model", TEXTS["decoder"])
    assert stored["run"] == json.loads(json.dumps(expected))["run"]
    assert stored["views"]["model"]["name"] == "my-model"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for words in (
            [tmp_path / "none"],
            [tmp_path / "none", f"--export {tmp_path}/x.html"],
            [folder, f"--export {tmp_path}/x.png"],
            [folder, "--text", "", f"--export {tmp_path}/x.html"],
            [folder, f"--compare {tmp_path}/none --no-open"],
            [folder, f"--port {taken.getsockname()[1]} --no-open"],
            [folder, "--port 99999 --no-open"],
            [folder, "--host no.such.host.invalid --no-open"],
        ):
            clearhead.refuses("", "explore", *words)
    with pytest.raises(InputError, match="no port -1"):
        bind("127.0.0.1", -1)


@pytest.mark.slow
def test_command_serves(folder):
    """As one starts it: it says where it is, answers there, and warns when others can reach it."""
    options = ["--port", "0", "--no-open", "--host", "0.0.0.0"]
    command = [sys.executable, "-m", "clearhead", "explore", str(folder), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            lines = [process.stderr.readline() for _ in range(2)]
            assert "can be reached by others" in lines[0]
            port = re.search(r":(\d+)/", lines[1])[1]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30) as answer:
                assert b"clearhead" in answer.read()
        finally:
            process.terminate()


@pytest.mark.slow
def test_importing_clearhead_imports_no_server(tmp_path_factory):
    imported = fresh.found(tmp_path_factory)["imported to show"]
    assert not {"fastapi", "uvicorn", "matplotlib"} & {*imported}


ONE, TWO = "they speak of the king", "they speak of the men"


@pytest.fixture
def session():
    opened = Opened("decoder", lambda: toy("decoder"))
    opened.open()
    return Session([opened])


def finished(session, run, path):
    """Ask about a job until its body is there."""
    session.job(run, path)
    session._jobs[f"{run}/{path}"].thread.join(60)
    answer = session.job(run, path)
    assert answer["ready"] and answer["done"] == answer["total"] > 0
    return answer["body"]


def test_a_job_computes_what_inside_says_of_every_part(session):
    m, run = toy("decoder"), session.begin({"text": ONE})["run"]
    body = finished(session, run, "effects/zero?position=3")
    assert list(body["parts"]) == list(single_parts(m.config))
    for name, one in list(single_parts(m.config).items())[::2]:
        alone = effect(m, ONE, **one, position=3)
        assert body["parts"][name]["kl"] == pytest.approx(alone.kl, abs=1e-5)
        after = alone.after.softmax(-1)
        for number, p in body["parts"][name]["after"].items():
            assert p == pytest.approx(float(after[int(number)]), abs=1e-5)
    assert body == view(session.run(run), "effects/zero?position=3")


def test_patches_are_those_of_patch_and_taking_a_head_is_one_of_them(session):
    m = toy("decoder")
    one, two = (session.begin({"text": text})["run"] for text in (ONE, TWO))
    for part in ("heads", "residual"):
        body = finished(session, one, f"patch/{two}/{part}?position=5")
        expected = patch(m, ONE, TWO, parts=(part,), position=5)
        assert body == json.loads(json.dumps(expected.to_dict()))
    # What `ablate` says with a head from the second text is the patch of that head the other way round.
    made = patch(m, TWO, ONE, parts=("heads",))
    taken = ablated(session.run(one), ["1.2"], [], [], "second", 5, session.run(two))
    whole = effect(m, ONE, ["1.2"], how="mean", means=_activations(session.run(one), session.run(two)))
    good, bad = (session.run(one).choices.find(name) for name in (made.answer, made.wrong))
    difference = float(whole.after[good] - whole.after[bad])
    share = (difference - made.corrupt_difference) / (made.clean_difference - made.corrupt_difference)
    assert share == pytest.approx(float(made.maps[0].values[1, 2]), abs=1e-5)
    assert taken["kl"] == pytest.approx(whole.kl, abs=1e-6) and taken["how"] == "second"


def test_what_cannot_be_taken_is_refused(session):
    one, longer = (session.begin({"text": text})["run"] for text in (ONE, f"{ONE} and the men"))
    with pytest.raises(InputError, match="equal length"):
        ablated(session.run(one), ["0.0"], [], [], "second", 0, session.run(longer))
    with pytest.raises(InputError, match="no second text"):
        ablated(session.run(one), ["0.0"], [], [], "second", 0)
    with pytest.raises(InputError, match="tokens"):  # the first answer may be that it is being computed
        finished(session, one, f"patch/{longer}/heads")
    with pytest.raises(InputError, match="no second run"):
        view(begin(toy("decoder"), ONE), "patch/r9/heads")


def test_a_job_that_nobody_asks_about_ends_and_begins_again(session, monkeypatch):
    monkeypatch.setattr("clearhead.app.explorer.session.FORGOTTEN", -1.0)
    run, path = session.begin({"text": ONE})["run"], "effects/zero?position=0"
    session.job(run, path)
    first = session._jobs[f"{run}/{path}"]
    first.thread.join(60)
    assert isinstance(first.error, Ended) and first.body is None
    assert first.view()["ready"] is False  # who asks just after it ended is told to ask again
    monkeypatch.undo()
    assert finished(session, run, path)["parts"]


def test_one_choice_followed_through_the_layers():
    seen = lens(toy("decoder"), ONE)
    found = followed(toy("decoder"), ONE, int(seen.chosen[-1]))
    assert found[:, -1].tolist() == pytest.approx(seen.chosen_probabilities[:, -1].tolist(), abs=1e-6)
    assert found.shape == seen.entropy.shape


def test_a_second_text_is_in_the_file(session):
    """What the bench asks of both sides, and the patches between them; the routes say the same."""
    with serving(Opened("decoder", lambda: toy("decoder"))) as served:
        while served.session.models[0].m is None:
            pass
        one, two = (served.json("run", {"text": text})["run"] for text in (ONE, TWO))
        assert served.ask(f"/inside/export?run={one}&second=r99")[0] == 404
        made = record_run(served.session.run(one), "decoder", "position=5", served.session.run(two))["views"]
        kept = [path for path in made if path.startswith("run/recorded/patch/second/")]
        assert len(kept) == 4 and made["second"]["run"] == "second"
        asked = kept[0].removeprefix("run/recorded/").replace("second", two)
        assert served.json(f"run/{one}/{asked}") == json.loads(json.dumps(made[kept[0]]))
        how = {"heads": ["1.0"], "how": "second", "second": two, "position": 5}
        assert served.json(f"run/{one}/ablate", how)["how"] == "second"
        assert served.ask(f"/inside/run/{one}/ablate", {**how, "second": "r99"})[0] == 404
