"""Models as ONNX files and programs of `torch.export`: others compute from them what the model computes."""

import json
import sys
from functools import partial

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.app.cli import main
from clearhead.hub import onnx as graph
from clearhead.hub.onnx import Function, example, expected, sizes_of
from clearhead.hub.sentences import Sentences
from tests.later import later

onnxruntime = later("onnxruntime")
pytestmark = pytest.mark.ledger("P4")
TINY = {"vocab_size": 40, "d_model": 12, "n_heads": 2, "n_layers": 1, "d_ff": 20, "max_positions": 48}


def made(**fields):
    torch.manual_seed(0)
    return ch.Model(ch.Transformer(ch.ModelConfig(**TINY | fields)))


def padded(rows, length, below=40):
    """Rows of ids with padding at the left, in between and at the right: numpy ids and mask."""
    draw = np.random.default_rng(1)
    ids, mask = draw.integers(0, below, (rows, length)), np.ones((rows, length), dtype=np.int64)
    mask[0, : length // 2], mask[-1, -2:], mask[rows // 2, 1:3] = 0, 0, 0
    return ids, mask


@pytest.mark.slow
def test_a_decoder_writes_token_by_token_in_onnxruntime(tmp_path):
    """A window, grouped heads and rotation: with keys going in and out, it writes what we write."""
    m = made(
        positions="rope",
        attention="window(4)",
        n_kv_heads=1,
        norm="rmsnorm",
        max_positions=200,
    )
    made_file = ch.export(m, tmp_path / "m.onnx", cache=True)
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"] and made_file.difference < 1e-5
    run = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    assert all(isinstance(one.shape[0], str) for one in run.get_inputs())
    prompt, K, E = np.array([[3, 9, 4, 1, 17, 5, 5, 2]]), 1, 6
    past, ids, seen, wrote = [np.zeros((1, K, 0, E), np.float32)] * 2, prompt, prompt.shape[1], []
    for _ in range(12):
        names = ("past_key_values.0.key", "past_key_values.0.value")
        given = {"input_ids": ids, "attention_mask": np.ones((1, seen), np.int64), **dict(zip(names, past))}
        logits, *past = run.run(None, given)
        ids, seen = logits[:, -1:].argmax(-1), seen + 1
        wrote.append(int(ids[0, 0]))
    assert wrote == m.generate(prompt[0].tolist(), 12, temperature=0).ids[-12:]


@pytest.mark.slow
def test_an_encoder_decoder_of_sound_with_other_sizes_and_padding(tmp_path):
    m = made(family="encoder-decoder", input="frames", d_input=3)
    ch.export(m, tmp_path / "m.pt2")
    (own, own_mask), frames = (torch.from_numpy(one) for one in padded(5, 7)), torch.randn(5, 38, 3)
    mask = torch.from_numpy(padded(5, 38)[1])
    given = {"input_features": frames, "attention_mask": mask}
    given |= {"decoder_input_ids": own, "decoder_attention_mask": own_mask}
    with torch.no_grad():
        wanted = m.model(own, own_mask.bool(), frames, mask.bool()).logits
    found = torch.export.load(tmp_path / "m.pt2").module()(given)["logits"]
    assert torch.allclose(found, wanted, atol=1e-5)


@pytest.mark.slow
def test_the_command_writes_a_sentence_encoder_and_leaves_nothing_half_written(tmp_path, monkeypatch, capsys):
    """The graph is the same in both formats; `.pt2` is quicker to write."""
    m = made(family="encoder", head="none", n_types=2, max_positions=80, n_experts=2, n_active_experts=1)
    m.sentences = Sentences(pooling="cls", normalise=True)
    m.save(tmp_path / "m")
    out = tmp_path / "out" / "m.pt2"
    main(["convert", str(tmp_path / "m"), str(out), "--json"])
    said = json.loads(capsys.readouterr().out)
    assert said["inputs"]["input_ids"] == ["batch", "length"] and said["difference"] < 1e-5
    ids, mask = (torch.from_numpy(one) for one in padded(4, 61))
    given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": ids % 2}
    found = torch.export.load(out).module()(given)
    with torch.no_grad():
        states = m.model(ids, mask.bool(), types=ids % 2).hidden
    vectors = torch.nn.functional.normalize(states[torch.arange(4), mask.argmax(1)], dim=-1)
    assert torch.allclose(found["sentence_embedding"], vectors, atol=1e-5)
    assert torch.allclose(found["last_hidden_state"], states, atol=1e-5)
    before = out.read_bytes()
    monkeypatch.setattr(graph, "TOLERANCE", -1.0)
    for words, wrong in (
        (["--overwrite"], "differs from the model's at real tokens by"),
        ([], "exists already"),
        (["--overwrite", "--dtype", "float16"], "--dtype float16 is not for a graph"),
        (["--overwrite", "--cache"], "a cache of keys is for a decoder of text"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["convert", str(tmp_path / "m"), str(out), *words])
        said = capsys.readouterr().err.strip()
        assert stopped.value.code == 2 and wrong in said and "\n" not in said
        assert out.read_bytes() == before and [path.name for path in out.parent.iterdir()] == ["m.pt2"]


LLAMA = {"positions": "rope", "norm": "rmsnorm", "bias": False, "gated": True, "activation": "silu"}


@pytest.mark.parametrize(
    ("fields", "cache"),
    [
        (LLAMA, False),
        (LLAMA, True),
        ({"family": "encoder", "head": "none"}, False),
        ({"family": "encoder-decoder", "input": "frames", "d_input": 3}, False),
    ],
)
@torch.no_grad()
def test_a_file_is_compared_at_real_tokens_alone(fields, cache):
    """What stands at padding, left or right, is the runtime's own: no difference there, any other is one."""
    function = Function(made(**fields).model.eval(), None, cache)
    sizes = sizes_of(function.model.config)[1]
    by_batch = {size.batch: size for size in sizes}

    def changed(at_padding: float, at_tokens: float, given: dict) -> dict:
        answers = expected(function, dict(given), by_batch[len(given[function.ports[0].name])])
        mask = given.get("decoder_attention_mask", given["attention_mask"]).bool()
        for name, value in answers.items():
            rows = value.transpose(1, 2) if name.startswith("present") else value
            real = mask[:, :: mask.shape[1] // rows.shape[1]] if not cache else mask[:, -rows.shape[1] :]
            rows[~real] += at_padding
            rows[real] += at_tokens
        return answers

    assert graph._verify(function, partial(changed, 7.0, 0.0), sizes) == 0
    assert graph._verify(function, partial(changed, torch.nan, 0.0), sizes) == 0
    assert 1e-7 < graph._verify(function, partial(changed, 0.0, 5e-6), sizes) < 1e-5
    with pytest.raises(ch.InputError, match="at real tokens by") as told:
        graph._verify(function, partial(changed, 0.0, 1e-3), sizes)
    assert "InputSizes" not in str(told.value) and "batch 3" in str(told.value)


@torch.no_grad()
def test_the_difference_is_relative_to_the_largest_logit():
    """Logits of a hundred may differ by 1e-3, those of one by 1e-5."""
    m = made(**LLAMA)
    m.model.head.out.weight.mul_(3000)
    function, sizes = Function(m.model.eval(), None, False), sizes_of(m.config)[1]
    logits = [function(example(function, size, number + 1))["logits"] for number, size in enumerate(sizes)]
    assert min(float(value.abs().max()) for value in logits) > 100
    off = graph._verify(function, lambda given: {"logits": function(given)["logits"] + 1e-3}, sizes)
    assert 1e-7 < off <= 1e-5


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"attention": "gated-delta", "positions": "none"}, "attention gated-delta goes by chunks"),
        ({"attention": "linear(elu)", "positions": "none"}, "attention linear"),
        ({"n_layers": 2, "depth_capacity": 0.5}, "layers that only some tokens visit"),
    ],
)
def test_what_has_no_graph_is_refused_by_name(tmp_path, fields, wrong):
    with pytest.raises(ch.InputError, match=wrong.replace("(", r"\(")):
        ch.export(made(**fields), tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ch.MissingExtraError, match=r"pip install 'clearhead\[onnx\]'"):
        ch.export(made(), tmp_path / "m.onnx")
