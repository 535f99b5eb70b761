"""`ch.Model` at a prompt or in a notebook: its repr, `to`, `decode`, `batch`, names of activations."""

import re

import pytest
import torch

import clearhead as ch
from tests.test_tasks import TEXTS, saved
from tests.test_use_commands import byte_tokenizer


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
