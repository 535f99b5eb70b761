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
from clearhead.learn.tasks.entries.classify import Regress
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
    "attention-option": """
import torch, clearhead as ch
torch.manual_seed(0)
sizes = {"vocab_size": 13, "d_model": 16, "n_layers": 2, "n_heads": 4, "max_positions": 24}
config = ch.ModelConfig(value_scale=0.5, positions="rope", norm="rmsnorm", **sizes)
model = ch.Transformer(config).eval()
rows = ch.check(model)
assert any(row.name == "model = formula" for row in rows)
assert [row.name for row in rows if not row.passed] == []
assert any("value_scaled" in step.name for step in ch.trace(model, [1, 2, 3, 4]).steps)
ids = torch.tensor([[1, 2, 3, 4]])
plain = ch.Transformer(config.replace(value_scale=None)).eval()
plain.load_state_dict(model.state_dict())
assert (plain(ids).logits - model(ids).logits).abs().max() > 1e-3
for block in plain.main.blocks:
    block.attention.v.weight.data *= 0.5
    block.attention.v.bias.data *= 0.5
assert (plain(ids).logits - model(ids).logits).abs().max() < 1e-5
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
    "attention-state": """
import itertools, torch, clearhead as ch, clearhead.variants.summary
from clearhead.core.masks import TokenInfo, View
from clearhead.core.taps import SILENT
from clearhead.run.serve.engine import ServeEngine
from clearhead.run.serve.limits import Limits
torch.manual_seed(0)
sizes = {"vocab_size": 7, "d_model": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "max_positions": 64}
model = ch.Transformer(ch.ModelConfig(attention=("full", "summary(3)"), positions="rope", **sizes)).eval()
with torch.no_grad():
    for weight in model.parameters():
        weight.add_(torch.randn_like(weight) * 0.3)
    # The formula, for each query by itself.
    q, k, v = torch.randn(1, 4, 9, 4), torch.randn(1, 2, 9, 4), torch.randn(1, 2, 9, 4)
    order = torch.arange(9)[None]
    view = View(tokens=TokenInfo(order, order, None, None, True))
    z = model.decoder.blocks[1].attention.attend(q, k, v, view, None, SILENT, q)
    for t in range(9):
        early = t - 2 if t > 2 else 0  # how many tokens are in the summary
        means = [x[:, :, :early].mean(2, keepdim=True)[:, :, : min(early, 1)] for x in (k, v)]
        seen = [torch.cat([x[:, :, early : t + 1], mean], 2) for x, mean in zip((k, v), means)]
        keys, values = (x.repeat_interleave(2, 1) for x in seen)
        pattern = (q[:, :, t : t + 1] @ keys.mT / 2).softmax(-1)
        assert torch.allclose(z[:, :, t : t + 1], pattern @ values, atol=1e-6)
    # Caches of every form, with padding.
    ids, mask = torch.randint(7, (2, 9)), torch.ones(2, 9, dtype=torch.bool)
    mask[1, :4] = False
    whole = model(ids, mask).logits[mask]
    for cache in (ch.Cache(), ch.WindowCache(), ch.FixedCache(model.config, 2, 9)):
        spans = (slice(0, 5), slice(5, 6), slice(6, 9))
        parts = [model(ids[:, span], mask[:, span], cache=cache).logits for span in spans]
        assert torch.allclose(torch.cat(parts, 1)[mask], whole, atol=1e-5)
    # Beams: with as many as there are texts, the search is exhaustive.
    m, every = ch.Model(model), torch.tensor(list(itertools.product(range(7), repeat=3)))
    rows = torch.cat([torch.tensor([1, 2, 3, 4, 5]).expand(343, 5), every], 1)
    scores = model(rows).logits.log_softmax(-1)[:, 4:-1].gather(2, every[..., None]).sum((1, 2))
    assert m.generate([1, 2, 3, 4, 5], 3, num_beams=49).ids == every[scores.argmax()].tolist()
# Served among others, from a pool so small that requests are preempted.
prompts = [[(7 * n + i * i) % 7 for i in range(20 + n)] for n in range(4)]
engine = ServeEngine(m, Limits(tokens=16, block=8, cache_tokens=80))
seqs = [engine.submit(prompt, {"max_new_tokens": 12}) for prompt in prompts]
while engine.busy:
    engine.step()
assert engine.stats.preempted > 0
assert [seq.wait(0).ids for seq in seqs] == [m.generate(prompt, 12).ids for prompt in prompts]
""",
}
DRILLED = ["task", *PROVE]


def touched_by(drill: str) -> list[str]:
    return re.findall(r"^diff --git a/(\S+)", (DRILLS / f"{drill}.patch").read_text(), re.MULTILINE)


@pytest.mark.parametrize("drill", DRILLED)
def test_a_drill_touches_the_files_it_says(drill):
    touched = touched_by(drill)
    told = re.search(rf"docs/drills/{drill}\.patch\),\s+(\w+)\s+files?", GUIDE)
    assert told is not None
    assert len(touched) == {"one": 1, "two": 2, "three": 3, "four": 4}[told[1]]
    assert all(name.startswith("src/clearhead/") for name in touched)


RUN = """
import json, pathlib, runpy, sys, traceback
wrong = {}
for path in sys.argv[1:]:
    try:
        runpy.run_path(path)
    except BaseException:
        wrong[path] = traceback.format_exc()
sys.exit(json.dumps(wrong) if wrong else 0)
"""


@pytest.mark.slow
def test_drills_that_are_not_in_the_tree_apply_work_and_pass_lint(tmp_path):
    """Each applies by itself, and all of them together are tried in one process."""
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    patches = [str(DRILLS / f"{drill}.patch") for drill in PROVE]
    proofs = [tmp_path / f"{drill}.py" for drill in PROVE]
    commands = [["git", "apply", *more, patch] for more in (["--check"], []) for patch in patches]
    for path, script in zip(proofs, PROVE.values()):
        path.write_text(script)
    commands.append([sys.executable, "-c", RUN, *map(str, proofs)])
    lint = [sys.executable, "-m", "ruff"]
    touched = {name for drill in DRILLED for name in touched_by(drill)}
    commands += [[*lint, *how, "--no-cache", *touched] for how in (["check"], ["format", "--check"])]
    environment = {"PYTHONPATH": str(tmp_path / "src"), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    for command in commands:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


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
