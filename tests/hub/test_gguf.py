"""GGUF files: ours opened by llama.cpp with the same tokens, and read back here, for each architecture."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import clearhead as ch
from clearhead.app.cli import main
from clearhead.errors import CheckpointError
from clearhead.hub.gguf import open_gguf, read_header
from tests.harness import build, byte_tokenizer

gguf = pytest.importorskip("gguf")

WORDS = ["It's a test of 1234 words, isn't it?\n", "the quick brown fox jumps over the lazy dog "] * 20
BASE = {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES = {**BASE, "intermediate_size": 96, "max_position_embeddings": 128}
ENDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
GROUPED = {**SIZES, "num_key_value_heads": 2, **ENDS}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS = {
    "llama": transformers.LlamaConfig(**GROUPED, rope_theta=5e4),
    "llama wide heads, biases": transformers.LlamaConfig(
        **GROUPED, head_dim=24, attention_bias=True, tie_word_embeddings=True
    ),
    "llama 3": transformers.LlamaConfig(
        **GROUPED, rope_scaling={**LLAMA3, "original_max_position_embeddings": 128}
    ),
    "llama linear": transformers.LlamaConfig(**GROUPED, rope_scaling={"rope_type": "linear", "factor": 2.0}),
    "mixtral": transformers.MixtralConfig(**GROUPED, num_local_experts=4),
    "qwen2": transformers.Qwen2Config(**GROUPED),
    "qwen3": transformers.Qwen3Config(**GROUPED, head_dim=32),
    "gpt2": transformers.GPT2Config(vocab_size=320, n_embd=64, n_layer=2, n_head=4, n_positions=128, **ENDS),
    "gemma": transformers.GemmaConfig(**GROUPED, head_dim=32),
    "gemma2": transformers.Gemma2Config(**GROUPED, head_dim=32, query_pre_attn_scalar=32, sliding_window=8),
    "gemma3": transformers.Gemma3TextConfig(
        **{**GROUPED, "num_hidden_layers": 7}, head_dim=32, query_pre_attn_scalar=32, sliding_window=8
    ),
    "neox": transformers.GPTNeoXConfig(**SIZES, **ENDS),
    "neox in turn": transformers.GPTNeoXConfig(**SIZES, **ENDS, use_parallel_residual=False),
    "falcon": transformers.FalconConfig(**BASE, **ENDS, new_decoder_architecture=False),
    "falcon new": transformers.FalconConfig(**BASE, **ENDS, new_decoder_architecture=True, num_kv_heads=2),
    "phi": transformers.PhiConfig(**GROUPED),
    "phi3": transformers.Phi3Config(**GROUPED),
    "olmo2": transformers.Olmo2Config(**GROUPED),
    "stablelm": transformers.StableLmConfig(**GROUPED, use_qkv_bias=True),
    "granite": transformers.GraniteConfig(
        **GROUPED,
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        attention_multiplier=0.2,
        logits_scaling=2.0,
    ),
    "smollm3": transformers.SmolLM3Config(**{**GROUPED, "num_hidden_layers": 5}),
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A byte-level tokenizer of 320 tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<pad>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        WORDS, trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet)
    )
    return made


def opened(config: transformers.PretrainedConfig, tokenizer: Tokenizer, tmp_path) -> ch.Model:
    """A model of theirs with numbers that matter, opened here."""
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3 + (parameter.ndim == 1 and "bias" not in name))
    theirs.save_pretrained(tmp_path / "theirs")
    m = ch.load(tmp_path / "theirs")
    m.tokenizer, m.special = tokenizer, {"bos": 0, "eos": 1, "pad": 2}
    m.settings["chat_template"] = "{{ messages[0]['content'] }}"
    return m


@pytest.mark.ledger("P2")
@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_a_written_file_is_the_same_model_here_and_in_llama_cpp(config, tokenizer, tmp_path, differences):
    m = opened(config, tokenizer, tmp_path)
    m.save(tmp_path / "ours.gguf", "F32")
    back = ch.load(tmp_path / "ours.gguf")
    ids = torch.arange(3, 60)[None]
    with torch.no_grad():
        assert differences.see("read back", back.model(ids).logits, m.model(ids).logits) < 1e-4
    assert back.special == m.special and back.settings["chat_template"] == m.settings["chat_template"]
    assert back.encode(WORDS[:2]) == m.encode(WORDS[:2])
    pytest.importorskip("xllamacpp")
    from benchmarks.quantize import llama_greedy, llama_server

    server, compared = llama_server(tmp_path / "ours.gguf", 128), 0
    for length in range(3, 40, 4):
        prompt = list(range(3, 3 + length))
        theirs, scores = llama_greedy(server, prompt, 1)
        with torch.no_grad():
            ours = m.model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        assert theirs == [int(ours.argmax())]
        if scores:  # of a token that ends a character
            # Its GELU is a table in half precision.
            assert differences.see("llama.cpp", ours.max()[None], torch.tensor(scores)) < 5e-3
            compared += 1
    assert compared > 2


# The GGUF reader -----------------------------------------------------------------------------------------


KINDS = {int: (4, "<I"), float: (6, "<f"), bool: (7, "<?")}
FIELDS = {
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
    fields=FIELDS, tensors=(("token_embd.weight", (8, 4), 0, 0),), data=b"\0" * 128, counts=None
) -> bytes:
    """A GGUF file, byte by byte; a tensor is (name, sizes, type, offset)."""
    body = b"".join(text(name) + (v if isinstance(v, bytes) else field(v)) for name, v in fields.items())
    for name, sizes, kind, offset in tensors:
        body += text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)
    head = b"GGUF" + struct.pack("<IQQ", 3, *(counts or (len(tensors), len(fields)))) + body
    return head + b"\0" * (-len(head) % 32) + data


TWO = (("a", (8, 2), 0, 0), ("b", (8, 2), 0, 32))
BROKEN = {
    "does not begin with GGUF": b"GGML" + made()[4:],
    "is no GGUF file: it has 0 bytes": b"",
    "is of GGUF version 9: supported are 2": made()[:4] + struct.pack("<I", 9) + made()[8:],
    "claims 1,152,921,504,606,846,976 tensors and 6 fields": made(counts=(2**60, 6)),
    "claims 1 tensors and 1,099,511,627,776 fields": made(counts=(1, 2**40)),
    "x claims 1,125,899,906,842,624 bytes": made({"x": struct.pack("<IQ", 8, 2**50)}),
    "x claims 1,125,899,906,842,624 values": made({"x": struct.pack("<IIQ", 9, 4, 2**50)}),
    "x has a value of kind 9": made({"x": struct.pack("<IIQ", 9, 9, 2)}),
    "x has a value of kind 77": made({"x": struct.pack("<I", 77)}),
    "x is not UTF-8": made({"x": field(b"\xff\xfe")}),
    "the name of a tensor is not UTF-8": made({}, ((b"\xff", (8,), 0, 0),)),
    "tensor a is of type 99, which the gguf package does not": made(tensors=(("a", (8, 4), 99, 0),)),
    "tensor a lies at bytes 64 to 192 of 128": made(tensors=(("a", (8, 4), 0, 64),)),
    "tensor a lies at bytes 0 to": made(tensors=(("a", (2**31, 2**29), 0, 0),)),
    r"tensor a has shape \(4294967296, 4294967296\)": made(tensors=(("a", (2**32, 2**32), 0, 0),)),
    "tensor a lies at bytes 4 to 68": made(tensors=(("a", (8, 2), 0, 4),)),
    "tensor b overlaps a": made(tensors=TWO),
    "has two tensors of one name": made(tensors=(TWO[0], ("a", (8, 2), 0, 64))),
    "tensor a has 0 axes": made(tensors=(("a", (), 0, 0),)),
    r"tensor a has shape \(8, 0\)": made(tensors=(("a", (0, 8), 0, 0),)),
    "Q8_0 holds rows of a multiple of 32": made(tensors=(("a", (8, 4), 8, 0),)),
    "has general.alignment 0": made({**FIELDS, "general.alignment": 0}),
    "states x twice": made({"x": field(1) + text("x") + field(1)}, counts=(0, 2)),
    "has no general.architecture": made({"x": 1}),
    '"mamba": supported are falcon, gemma': made({"general.architecture": "mamba"}),
    "has no llama.block_count": made({"general.architecture": "llama"}),
    "max_alibi_bias 8.0: it is not": made({**FIELDS, "llama.attention.max_alibi_bias": 8.0}),
    "block_count .*: layers must be alike": made({**FIELDS, "llama.block_count": ["1", "2"]}),
    "context_length 'long': it must be a number": made({**FIELDS, "llama.context_length": "long"}),
    "head_count 0: it must be a whole number": made({**FIELDS, "llama.attention.head_count": 0}),
    "is one of 3 parts: join them": made({**FIELDS, "split.count": 3}),
    "has no table token_embd.weight": made(tensors=(("a", (8, 4), 0, 0),)),
    "10,?000,?000,?00|1000000000": made({**FIELDS, "llama.block_count": 10**9}),
    "they do not belong together": made(),
    "supported are none, linear and yarn": made({**FIELDS, "llama.rope.scaling.type": "longrope"}),
}


@pytest.mark.ledger("P2")
@pytest.mark.parametrize(("said", "content"), BROKEN.items(), ids=BROKEN)
def test_a_broken_file_is_one_line(said, content, tmp_path):
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
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "types.gguf").tensors}
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
    from benchmarks.quantize import llama_greedy, llama_server

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
        dict(positions="rope", norm="rmsnorm", gated=True, activation="silu", bias=False, window=4),
        "GGUF's llama cannot express window 4",
    ),
}


@pytest.mark.parametrize(("changes", "said"), UNWRITABLE.values(), ids=UNWRITABLE)
def test_what_a_file_cannot_hold_is_refused_by_name(changes, said, tmp_path):
    with pytest.raises(CheckpointError, match=said):
        ch.Model(build(**changes)).save(tmp_path / "none.gguf")
    assert not list(tmp_path.iterdir())
