"""What users of other libraries type first: names at the top, all activations, errors with our names."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import pickle
import re

import pytest
import torch

import clearhead as ch
from clearhead.app.cli import main
from clearhead.app.commands.common import show_result
from clearhead.app.report import confusion_tables
from clearhead.core.transformer import ARGUMENTS
from clearhead.errors import OTHER_NAMES
from clearhead.inside.ablation import examples_from
from clearhead.learn.batches.ragged import padded, real_tokens
from clearhead.learn.evaluation.metrics import ClassCounts
from tests.harness import build, byte_tokenizer, some_ids, worst
from tests.test_tasks import TEXTS, saved

ROWS = [some_ids(1, 6, seed=seed)[0].tolist() for seed in range(1, 13)]

# Names at the top -------------------------------------------------------------------------------------------

CALLS = {
    "attention": lambda m: [one.to_dict() for one in ch.attention(m, ROWS[0]).heads()],
    "heads": lambda m: ch.heads(m, ROWS[:2]).to_dict(),
    "lens": lambda m: ch.lens(m, ROWS[0]).to_dict(),
    "patch": lambda m: ch.patch(m, ROWS[0], ROWS[1]).to_dict(),
    "ablate": lambda m: ch.ablate(m, examples_from(m, ROWS, texts=True), heads=["0.1"]).to_dict(),
    "prune": lambda m: {name: x.tolist() for name, x in ch.prune(m, ["0.1"]).model.state_dict().items()},
    "fold_norms": lambda m: {name: x.tolist() for name, x in ch.fold_norms(m).model.state_dict().items()},
    "run_with_cache": lambda m: {name: x.tolist() for name, x in ch.run_with_cache(m, ROWS[0])[1].items()},
}


@pytest.mark.parametrize("name", CALLS)
def test_looking_inside_takes_a_model_in_any_wrapper(name):
    model = build()
    wanted = json.dumps(CALLS[name](ch.Model(model)))
    for given in (model, torch.compile(model), torch.nn.DataParallel(model)):
        assert json.dumps(CALLS[name](given)) == wanted


def test_probe_is_at_the_top_too():
    assert ch.probe is ch.inside.probe.probe


def test_inside_lists_modules_and_functions_that_all_exist():
    listed = dir(ch.inside)
    assert {"lens", "patch", "heads", "attention", "probe", "ablate", "prune", "contributions"} <= {*listed}
    for name in listed:
        found = getattr(ch.inside, name)
        assert inspect.ismodule(found) or callable(found)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = ch.inside.nonsense


# One call for all activations -------------------------------------------------------------------------------


@torch.no_grad()
def test_run_with_cache_equals_a_recording():
    model, ids = build(), torch.tensor(ROWS[:2])
    with ch.record(model, "*") as seen:
        wanted = model(ids).logits
    output, cache = ch.run_with_cache(model, ids)
    assert torch.equal(output.logits, wanted) and list(cache) == ch.tap_names(model)
    assert all(torch.equal(cache[name], seen[name]) for name in seen)
    assert list(ch.run_with_cache(model, ids, "*.z")[1]) == ["blocks.0.attention.z", "blocks.1.attention.z"]
    assert list(ch.run_with_cache(model, ids, ["embedding", "logits"])[1]) == ["embedding", "logits"]


@torch.no_grad()
def test_run_with_cache_pads_rows_of_unequal_length():
    model, rows = build(dropout=0.5), [ROWS[0], ROWS[1][:4]]
    device = torch.device("cpu")
    wanted = model.eval()(padded(rows, 0, device), real_tokens(rows, device)).logits
    model.train()  # neither dropout nor a change of mode
    output, _ = ch.run_with_cache(model, rows, "logits")
    assert torch.equal(output.logits, wanted) and model.training


def test_run_with_cache_of_an_encoder_decoder_and_of_images():
    both = build(family="encoder-decoder")
    output, cache = ch.run_with_cache(both, ROWS[0], "*.cross.pattern", target=ROWS[1][:3])
    assert output.logits.shape[1] == 3 and cache["blocks.1.cross.pattern"].shape == (1, 4, 3, 6)
    with pytest.raises(ch.InputError, match="several rows"):
        ch.run_with_cache(both, ROWS[:2])
    image = {"input": "patches", "image_size": (8, 8), "patch_size": 4, "n_channels": 1, "vocab_size": 0}
    output, _ = ch.run_with_cache(build(family="encoder", n_classes=3, **image), torch.rand(1, 8, 8))
    assert output.logits.shape == (1, 3)


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, {}),
        ({"positions": "rope", "n_kv_heads": 2}, {"temperature": 1.0, "seed": 3}),
        ({}, {"lookup": 2}),
    ],
)
@torch.no_grad()
def test_a_recording_around_generate_keeps_every_step(changes, options):
    model = build(**changes)
    with ch.record(model, "*.resid_post", "*.z", "*.pattern") as seen:
        made = ch.Model(model).generate(ROWS[0], 6, stop_tokens=(), **options)
    text = torch.tensor([[*ROWS[0], *made.ids]])
    with ch.record(model, "*.resid_post", "*.z", "*.pattern") as whole:
        model(text)
    for name in whole:
        axis = 1 if name.endswith("resid_post") else 2
        steps = seen.calls(name)
        if name.endswith("pattern"):
            steps = [torch.nn.functional.pad(step, (0, text.shape[1] - step.shape[3])) for step in steps]
        if not options.get("lookup"):  # a guess that is wrong is read, too
            assert len(steps) == len(made.ids)
            joined = torch.cat(steps, dim=axis)
            assert worst(joined, whole[name].narrow(axis, 0, joined.shape[axis])) <= 1e-5
        else:
            assert sum(step.shape[axis] for step in steps) >= text.shape[1] - 1


# Errors with the right name ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_a_field_by_the_name_of_another_library_is_refused_with_ours(name):
    wanted = OTHER_NAMES[name]
    fields = {field.name for field in dataclasses.fields(ch.ModelConfig)}
    if wanted in fields:
        build_config = [
            lambda: ch.ModelConfig(**{name: 1}),
            lambda: ch.ModelConfig.from_dict({name: 1}),
            lambda: ch.preset("gpt2").replace(**{name: 1}),
            lambda: ch.read_recipe("char-gpt", [f"model.{name}=1"]),
        ]
        for build_one in build_config:
            with pytest.raises(ch.ConfigError, match=f'"{name}" \\(did you mean "{wanted}"\\?\\)'):
                build_one()
    else:
        with pytest.raises(ch.ConfigError, match=f'"{name}" \\(did you mean "{wanted}"\\?\\)'):
            ch.read_recipe("char-gpt", [f"train.{name}=1"])


def test_a_misspelt_field_is_one_line_and_a_config_stays_a_value():
    with pytest.raises(ch.ConfigError, match=r'unknown config key "n_layer" \(did you mean "n_layers"\?\)'):
        ch.ModelConfig(vocab_size=5, n_layer=12)
    config = ch.ModelConfig(vocab_size=5, d_model=16, n_heads=2)
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    assert [*inspect.signature(ch.ModelConfig).parameters] == [
        field.name for field in dataclasses.fields(ch.ModelConfig)
    ]


def test_the_known_arguments_are_those_of_forward():
    assert list(ARGUMENTS) == [*inspect.signature(ch.Transformer.forward).parameters][1:]


@pytest.mark.parametrize(
    ("family", "given", "words"),
    [
        ("decoder", "input_ids", 'no argument is called "input_ids" \\(did you mean "ids"\\?\\)'),
        ("decoder", "attention_mask", '"attention_mask" \\(did you mean "mask"\\?\\)'),
        ("decoder", "labels", '"labels": a call gives logits, and the loss is cross_entropy'),
        ("decoder", "token_type_ids", 'did you mean "types"'),
        ("decoder", "past_key_values", 'did you mean "cache"'),
        ("decoder", "output_hidden_states", "use ch.record, or ch.run_with_cache"),
        ("decoder", "maks", 'did you mean "mask"'),
        ("encoder-decoder", "input_ids", 'did you mean "source"'),
        ("encoder-decoder", "attention_mask", 'did you mean "source_mask"'),
        ("encoder-decoder", "decoder_input_ids", 'did you mean "ids"'),
        ("encoder-decoder", "decoder_attention_mask", 'did you mean "mask"'),
    ],
)
def test_an_argument_by_the_name_of_another_library_is_refused_with_ours(family, given, words):
    model, ids = build(family=family), some_ids()
    for others in ({}, {"ids": ids}):
        with pytest.raises(ch.InputError, match=words) as refused:
            model(**others, **{given: ids})
        assert "\n" not in str(refused.value)


# Tables at 80 columns ---------------------------------------------------------------------------------------


def test_memories_fit_80_columns_with_a_line_for_each_context(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    torch.manual_seed(0)
    model = ch.Transformer(ch.preset("micro-decoder").replace(vocab_size=257))
    ch.Model(model, byte_tokenizer(), special={"eos": 256}).save(tmp_path / "m")
    text = " ".join(f"The quick brown fox number {n} jumps over the lazy dog." for n in range(9))
    asked = ["memories", str(tmp_path / "m"), "--text", text]
    main([*asked, "--top", "5"])
    listed = capsys.readouterr().out.splitlines()
    main([*asked, "--neuron", "0.3"])
    one = capsys.readouterr().out.splitlines()
    main([*asked, "--token", "e"])
    found = capsys.readouterr().out.splitlines()
    assert max(map(len, listed + one + found)) <= 80
    assert sum("⟦" in line for line in listed) == 25 and sum("⟦" in line for line in one) == 10
    cut = [line for line in listed + one if "⟦" in line and "⟧" not in line]
    assert not cut, "a context is one line"


def test_a_confusion_matrix_fits_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    labels = tuple(f"class-{n}-with-a-long-name" for n in range(8))
    counts = ClassCounts(
        labels, torch.randint(2000, (8, 8), generator=torch.Generator().manual_seed(0)).tolist()
    )
    show_result({}, False, confusion_tables(counts))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line for line in lines if "long-name" in line]
    assert len(rows) == 8 and all(f"{n} {label} " in rows[n - 1] for n, label in enumerate(labels, start=1))
    assert len(lines) == 2 * (8 + 5), "no row is broken"


# `ch.Model` at a prompt or in a notebook -------------------------------------------------------------------


def made(**changes) -> ch.Model:
    torch.manual_seed(0)
    config = ch.preset("micro-decoder").replace(vocab_size=257, **changes)
    return ch.Model(ch.Transformer(config), byte_tokenizer(), special={"eos": 256, "pad": 0})


@pytest.mark.parametrize("name", ["micro-decoder", "micro-encoder", "micro-encoder-decoder", "vit-tiny"])
def test_a_model_shows_itself_in_a_few_lines(name):
    m = ch.Model(ch.Transformer(ch.preset(name)))
    lines = repr(m).splitlines()
    assert 3 <= len(lines) <= 8 and max(map(len, lines)) <= 80
    assert f"{sum(one.numel() for one in m.model.parameters()):,} parameters, float32 on cpu" in repr(m)
    assert m.config.family in repr(m) and f"d_model {m.config.d_model}" in repr(m)


def test_a_notebook_shows_the_same_as_a_table(tmp_path):
    folder = tmp_path / "<b>"
    made().save(folder)
    m = ch.load(folder)
    page = m._repr_html_()
    rows = re.findall(r"<tr><th>(.*?)</th><td>(.*?)</td></tr>", page)
    assert page == f"<table>{''.join(f'<tr><th>{a}</th><td>{b}</td></tr>' for a, b in rows)}</table>"
    assert [name for name, _ in rows] == [line.split(":")[0].strip() for line in repr(m).splitlines()[1:]]
    assert "&lt;b&gt;" in page and "<b>" not in page


def test_to_moves_and_casts_in_place(tmp_path):
    m = made()
    wanted = m.generate("hello", 5).ids
    assert m.to("cpu") is m and m.to(device=torch.device("cpu"), dtype=None) is m
    for given in (("float64",), (torch.float64,), ("cpu", "float64"), ("auto", torch.float64)):
        if given[0] != "auto" or not torch.cuda.is_available():
            assert made().to(*given).model.head.out.weight.dtype == torch.float64
    assert m.to("bfloat16").to("float32").model.config == m.config
    assert made().to("float64").generate("hello", 5).ids == wanted
    m.save(tmp_path / "m", dtype="bfloat16")
    assert ch.load(tmp_path / "m").model.head.out.weight.dtype == torch.bfloat16
    assert ch.load(tmp_path / "m", "float32", "auto").model.head.out.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"device": "gpu"}, 'device "gpu" is not known: choose auto or one of .*cpu'),
        ({"device": "cuda:99"}, 'device "cuda:99" is not on this machine'),
        ({"device": 1.5}, 'device "1.5" is not known'),
        ({"dtype": "int8"}, "'int8' is not one that weights may have: choose from float32, bfloat16"),
        ({"dtype": torch.int64}, "'torch.int64' is not one"),
        ({"dtype": "fp16"}, "'fp16' is not one"),
        ({"dtype": 16}, "'16' is not one"),
        ({"device": "meta"}, 'device "meta" is not on this machine'),
    ],
)
def test_a_device_or_dtype_that_cannot_be_used_is_said_in_one_line(arguments, words, tmp_path):
    made().save(tmp_path / "m")
    for call in (
        lambda: ch.load(tmp_path / "m", **arguments),
        lambda: made().to(**arguments),
    ):
        with pytest.raises(ch.InputError, match=words) as caught:
            call()
        assert "\n" not in str(caught.value)
    if "dtype" in arguments:
        with pytest.raises(ch.InputError, match=words):
            made().save(tmp_path / "n", dtype=arguments["dtype"])
        assert not (tmp_path / "n").exists()


def test_decode_is_the_way_back():
    m = made()
    ids = m.encode(["hello", "日本"])
    assert m.decode(ids[0]) == "hello" and m.decode(ids) == ["hello", "日本"]
    assert m.decode(torch.tensor(ids[0])) == "hello" and m.decode([]) == ""
    assert m.decode([*ids[0], 256]) == "hello" and m.decode([*ids[0], 256], special=True) == "hello<|end|>"
    assert m.decode(torch.tensor([ids[0], ids[0]])) == ["hello"] * 2
    for wrong in ([1, 257], [-1], [1.5], ["a"], [True], 5):
        with pytest.raises(ch.InputError, match="token id"):
            m.decode(wrong)


@pytest.mark.parametrize("left", [False, True])
def test_a_padded_batch_gives_what_single_rows_give(left, tmp_path):
    m = made()
    texts = ["hello", "a longer text", [5, 6]]
    ids, mask = m.batch(texts, left=left)
    assert ids.shape == mask.shape == (3, 13) and mask.sum(1).tolist() == [5, 13, 2]
    with torch.no_grad():
        together = m.model(ids, mask).logits
        for row, text in enumerate(texts):
            alone = m.model(m.batch([text])[0]).logits[0]
            torch.testing.assert_close(together[row][mask[row]], alone, atol=1e-5, rtol=1e-5)
    reader = ch.load(saved(tmp_path, "BertForMaskedLM"))
    assert reader.batch(TEXTS)[0][:, 0].unique().tolist() == [reader.special["cls"]]
    for wrong in ("hello", [], ["a" * 65]):
        with pytest.raises(ch.InputError, match=r"list of texts|shorten"):
            m.batch(wrong)


def test_the_names_of_a_models_activations():
    m = made()
    wanted = ch.tap_names(m.config)
    assert ch.tap_names(m) == ch.tap_names(m.model) == ch.tap_names(torch.compile(m.model)) == wanted
    with pytest.raises(ch.InputError, match="str is not a model"):
        ch.tap_names("gpt2")
