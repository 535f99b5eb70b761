"""The GGUF reader: every type of tensor, tokenizers of both kinds, files that are broken or hostile."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.app.cli import main
from clearhead.errors import CheckpointError
from clearhead.hub.gguf import open_gguf, read_header
from tests.harness import build
from tests.test_use_commands import byte_tokenizer

gguf = pytest.importorskip("gguf")

KINDS = {int: (4, "<I"), float: (6, "<f"), bool: (7, "<?")}
LLAMA = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.embedding_length": 8,
    "llama.attention.head_count": 2,
    "llama.feed_forward_length": 8,
    "llama.context_length": 16,
}


def text(value: str | bytes) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def field(value: object) -> bytes:
    """A value with its kind."""
    if isinstance(value, str | bytes):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value, list):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
    kind, form = KINDS[type(value)]
    return struct.pack("<I", kind) + struct.pack(form, value)


def made(
    fields=LLAMA, tensors=(("token_embd.weight", (8, 4), 0, 0),), data=b"\0" * 128, counts=None
) -> bytes:
    """A GGUF file, byte by byte; a tensor is (name, sizes, type, offset)."""
    body = b"".join(text(name) + (v if isinstance(v, bytes) else field(v)) for name, v in fields.items())
    for name, sizes, kind, offset in tensors:
        body += text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)
    head = b"GGUF" + struct.pack("<IQQ", 3, *(counts or (len(tensors), len(fields)))) + body
    return head + b"\0" * (-len(head) % 32) + data


TWO = (("a", (8, 2), 0, 0), ("b", (8, 2), 0, 32))
BROKEN = {
    "no magic": (b"GGML" + made()[4:], "does not begin with GGUF"),
    "empty": (b"", "is no GGUF file: it has 0 bytes"),
    "another version": (
        made()[:4] + struct.pack("<I", 9) + made()[8:],
        "is of GGUF version 9: supported are 2",
    ),
    "many tensors": (made(counts=(2**60, 6)), "claims 1,152,921,504,606,846,976 tensors and 6 fields"),
    "many fields": (made(counts=(1, 2**40)), "claims 1 tensors and 1,099,511,627,776 fields"),
    "long text": (made({"x": struct.pack("<IQ", 8, 2**50)}), "x claims 1,125,899,906,842,624 bytes"),
    "long list": (made({"x": struct.pack("<IIQ", 9, 4, 2**50)}), "x claims 1,125,899,906,842,624 values"),
    "list of lists": (made({"x": struct.pack("<IIQ", 9, 9, 2)}), "x has a value of kind 9"),
    "kind": (made({"x": struct.pack("<I", 77)}), "x has a value of kind 77"),
    "not UTF-8": (made({"x": field(b"\xff\xfe")}), "x is not UTF-8"),
    "name not UTF-8": (made({}, ((b"\xff", (8,), 0, 0),)), "the name of a tensor is not UTF-8"),
    "type": (
        made(tensors=(("a", (8, 4), 99, 0),)),
        "tensor a is of type 99, which the gguf package does not",
    ),
    "outside": (made(tensors=(("a", (8, 4), 0, 64),)), "tensor a lies at bytes 64 to 192 of 128"),
    "far outside": (made(tensors=(("a", (2**31, 2**29), 0, 0),)), "tensor a lies at bytes 0 to"),
    "overflow": (
        made(tensors=(("a", (2**32, 2**32), 0, 0),)),
        r"tensor a has shape \(4294967296, 4294967296\)",
    ),
    "unaligned": (made(tensors=(("a", (8, 2), 0, 4),)), "tensor a lies at bytes 4 to 68"),
    "overlap": (made(tensors=TWO), "tensor b overlaps a"),
    "same name": (made(tensors=(TWO[0], ("a", (8, 2), 0, 64))), "has two tensors of one name"),
    "no axes": (made(tensors=(("a", (), 0, 0),)), "tensor a has 0 axes"),
    "nothing": (made(tensors=(("a", (0, 8), 0, 0),)), r"tensor a has shape \(8, 0\)"),
    "half a block": (made(tensors=(("a", (8, 4), 8, 0),)), "Q8_0 holds rows of a multiple of 32"),
    "alignment": (made({**LLAMA, "general.alignment": 0}), "has general.alignment 0"),
    "twice": (made({"x": field(1) + text("x") + field(1)}, counts=(0, 2)), "states x twice"),
    "no model": (made({"x": 1}), "has no general.architecture"),
    "architecture": (made({"general.architecture": "mamba"}), '"mamba": supported are falcon, gemma'),
    "no sizes": (made({"general.architecture": "llama"}), "has no llama.block_count"),
    "unknown key": (made({**LLAMA, "llama.attention.max_alibi_bias": 8.0}), "max_alibi_bias 8.0: it is not"),
    "layers differ": (
        made({**LLAMA, "llama.block_count": ["1", "2"]}),
        "block_count .*: layers must be alike",
    ),
    "a word": (made({**LLAMA, "llama.context_length": "long"}), "context_length 'long': it must be a number"),
    "no heads": (made({**LLAMA, "llama.attention.head_count": 0}), "head_count 0: it must be a whole number"),
    "parts": (made({**LLAMA, "split.count": 3}), "is one of 3 parts: join them"),
    "no table": (made(tensors=(("a", (8, 4), 0, 0),)), "has no table token_embd.weight"),
    "a huge model": (made({**LLAMA, "llama.block_count": 10**9}), "10,?000,?000,?00|1000000000"),
    "missing weights": (made(), "they do not belong together"),
    "longrope": (
        made({**LLAMA, "llama.rope.scaling.type": "longrope"}),
        "supported are none, linear and yarn",
    ),
}


@pytest.mark.ledger("P2")
@pytest.mark.parametrize(("content", "said"), BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_one_line(content, said, tmp_path, capsys):
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=said) as caught:
        ch.load(path)
    assert "\n" not in str(caught.value)


def test_every_beginning_of_a_file_is_refused(tmp_path, capsys):
    ch.Model(build(positions="rope", norm="rmsnorm", gated=True, activation="silu", bias=False)).save(
        tmp_path / "whole.gguf"
    )
    whole = (tmp_path / "whole.gguf").read_bytes()
    ch.load(tmp_path / "whole.gguf")
    for length in (*range(0, 2500, 59), len(whole) - 40):
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            ch.load(tmp_path / "cut.gguf")
    with pytest.raises(SystemExit) as caught:
        main(["generate", str(tmp_path / "cut.gguf"), "a"])
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.ledger("P2")
def test_every_type_is_read_as_the_package_reads_it(tmp_path):
    kinds = [kind for kind in gguf.GGMLQuantizationType if kind in gguf.quants._type_traits]
    writer, draw = gguf.GGUFWriter(tmp_path / "types.gguf", "llama"), np.random.default_rng(0)
    for kind in kinds:
        _, size = gguf.GGML_QUANT_SIZES[kind]
        writer.add_tensor(kind.name, draw.integers(0, 256, (3, 2 * size), dtype=np.uint8), raw_dtype=kind)
    for kind, dtype in (("F32", np.float32), ("F16", np.float16), ("F64", np.float64)):
        writer.add_tensor(kind, draw.standard_normal((3, 8)).astype(dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    theirs = {one.name: one for one in gguf.GGUFReader(tmp_path / "types.gguf").tensors}
    assert len(theirs) == len(kinds) + 3 >= 24
    for mapped in (True, False):
        for name, entry in open_gguf(read_header(tmp_path / "types.gguf"), mapped).items():
            one = theirs[name]
            wanted = one.data if name == "F64" else gguf.dequantize(one.data, one.tensor_type)
            found = entry.read().to(torch.float64 if name == "F64" else torch.float32).numpy()
            assert found.shape == entry.shape and np.array_equal(found, wanted, equal_nan=True), name
    with pytest.raises(CheckpointError, match=r'"llama.*|has no llama.block_count'):
        ch.load(tmp_path / "types.gguf")


@pytest.mark.ledger("P2")
def test_pieces_of_sentencepiece_go_both_ways(shared, tmp_path):
    folder = shared / "weights" / "stories260K"
    m = ch.load(folder / "hf", tokenizer=folder / "tok512.bin")
    m.save(tmp_path / "stories.gguf")
    back = ch.load(tmp_path / "stories.gguf")
    texts = ["Once upon a time, Lily saw 2 dogs.", " spaces  and\nlines", "naïve 中文 😀", ""]
    assert back.encode(texts) == m.encode(texts)
    assert all(torch.equal(a, b) for a, b in zip(back.model.parameters(), m.model.parameters()))
    made_here = m.generate("Once upon a time", 20)
    assert back.generate("Once upon a time", 20).text == made_here.text
    pytest.importorskip("xllamacpp")
    from benchmarks.gguf_llama import llama_greedy, llama_server

    server = llama_server(tmp_path / "stories.gguf")
    assert llama_greedy(server, "Once upon a time", 20)[0] == made_here.ids


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0"])
def test_smaller_types_are_those_of_the_package(kind, tmp_path):
    given = {"d_model": 64, "d_ff": 96, "positions": "rope", "norm": "rmsnorm", "gated": True}
    m = ch.Model(build(**given, activation="silu", bias=False))
    m.save(tmp_path / "small.gguf", kind)
    back = dict(ch.load(tmp_path / "small.gguf").model.named_parameters())
    types = {"table": "Q8_0" if kind == "Q4_0" else kind, "matrix": kind}
    for name, weight in m.model.named_parameters():
        numbers = weight.detach().numpy()
        if weight.ndim > 1 and ".q." not in name and ".k." not in name:
            named = gguf.GGMLQuantizationType[
                types["table" if "tokens" in name or "head" in name else "matrix"]
            ]
            numbers = gguf.dequantize(gguf.quantize(numbers, named), named)
        if ".q." not in name and ".k." not in name:  # whose rows lie in another order
            assert np.array_equal(back[name].detach().numpy(), numbers), name
    with pytest.raises(CheckpointError, match="cannot be written: choose from F32, F16, Q8_0, Q4_0"):
        m.save(tmp_path / "small.gguf", "Q2_K")


def test_a_tokenizer_of_single_bytes_is_read_back(tmp_path):
    """It has no merges, and a list of none is left out of a file."""
    given = {"d_model": 64, "d_ff": 96, "positions": "rope", "norm": "rmsnorm", "gated": True}
    tokenizer = byte_tokenizer()
    m = ch.Model(build(**given, activation="silu", bias=False, vocab_size=tokenizer.get_vocab_size()))
    m.tokenizer = tokenizer
    m.save(tmp_path / "bytes.gguf", "F16")
    texts = ["naïve 你好", " a\n"]
    assert ch.load(tmp_path / "bytes.gguf").encode(texts) == m.encode(texts)


UNWRITABLE = {
    "an encoder": ({"family": "encoder"}, "GGUF has no architecture for this model"),
    "alibi": ({"positions": "alibi"}, "GGUF has no architecture for this model"),
    "a window": (
        {
            "positions": "rope",
            "norm": "rmsnorm",
            "gated": True,
            "activation": "silu",
            "bias": False,
            "window": 4,
        },
        "GGUF's llama cannot express window 4",
    ),
}


@pytest.mark.parametrize(("changes", "said"), UNWRITABLE.values(), ids=UNWRITABLE)
def test_what_a_file_cannot_hold_is_refused_by_name(changes, said, tmp_path):
    with pytest.raises(CheckpointError, match=said):
        ch.Model(build(**changes)).save(tmp_path / "none.gguf")
    assert not list(tmp_path.iterdir())
