"""The drills of CONTRIBUTING.md are true: each touches the files it says, and what it adds works."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import torch

import clearhead as ch
from clearhead.hub.fields import field
from clearhead.hub.llama import ATTENTION_BIAS, FEEDFORWARD_BIAS, classes, llama_like, shape
from clearhead.hub.registry import ARCHITECTURES
from clearhead.hub.rope import rope
from clearhead.learn.tasks.entries.regress import Regress
from clearhead.learn.tasks.table import TASKS
from tests.harness import some_ids, worst

ROOT = pathlib.Path(__file__).resolve().parents[1]
DRILLS = ROOT / "docs" / "drills"
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
PROVE = {
    "position-scheme": """
import torch, clearhead as ch
from clearhead.run.generate import decode
decode.PREFILL_CHUNK = 64  # the long rows need not be long
for family in ("decoder", "encoder", "encoder-decoder"):
    torch.manual_seed(0)
    sizes = {"vocab_size": 13, "d_model": 16, "n_layers": 2, "n_heads": 4, "max_positions": 24}
    model = ch.Transformer(ch.ModelConfig(family=family, positions="log", **sizes)).eval()
    rows = ch.check(model)
    assert any(row.name == "model = formula" for row in rows)
    assert [row.name for row in rows if not row.passed] == []
    target = {"target": [1, 2]} if family == "encoder-decoder" else {}
    assert ch.trace(model, [1, 2, 3, 4], **target).parameters == ch.cost(model.config).parameters.total
""",
    "analysis": """
import contextlib, io, json, pathlib, tempfile
import clearhead as ch
from clearhead.app.cli import main
from clearhead.app.explorer.views import begin
from clearhead.app.views import of_prompts, page_view

folder = pathlib.Path(tempfile.mkdtemp())
ch.Model(ch.Transformer(ch.preset("micro-decoder"))).save(folder / "m")
out = io.StringIO()
with contextlib.redirect_stdout(out):
    main(["surprise", str(folder / "m"), "1 2 3 4", "--ids", "--plot", str(folder / "p.png"), "--json"])
body = json.loads(out.getvalue())
assert len(body["bits"]) == 4 and (folder / "p.png").stat().st_size > 1000
out = io.StringIO()
with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
    main(["surprise", "--help"])
assert "the most surprising first (default: 10)" in " ".join(out.getvalue().split())
with contextlib.redirect_stdout(out):
    main(["--help"])
assert "see which tokens a model did not expect" in out.getvalue()
assert "surprise" in of_prompts()
seen = page_view(begin(ch.load(folder / "m"), [1, 2, 3, 4]), "analysis/surprise")
assert seen["parts"][0]["headings"] == ["position", "token", "bits"] and "<svg" in seen["picture"]
""",
    "architecture": """
import torch, clearhead as ch
from clearhead.hub.registry import ARCHITECTURES
assert ARCHITECTURES["smalltalk"].classes
""",
    "generation-option": """
import torch, clearhead as ch
from clearhead.app.commands.requests import GroupedRequest
from clearhead.run.serve.engine import ServeEngine
from clearhead.run.serve.protocol import CompletionBody
import tyro
torch.manual_seed(0)
m = ch.Model(ch.Transformer(ch.preset("micro-decoder").replace(vocab_size=29)).eval())
options = {"temperature": 0.1, "seed": 5, "max_new_tokens": 12}
plain, wanted = (m.generate([1, 2], **options, top_a=share).ids for share in (0.0, 1.0))
assert m.generate([1, 2], **options).ids == plain != wanted
command = tyro.cli(GroupedRequest, args=["--temperature=0.1", "--seed=5", "--max-new-tokens=12", "--top-a=1"])
assert m.generate([1, 2], **command.given()).ids == wanted
named = {"max_tokens": 12, "temperature": 0.1, "top_a": 1.0, "seed": 5}
body = CompletionBody.model_validate({"prompt": [1, 2], **named})
engine = ServeEngine(m)
served = engine.submit([1, 2], body.options() | {"seed": 5})
while engine.busy:
    engine.step()
assert served.wait(0).ids == wanted
for wrong in (lambda: m.generate([1, 2], top_a=2.0), lambda: m.generate([1, 2], top_a=0.5, num_beams=2)):
    try:
        wrong()
        raise SystemExit("not refused")
    except ch.InputError as error:
        assert "top_a" in str(error)
""",
}
DRILLED = ["position-scheme", "attention-option", "task", "architecture", "generation-option", "analysis"]


@pytest.mark.parametrize("drill", DRILLED)
def test_a_drill_touches_the_files_it_says(drill):
    touched = re.findall(r"^diff --git a/(\S+)", (DRILLS / f"{drill}.patch").read_text(), re.MULTILINE)
    told = re.search(rf"docs/drills/{drill}\.patch\),\s+(\w+)\s+files?", GUIDE)
    assert told is not None
    assert len(touched) == {"one": 1, "two": 2, "three": 3, "four": 4}[told[1]]
    assert all(name.startswith("src/clearhead/") for name in touched)


@pytest.mark.parametrize("drill", list(PROVE))
@pytest.mark.slow
def test_a_drill_that_is_not_in_the_tree_applies_and_works(drill, tmp_path):
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    apply = ["git", "apply", "--verbose", str(DRILLS / f"{drill}.patch")]
    subprocess.run(apply, cwd=tmp_path, check=True, capture_output=True)
    environment = {"PYTHONPATH": str(tmp_path / "src"), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    proof = subprocess.run(
        [sys.executable, "-c", PROVE[drill]], env=environment, capture_output=True, text=True, check=False
    )
    assert proof.returncode == 0, proof.stderr


@pytest.mark.parametrize("drill", DRILLED)
def test_the_code_of_a_drill_passes_lint(drill, tmp_path):
    patch = DRILLS / f"{drill}.patch"
    touched = re.findall(r"^diff --git a/(\S+)", patch.read_text(), re.MULTILINE)
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    if drill in PROVE:  # the others are in the tree
        subprocess.run(["git", "apply", str(patch)], cwd=tmp_path, check=True, capture_output=True)
    for how in (["check", "--no-cache"], ["format", "--check", "--no-cache"]):
        command = [sys.executable, "-m", "ruff", *how, *touched]
        linted = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert linted.returncode == 0, linted.stdout


def test_a_task_may_come_from_outside_the_package(tmp_path, monkeypatch):
    """`TASKS[name] = task` is all it takes to train and judge by a task of one's own."""

    class Stars(Regress):
        name = "stars"

    monkeypatch.setitem(TASKS, "stars", Stars())
    table = tmp_path / "reviews.tsv"
    rows = [f"{'good ' * stars}film number {number}\t{stars}" for number in range(40) for stars in range(3)]
    table.write_text("\n".join(["text\tlabel", *rows]) + "\n")
    sizes = {
        "model.d_model": 16,
        "model.n_layers": 1,
        "model.n_heads": 2,
        "train.steps": 6,
        "train.device": "cpu",
    }
    made = ch.train(str(table), out=tmp_path / "run", settings={"data.task": "stars", **sizes})
    found = ch.evaluate(ch.load(made.folder), str(table))
    assert found.task == "stars"
    assert {"mse", "pearson"} <= set(found.metrics)


def test_an_architecture_may_come_from_outside_the_package(tmp_path, monkeypatch):
    """`ARCHITECTURES[model_type] = table` is all it takes to read and write checkpoints of one's own kind."""
    table = llama_like(
        "smalltalk",
        classes("Smalltalk", sequence=False, token=False),
        *shape(),
        rope(),
        *ATTENTION_BIAS,
        FEEDFORWARD_BIAS,
        field("loudness", "embedding_scale", 1.0),
    )
    monkeypatch.setitem(ARCHITECTURES, "smalltalk", table)
    config = {
        "model_type": "smalltalk",
        "architectures": ["SmalltalkForCausalLM"],
        "vocab_size": 13,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "loudness": 3.0,
    }
    llama = {"norm": "rmsnorm", "norm_eps": 1e-6, "positions": "rope", "activation": "silu", "gated": True}
    sizes = {"vocab_size": 13, "d_model": 16, "d_ff": 24, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2}
    own = {"max_positions": 32, "bias": False, "tie_embeddings": False}
    plain = ch.Transformer(ch.ModelConfig(**llama, **sizes, **own))
    ch.Model(plain).save(tmp_path / "llama")
    shutil.copytree(tmp_path / "llama", tmp_path / "smalltalk")
    (tmp_path / "smalltalk" / "config.json").write_text(json.dumps(config))
    m = ch.load(tmp_path / "smalltalk")
    assert m.config.embedding_scale == 3.0
    ids = some_ids()
    with torch.no_grad():
        plain.main.embedding.front.scale = 3.0
        assert worst(m.model(ids).logits, plain(ids).logits) <= 1e-6
    m.save(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["loudness"] == 3.0
