"""Damaged, hostile and mistaken directories: each is one line, costs no memory, and runs nothing."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import re
import resource
import shutil
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import clearhead as ch
from clearhead.hub import weights
from clearhead.hub.checkpoint import describe
from clearhead.hub.registry import ARCHITECTURES
from tests.parity.harness import reopened

transformers.logging.set_verbosity_error()
pytestmark = pytest.mark.ledger("L2", "L3")

GPT2 = ch.ModelConfig(
    vocab_size=17, d_model=8, n_layers=2, n_heads=2, max_positions=16, activation="gelu_tanh"
)
LLAMA = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 17, "hidden_size": 8},
    **{"intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1},
    **{"max_position_embeddings": 16, "rope_theta": 10000.0, "rms_norm_eps": 1e-6},
    **{"tie_word_embeddings": False, "attention_bias": False},
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8},
}
WPE = "transformer.wpe.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ch.Model(ch.Transformer(GPT2).eval()).save(tmp_path / "model")
    return tmp_path / "model"


def refusal(folder: Path) -> str:
    """The one line with which loading fails."""
    with pytest.raises(ch.CheckpointError) as caught:
        ch.load(folder)
    line = str(caught.value)
    assert "\n" not in line and len(line) < 600, line
    return line


def lacking(folder: Path, *words: str) -> list[str]:
    """Return those of these words that the line does not have with which loading fails, and the line."""
    line = refusal(folder)
    missing = [word for word in words if word not in line]
    return [*missing, line] if missing else []


def parts(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def rebuilt(path: Path, header: Any, body: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


# Weights ----------------------------------------------------------------------------------------------------


def with_header(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


CUTS, SIZES = (0, 3, 8, 20, -1, -100), (0, 1, 2**20, 2**40, 2**63, 2**64 - 1)
TEXTS = (b"", b"{", b"[]", b"7", b"\xff\xff", b"[" * 100_000, b'{"a":' * 5_000)
BYTES: dict[str, Callable[[bytes], bytes]] = {
    **{f"cut at {keep}": lambda data, keep=keep: data[:keep] for keep in CUTS},
    **{f"header of {size}": lambda data, size=size: struct.pack("<Q", size) + data[8:] for size in SIZES},
    **{f"header {text[:6]!r}": lambda data, text=text: with_header(text) for text in TEXTS},
    "64 bytes after its last tensor": lambda data: data + b"\0" * 64,
}


@pytest.mark.parametrize("name", BYTES)
def test_damaged_bytes_are_refused_and_take_no_memory(folder: Path, name: str) -> None:
    path, word = folder / "model.safetensors", name if "64 bytes" in name else "safetensors"
    path.write_bytes(BYTES[name](path.read_bytes()))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert not lacking(folder, word)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kilobytes


def entry(**fields: Any) -> Callable[[dict[str, Any]], None]:
    """Change the entry of a tensor in a header; a field of None is left out."""

    def apply(header: dict[str, Any]) -> None:
        header[WPE] = {name: value for name, value in {**header[WPE], **fields}.items() if value is not None}

    return apply


def move(by: int) -> Callable[[dict[str, Any]], None]:
    def apply(header: dict[str, Any]) -> None:
        tensors = [entry for name, entry in header.items() if name != "__metadata__"]
        second = sorted(tensors, key=lambda entry: entry["data_offsets"])[1]
        second["data_offsets"] = [offset + by for offset in second["data_offsets"]]

    return apply


def add(name: str, shape: list[int]) -> Callable[[dict[str, Any]], None]:
    return lambda header: header.update({name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}})


HEADERS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "overlapping": (move(-64), "overlaps"),
    "hole": (move(64), "transformer"),
    "out of range": (move(10**9), "cut short or damaged"),
    "negative": (move(-(10**9)), "whole numbers"),
    "unknown dtype": (entry(dtype="F4"), "F4"),
    "dtype of another size": (entry(dtype="F16"), "does not fill"),
    "dtype no text": (entry(dtype=["F32"]), "known are"),
    "absurd shape": (entry(shape=[2**40, 2**40]), "does not fill"),
    "negative shape": (entry(shape=[-16, -8]), "whole numbers"),
    "shape no list": (entry(shape="16x8"), "whole numbers"),
    "no offsets": (entry(data_offsets=None), "lacks"),
    "entry no table": (lambda header: header.update({WPE: 7}), "lacks"),
    "unexpected key": (add("extra", [0]), "extra"),
}


def change_header(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    header, body = parts(folder / "model.safetensors")
    change(header)
    rebuilt(folder / "model.safetensors", header, body)


@pytest.mark.parametrize("name", HEADERS)
def test_a_damaged_header(folder: Path, name: str) -> None:
    change, word = HEADERS[name]
    change_header(folder, change)
    assert not lacking(folder, word)


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


JOINED = "transformer.h.0.attn.c_attn.weight"
TENSORS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], tuple[str, ...]]] = {
    "whole numbers": (lambda x: x.update({WPE: torch.zeros(16, 8).int()}), (WPE, "int32", "floating point")),
    "another shape": (lambda x: x.update({WPE: torch.zeros(16, 9)}), (WPE, "(16, 9)", "needs (")),
    "a shape of three": (lambda x: x.update({JOINED: torch.zeros(8, 25)}), (JOINED, "(8, 25)", "needs (")),
    "missing": (
        lambda x: x.pop("transformer.h.1.ln_1.weight"),
        ("blocks.1.attention_residual.before.weight", "incomplete"),
    ),
    "unexpected": (lambda x: x.update({"transformer.h.1.ln_9.weight": torch.zeros(8)}), ("h.1.ln_9.weight",)),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_that_does_not_fit_is_named(folder: Path, name: str) -> None:
    change, words = TENSORS[name]
    change_tensors(folder, change)
    assert not lacking(folder, *words)


# Shards and directories -------------------------------------------------------------------------------------


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    ch.Model(ch.Transformer(GPT2).eval()).save(tmp_path / "shards", shard_size=1500)
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 3
    return tmp_path / "shards"


def index_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "model.safetensors.index.json").read_text())


def test_a_missing_shard(shards: Path) -> None:
    name = sorted(set(index_of(shards)["weight_map"].values()))[1]
    (shards / name).unlink()
    assert not lacking(shards, name, "missing")


@pytest.mark.parametrize(
    "target", ["../outside.safetensors", "/etc/passwd", "sub/../../outside.safetensors", 7, ["a"], None]
)
def test_an_index_that_leads_outside(shards: Path, target: Any) -> None:
    index = index_of(shards)
    name = next(iter(index["weight_map"]))
    shutil.copy(shards / index["weight_map"][name], shards.parent / "outside.safetensors")
    index["weight_map"][name] = target
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    assert not lacking(shards, "index.json")


INDICES = (
    "[]",
    "{}",
    "{",
    '{"weight_map": []}',
    '{"weight_map": {}}',
    '{"weight_map": {"a": "b.x"}}',
)


@pytest.mark.parametrize("index", INDICES)
def test_a_broken_index(shards: Path, index: str) -> None:
    (shards / "model.safetensors.index.json").write_text(index)
    assert refusal(shards)


def test_a_link_out_of_the_directory(folder: Path) -> None:
    outside = folder.parent / "outside.safetensors"
    (folder / "model.safetensors").rename(outside)
    (folder / "model.safetensors").symlink_to(outside)
    assert not lacking(folder, "link out of the model's directory")


def test_the_links_of_a_hub_cache_are_followed(folder: Path) -> None:
    cache = folder.parent / "models--x"
    (cache / "blobs").mkdir(parents=True)
    snapshot = cache / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for path in folder.iterdir():
        path.rename(cache / "blobs" / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    assert ch.load(snapshot).config == GPT2


def test_no_directory_at_all(folder: Path) -> None:
    assert not lacking(folder / "nothing", "not a directory")
    assert not lacking(folder / "config.json", "is a file and no GGUF file")
    empty = folder.parent / "empty"
    empty.mkdir()
    assert not lacking(empty, "config.json does not exist")
    (folder / "model.safetensors").unlink()
    assert not lacking(folder, "holds no weights")


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "generation_config.json", "tokenizer.json"]
)
def test_a_file_that_is_a_directory_or_unreadable(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Path.open

    def guarded(self: Path, *args: Any, **options: Any) -> Any:
        if self.name == name:
            raise PermissionError(errno.EACCES, "Permission denied")
        return original(self, *args, **options)

    if name not in ("tokenizer.json", "generation_config.json"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", guarded)
            assert not lacking(folder, "Permission denied")
    (folder / name).unlink(missing_ok=True)
    (folder / name).mkdir()
    assert not lacking(folder, name)


# Pickles ----------------------------------------------------------------------------------------------------


def pickled(folder: Path, state: Any) -> Path:
    (folder / "model.safetensors").unlink(missing_ok=True)
    torch.save(state, folder / "pytorch_model.bin")
    return folder / "pytorch_model.bin"


def test_a_plain_pickle_is_read(folder: Path) -> None:
    before = ch.load(folder).model(torch.arange(5)[None]).logits
    pickled(folder, dict(load_file(folder / "model.safetensors")))
    assert torch.equal(ch.load(folder).model(torch.arange(5)[None]).logits, before)


class Hostile:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (Path.write_text, (self.marker, "it ran"))


@pytest.mark.parametrize("form", ["torch", "bare pickle", "inside the table"])
def test_a_pickle_with_code_is_refused_and_not_run(folder: Path, form: str) -> None:
    marker = folder.parent / "marker"
    if form == "bare pickle":
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Hostile(marker)))
    else:
        state = dict(load_file(folder / "model.safetensors"))
        pickled(folder, Hostile(marker) if form == "torch" else {**state, "extra": Hostile(marker)})
    assert not lacking(folder, "pytorch_model.bin is refused")
    assert not marker.exists()


def test_a_truncated_pickle_and_one_without_tensors(folder: Path) -> None:
    path = pickled(folder, dict(load_file(folder / "model.safetensors")))
    whole = path.read_bytes()
    for keep in (0, 10, len(whole) // 2, len(whole) - 10):
        path.write_bytes(whole[:keep])
        assert not lacking(folder, "pytorch_model.bin is refused")
    pickled(folder, [1, 2])
    assert not lacking(folder, "holds a list")
    pickled(folder, {"a": 1, 7: torch.zeros(2)})
    assert refusal(folder)


NOT_PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sparse_coo": lambda x: x.to_sparse(),
    "sparse_csr": lambda x: x.to_sparse_csr(),
    "nested": lambda x: torch.nested.nested_tensor([x, x[:3]]),
    "expanded": lambda x: torch.zeros(1).expand(2**40, 8),
    "float8_e4m3fn": lambda x: x.to(torch.float8_e4m3fn),
    "complex64": lambda x: x.to(torch.complex64),
    "without data": lambda x: x.to("meta"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_a_pickled_tensor_that_is_not_plain(folder: Path, kind: str) -> None:
    state = dict(load_file(folder / "model.safetensors"))
    pickled(folder, {**state, WPE: NOT_PLAIN[kind](state[WPE])})
    assert not lacking(folder, "pytorch_model.bin", WPE, kind)


@pytest.mark.parametrize(
    "shape", [[2**40, 0], [2**40, 2**40, 0], [0, 2**62, 2**62], [2**63 - 1, 0], [0] * 70]
)
def test_a_tensor_without_numbers(folder: Path, shape: list[int]) -> None:
    change_tensors(folder, lambda tensors: tensors.pop(WPE))
    change_header(folder, add(WPE, shape))
    assert not lacking(folder, WPE)


@pytest.mark.parametrize("name", ["a\nb", "\ud800", "x\x1b[31m", "n" * 100_000])
def test_a_name_that_no_terminal_shows(folder: Path, name: str) -> None:
    change_header(folder, add(name, [0]))
    with pytest.raises(ch.CheckpointError) as caught:
        ch.load(folder)
    line = str(caught.value)
    assert len(line.encode()) < 2000  # and so it is UTF-8
    assert not {*line} & {"\n", "\x1b"}


# Parts that panic in the tokenizers library, where they are read or at the first text.
SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
TEMPLATE = {"SpecialToken": {"id": "[Q]", "type_id": 0}}
NO_MORE: dict[str, Any] = {"pair": [], "special_tokens": {}}
PANICS: dict[str, dict[str, Any]] = {
    "regex": {"pre_tokenizer": {**SPLIT, "pattern": {"Regex": r"((a|a)+)+$"}}},
    "length": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "map": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "template": {"post_processor": {"type": "TemplateProcessing", "single": [TEMPLATE], **NO_MORE}},
}


@pytest.mark.parametrize("part", PANICS)
def test_a_tokenizer_that_panics(folder: Path, part: str, capfd: pytest.CaptureFixture[str]) -> None:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    (folder / "tokenizer.json").write_text(json.dumps(json.loads(made.to_str()) | PANICS[part]))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(ch.ClearheadError) as caught:
        ch.load(folder).encode(["a" * 60 + "!"])
    assert "tokenizer" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_decoder_that_panics_at_some_tokens_only(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "bb": 1, "[UNK]": 2}, unk_token="[UNK]"))
    made.decoder = tokenizers.decoders.Strip("b", 5, 5)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    m = ch.load(folder)
    assert m.decode([0]) == "a"
    for write in (lambda: m.decode([1]), lambda: m.generate([0, 1], 1, alternatives=3)):
        with pytest.raises(ch.ClearheadError, match=r"^the tokenizer cannot write a text: [^\n]*$"):
            write()


# config.json ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "not readable JSON"),
        ("[1]", "JSON object"),
        ("null", "JSON object"),
        ('{"model_type":', "not readable"),
        ("{}", "model_type None"),
    ],
)
def test_a_config_that_is_no_config(folder: Path, text: str, word: str) -> None:
    (folder / "config.json").write_text(text)
    assert not lacking(folder, "config.json", word)


def test_an_unknown_model_type_points_to_the_list(folder: Path) -> None:
    for name in ("gtp2", "mamba", "xlnet"):  # no guess: a name that looks alike is another family's
        (folder / "config.json").write_text(json.dumps({"model_type": name}))
        assert not lacking(folder, name, f"{len(ARCHITECTURES)} architectures", "docs/models.md")
        assert "did you mean" not in refusal(folder)
    page = Path(__file__).parents[2] / "docs" / "models.md"
    assert "## Architectures" in page.read_text()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", ["safetensors", "pickle", "converted"])
def test_weights_that_are_not_finite_are_refused_by_name(
    folder: Path, value: float, dtype: torch.dtype, form: str
) -> None:
    """One number of any tensor, in any file and dtype; told, the model opens all the same."""
    rng = random.Random(f"{value} {dtype} {form}")
    wanted = torch.float32 if form == "converted" else None
    for name in rng.sample(sorted(load_file(folder / "model.safetensors")), 3):
        tensors = {key: tensor.to(dtype) for key, tensor in load_file(folder / "model.safetensors").items()}
        tensors[name].view(-1)[rng.randrange(tensors[name].numel())] = value
        copy = folder.parent / f"{name}"
        shutil.copytree(folder, copy)
        (copy / "model.safetensors").unlink()
        if form == "pickle":
            torch.save(tensors, copy / "pytorch_model.bin")
        else:
            save_file(tensors, copy / "model.safetensors", {"format": "pt"})
        with pytest.raises(
            ch.CheckpointError, match=rf"tensor {re.escape(name)} has 1 numbers .*check_finite"
        ):
            ch.load(copy, dtype=wanted)
        opened = ch.load(copy, dtype=wanted, check_finite=False)
        assert sum(int((~weight.isfinite()).sum()) for weight in opened.model.parameters()) == 1


def test_large_numbers_are_finite(folder: Path) -> None:
    """Their sum is not: each is looked at before a file is refused."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["transformer.ln_f.weight"][:] = 3e38

    change_tensors(folder, change)
    assert ch.load(folder).model.decoder.norm.weight[0].item() == pytest.approx(3e38)


SIZES = ("hidden_size", "num_hidden_layers", "vocab_size", "num_key_value_heads")
WRONG = ("big", -8, 0, 8.5, [8], {"a": 8}, True, 10**30, 10**400, 9_999, "8")


def test_values_that_are_wrong_null_or_absent_are_one_line(folder: Path) -> None:
    """The weights are of another model, so that loading ends in one line whatever the value is."""
    configs = [{**LLAMA, key: value} for key in SIZES for value in WRONG]
    for key in ("hidden_size", "rms_norm_eps", "rope_scaling", "architectures", "hidden_act"):
        configs += [{**LLAMA, key: None}, {name: value for name, value in LLAMA.items() if name != key}]
    for config in configs:
        (folder / "config.json").write_text(json.dumps(config))
        assert refusal(folder)


# Fuzz: whatever the bytes, the only exception is a ClearheadError -------------------------------------------

QUICK = settings(max_examples=60)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-2, 20)
    | st.floats()
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def complaint(action: Callable[[], Any]) -> str:
    """What our own error says, or nothing; any other error is raised."""
    try:
        action()
    except ch.ClearheadError as error:
        return str(error)
    return ""


def read_all(path: Path) -> None:
    for entry in weights.open_safetensors(path).values():
        entry.read()
        entry.release()


@QUICK
@given(data=st.binary(max_size=300))
def test_any_bytes_as_safetensors(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "model.safetensors"
        for head in (data, struct.pack("<Q", len(data)) + data):
            path.write_bytes(head)
            assert "\n" not in complaint(lambda: read_all(path))


@QUICK
@given(
    value=JSON,
    where=st.sampled_from(["dtype", "shape", "data_offsets", "entry", "new", "shape.0", "data_offsets.1"]),
)
def test_any_change_of_a_header(value: Any, where: str) -> None:
    header: dict[str, Any] = {
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]},
    }
    key, _, index = where.partition(".")
    if where in ("entry", "new"):
        header["a" if where == "entry" else "c"] = value
    elif index:
        header["a"][key][int(index)] = value
    else:
        header["a"][key] = value
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "model.safetensors"
        rebuilt(path, header, b"\0" * 26)
        assert "\n" not in complaint(lambda: read_all(path))


GPT2_JSON = {
    **{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 17, "n_positions": 16},
    **{"n_embd": 8, "n_layer": 2, "n_head": 2, "n_inner": None, "activation_function": "gelu_new"},
    **{"layer_norm_epsilon": 1e-5, "resid_pdrop": 0.1, "attn_pdrop": 0.1, "tie_word_embeddings": True},
    **{"id2label": {"0": "a"}, "num_labels": 2, "scale_attn_weights": True, "initializer_range": 0.02},
}
FIELDS = ("clearhead", "rope_parameters", "head_dim", "original_max_position_embeddings")
ROPE = ("factor", "rope_type", "low_freq_factor", "rope_theta", "short_factor", "partial_rotary_factor")


@settings(QUICK, max_examples=150)
@given(data=st.data(), config=st.sampled_from([GPT2_JSON, LLAMA]))
def test_any_change_of_a_config(data: st.DataObject, config: dict[str, Any]) -> None:
    changed = dict(config)
    for _ in range(data.draw(st.integers(1, 2))):
        changed[data.draw(st.sampled_from([*config, *FIELDS]))] = data.draw(JSON)
    if data.draw(st.booleans()):
        kind = data.draw(st.sampled_from(["ForSequenceClassification", "ForTokenClassification"]))
        changed["architectures"] = [("GPT2" if config is GPT2_JSON else "Llama") + kind]
    if data.draw(st.booleans()):
        kind, part = (
            data.draw(st.sampled_from(["yarn", "llama3", "longrope"])),
            data.draw(st.sampled_from(ROPE)),
        )
        changed["rope_parameters"] = {"rope_type": kind, part: data.draw(JSON)}
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "config.json").write_text(json.dumps(changed))
        assert "\n" not in complaint(lambda: describe(Path(place)))


# Saving -----------------------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return ch.load(folder).model(torch.arange(7)[None]).logits


@pytest.mark.parametrize("target", ["old", "new"])
@pytest.mark.parametrize(
    "fault", ["weights", "config", "sync", "second replace", "last replace", "no space for a folder"]
)
def test_a_fault_while_saving_changes_nothing(
    folder: Path, fault: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = folder if target == "old" else folder.parent / "new"
    if target == "new" and "replace" in fault:
        fault = "first replace"
    before = contents(folder)
    full = OSError(errno.ENOSPC, "No space left on device")
    calls = {"replace": 0}
    real_replace = os.replace

    def failing(*_: Any, **__: Any) -> None:
        raise full

    def replace(source: Any, destination: Any) -> None:
        calls["replace"] += 1
        if calls["replace"] == {"first replace": 1, "second replace": 2, "last replace": 3}.get(fault):
            raise full
        real_replace(source, destination)

    if fault == "weights":
        monkeypatch.setattr(weights.SafetensorsWriter, "add", failing)
    elif fault == "config":
        monkeypatch.setattr("clearhead.hub.checkpoint.write_json", failing)
    elif fault == "sync":
        monkeypatch.setattr(os, "fsync", failing)
    elif fault == "no space for a folder":
        monkeypatch.setattr(tempfile, "mkdtemp", failing)
    else:
        monkeypatch.setattr(os, "replace", replace)
    other = ch.Model(ch.Transformer(GPT2.replace(n_layers=1)), generation={"top_k": 3})
    with pytest.raises(ch.CheckpointError, match="No space left on device"):
        other.save(place, shard_size=3000)
    monkeypatch.undo()
    assert contents(folder) == before
    assert sorted(path.name for path in folder.parent.iterdir()) == ["model"]


def test_saving_where_a_file_stands(folder: Path) -> None:
    model = ch.load(folder)
    with pytest.raises(ch.CheckpointError, match="is a file"):
        model.save(folder / "config.json")
    with pytest.raises(ch.CheckpointError, match="cannot write"):
        model.save(folder / "config.json" / "below")


def test_a_read_only_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ch.load(folder)

    def denied(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(tempfile, "mkdtemp", denied)  # the suite may run as root, whom no mode stops
    with pytest.raises(ch.CheckpointError, match="Permission denied"):
        model.save(folder)


def test_saving_over_the_directory_it_came_from(folder: Path) -> None:
    wanted = logits(folder)
    (folder / "notes.txt").write_text("mine")
    loaded = ch.load(folder)  # its weights are still mapped from the file that is about to be replaced
    for _ in range(2):
        loaded.save(folder)
        assert torch.equal(logits(folder), wanted)
        assert torch.equal(loaded.model(torch.arange(7)[None]).logits, wanted)
    assert (folder / "notes.txt").read_text() == "mine"


def test_shards_and_one_file_replace_each_other(folder: Path) -> None:
    wanted = logits(folder)
    loaded = ch.load(folder)
    loaded.save(folder, shard_size=1500)
    assert not (folder / "model.safetensors").exists()
    assert torch.equal(logits(folder), wanted)
    again = reopened(transformers.AutoModelForCausalLM, folder)
    with torch.no_grad():
        assert torch.allclose(again(torch.arange(7)[None]).logits, wanted, atol=1e-6)
    ch.load(folder).save(folder)
    assert not list(folder.glob("model-*"))
    assert not (folder / "model.safetensors.index.json").exists()
    assert torch.equal(logits(folder), wanted)


def test_labels_settings_and_generation_are_kept(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 17, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
    config = transformers.GPT2Config(**sizes, id2label={0: "no", 1: "yes", 2: "?"}, pad_token_id=0)
    transformers.GPT2ForSequenceClassification(config).save_pretrained(tmp_path / "theirs")
    loaded = ch.load(tmp_path / "theirs")
    assert loaded.labels == ("no", "yes", "?")
    assert loaded.special["pad"] == 0
    loaded.generation = {"top_k": 5, "eos_token_id": [1, 2]}
    loaded.save(tmp_path / "ours")
    again = ch.load(tmp_path / "ours")
    assert again.labels == loaded.labels
    assert again.generation == loaded.generation
    assert again.stops == (1, 2)
    assert transformers.AutoConfig.from_pretrained(tmp_path / "ours").id2label == {0: "no", 1: "yes", 2: "?"}
    fresh = ch.Model(loaded.model, labels=("a", "b", "c"))
    fresh.save(tmp_path / "fresh")
    assert ch.load(tmp_path / "fresh").labels == ("a", "b", "c")
