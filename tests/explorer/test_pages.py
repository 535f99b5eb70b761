"""The page's files and the one file made of them, packed arrays, the notebook, and the command."""

import base64
import hashlib
import html
import json
import re
import socket
import subprocess
import sys
import urllib.request

import numpy as np
import pytest

from clearhead.app.cli import main
from clearhead.app.commands.models import bind
from clearhead.app.explorer.record import modules, page_files, record, script, show, single_file
from clearhead.app.explorer.views import finite, packed_bytes, packed_floats
from clearhead.errors import InputError
from clearhead.inside.names import attentions
from tests import fresh
from tests.explorer.toys import HOSTILE, TEXTS, hostile, toy, unpacked

FORBIDDEN = [
    "innerHTML",
    "outerHTML",
    "insertAdjacentHTML",
    "document.write",
    "eval(",
    "new Function",
    "setHTML",
    "createContextualFragment",
    "DOMParser",
]
DECLARED = re.compile(
    r"^(?:export )?(?:async )?(?:function\*?|class|const|let|var) (\w+|\{[^}]*\}|\[[^\]]*\])", re.MULTILINE
)
IMPORT = re.compile(
    r"^\s*(?:import|export)\b[^;]*?from\s*[\"']([^\"']+)[\"']|^\s*import\s*[\"']([^\"']+)[\"']|import\(",
    re.MULTILINE,
)


@pytest.mark.ledger("F2")
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
            for one in wanted[0].split(","):
                assert re.search(
                    rf"^export (?:async )?(?:function|class|const|let) {one.strip()}\b",
                    files[wanted[1]][0],
                    re.MULTILINE,
                ), (
                    name,
                    one,
                )
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


@pytest.mark.ledger("F2")
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


@pytest.mark.ledger("F2")
def test_one_file_holds_all_and_nothing_gets_out_of_its_record():
    made = record(hostile(), HOSTILE[4], "¦".join(HOSTILE))
    page = single_file(made)
    assert page.count("<script") == page.count("</script>") == 2
    assert not re.search(r"<link(?! rel=\"icon\" href=\"data:)|src=\"|@import", page)
    stored = re.search(r'<script type="application/json" id="record">(.*?)</script>', page, re.DOTALL)[1]
    assert json.loads(stored) == json.loads(json.dumps(made))
    code = re.search(r'<script type="module">(.*?)</script>', page, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "connect-src 'none'" in policy


@pytest.mark.ledger("F2")
def test_packed_arrays():
    """A byte is off by 1/510 of the range at most; floats are exact; what is not finite keeps its order."""
    values = np.random.default_rng(0).random((3, 17, 11)).astype(np.float32)
    assert np.abs(unpacked(packed_bytes(values)) - values).max() <= 1 / 510 + 1e-7
    wide = values * 12 - 5
    assert np.abs(unpacked(packed_bytes(wide, -5, 7)) - wide).max() <= 12 / 510 + 1e-6
    assert np.array_equal(unpacked(packed_floats(wide)), wide)
    assert unpacked(packed_bytes(np.float32([[0, 1, np.nan, 2, -1]]))).tolist() == [[0, 1, 0, 1, 0]]
    odd = unpacked(packed_floats(np.float32([1, -np.inf, np.inf, np.nan])))
    assert np.isfinite(odd).all()
    assert odd.argmin() == 1
    assert odd.argmax() == 2
    assert unpacked(packed_bytes(np.zeros((0, 4)))).shape == (0, 4)
    assert finite({"a": [float("nan"), (1.5, float("inf"))], 3: None}) == {
        "a": [None, [1.5, None]],
        "3": None,
    }


@pytest.mark.ledger("F2")
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


@pytest.mark.ledger("F2")
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


@pytest.mark.ledger("F2")
@pytest.mark.slow
def test_command(folder, tmp_path, capsys):
    def said(*words):
        try:
            code = main(["explore", *map(str, words)])
        except SystemExit as stop:
            code = stop.code
        return code or 0, *capsys.readouterr()

    code, out, _ = said("--help")
    assert code == 0
    assert "--export" in out
    code, out, _ = said(folder, "--text", TEXTS["decoder"], "--export", tmp_path / "out.html")
    assert code == 0
    assert out.strip() == str(tmp_path / "out.html")
    stored = re.search(
        r'id="record">(.*?)</script>', (tmp_path / "out.html").read_text(encoding="utf-8"), re.DOTALL
    )[1]
    expected = record(toy("decoder"), "my-model", TEXTS["decoder"])
    assert json.loads(stored)["run"] == json.loads(json.dumps(expected))["run"]
    assert json.loads(stored)["views"]["model"]["name"] == "my-model"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for words in (
            [tmp_path / "none"],
            [tmp_path / "none", "--export", tmp_path / "x.html"],
            [folder, "--export", tmp_path / "x.png"],
            [folder, "--text", "", "--export", tmp_path / "x.html"],
            [folder, "--compare", tmp_path / "none", "--no-open"],
            [folder, "--port", taken.getsockname()[1], "--no-open"],
            [folder, "--port", "99999", "--no-open"],
            [folder, "--host", "no.such.host.invalid", "--no-open"],
        ):
            code, _, wrong = said(*words)
            assert code == 2, words
            assert len(wrong.strip().splitlines()) == 1, wrong
    with pytest.raises(InputError, match="no port -1"):
        bind("127.0.0.1", -1)


@pytest.mark.ledger("F2")
@pytest.mark.slow
def test_command_serves(folder):
    """As one starts it: it says where it is, answers there, and warns when others can reach it."""
    command = [
        sys.executable,
        "-m",
        "clearhead",
        "explore",
        str(folder),
        "--port",
        "0",
        "--no-open",
        "--host",
        "0.0.0.0",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            lines = [process.stderr.readline() for _ in range(2)]
            assert "can be reached by others" in lines[0]
            port = re.search(r":(\d+)/", lines[1])[1]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30) as answer:
                assert b"clearhead" in answer.read()
        finally:
            process.terminate()


@pytest.mark.ledger("F2")
@pytest.mark.slow
def test_importing_clearhead_imports_no_server(tmp_path_factory):
    imported = fresh.found(tmp_path_factory)["imported to show"]
    assert not {"fastapi", "uvicorn", "matplotlib"} & {*imported}
