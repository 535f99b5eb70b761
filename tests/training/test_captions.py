"""Two towers trained from captioned pictures: they learn, and a resumed run ends as a whole one does."""

from __future__ import annotations

import json
import pathlib
import zipfile

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file

import clearhead as ch
from clearhead.errors import ConfigError
from clearhead.learn.tasks.entries.align import read_captions
from clearhead.learn.tasks.vectors import image_pixels, text_inputs
from clearhead.learn.training.events import read_log
from tests.training.test_run import StopAt

pytestmark = pytest.mark.ledger("L11")
COLOURS = {"red": (220, 20, 20), "green": (20, 220, 20), "blue": (20, 20, 220)}


@pytest.fixture(scope="module")
def captions(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Thirty noisy pictures of three colours, each with its caption, as TSV."""
    folder, generator = tmp_path_factory.mktemp("captions"), np.random.default_rng(0)
    lines = ["image\tcaption"]
    for number in range(30):
        name, colour = list(COLOURS.items())[number % 3]
        noisy = np.clip(np.array(colour) + generator.normal(0, 20, (9, 12, 3)), 0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(folder / f"{number}.png")
        lines.append(f"{number}.png\tsomething {name} number {number % 2}")
    (folder / "captions.tsv").write_text("\n".join(lines) + "\n")
    return folder / "captions.tsv"


SETTINGS = {
    "data.task": "align", "model.d_model": 16, "model.n_layers": 1, "data.batch_size": 6, "train.steps": 8,
    "train.lr": 1e-3, "train.validate_every": 3, "train.device": "cpu", "train.ema": 0.5,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["clip", "siglip"])
@pytest.mark.slow
def test_a_resumed_run_ends_as_an_uninterrupted_one(kind, captions, tmp_path):
    """By the loop, the checkpoints and the log of every other task."""
    settings = {"model.base": kind, **SETTINGS}
    done = ch.train(str(captions), out=tmp_path / "whole", settings=settings)
    whole = ch.load(tmp_path / "whole")
    ch.train(str(captions), out=tmp_path / "run", settings=settings, stop=StopAt(4))
    with pytest.raises(ConfigError, match=r"train\.lr cannot change"):
        ch.train(resume=tmp_path / "run", settings={"train.lr": 2e-3})
    with pytest.raises(ch.CheckpointError, match="holds another run"):
        ch.train(str(captions), out=tmp_path / "run", settings=settings)
    again = ch.train(resume=tmp_path / "run")
    assert again.metrics == done.metrics and again.step == 8
    for part in ("", "last"):
        ours, theirs = (load_file(tmp_path / name / part / "model.safetensors") for name in ("whole", "run"))
        assert all(torch.equal(value, theirs[name]) for name, value in ours.items()), part
    logs = []
    for name in ("whole", "run"):
        validated = [line for line in read_log(tmp_path / name) if line["event"] == "validated"]
        logs.append([(line["step"], line["metrics"]) for line in validated])
    assert logs[0] == logs[1] and [step for step, _ in logs[0]] == [3, 6, 8]
    assert whole.towers is not None
    # transformers opens the result, and finds the same loss in the same pairs.
    rows = read_captions(captions)[:5]
    ids, mask = text_inputs(whole, [row.caption for row in rows])
    pixels = image_pixels(whole, (row.image for row in rows))
    assert (mask is None) == (kind == "siglip")
    theirs = transformers.AutoModel.from_pretrained(tmp_path / "run").eval()
    with torch.no_grad():
        said = theirs(input_ids=ids, pixel_values=pixels, attention_mask=mask, return_loss=True)
        assert torch.allclose(whole.towers(ids, pixels, mask).logits, said.logits_per_image, atol=1e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "run")
    padding = "max_length" if kind == "siglip" else True
    texts = tokenizer([row.caption for row in rows], padding=padding, return_tensors="pt")
    assert texts["input_ids"].tolist() == ids.tolist()
    assert ("attention_mask" in texts) == (mask is not None)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
@pytest.mark.slow
def test_real_pictures_find_their_captions(kind, shared, tmp_path, clearhead):
    archive = shared / "data" / "cifar10_sample" / "images.zip"
    if not archive.exists():
        pytest.skip(f"no file {archive}")
    words = {"airplane": "a plane in the sky", "frog": "a frog on the ground"}
    with zipfile.ZipFile(archive) as pictures:
        for part in ("train", "test"):
            wanted = [[part, word] for word in words]
            names = [name for name in pictures.namelist() if name.split("/")[:2] in wanted]
            pictures.extractall(tmp_path, names)
            rows = [{"image": name, "caption": words[name.split("/")[1]]} for name in sorted(names)]
            (tmp_path / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = "--d-model 32 --n-layers 1 --steps 40 --validate-every 40 --batch-size 8 --lr 2e-3"
    files = f"--out {tmp_path}/run --validation {tmp_path}/test.jsonl"
    ran = clearhead("align", kind, tmp_path / "train.jsonl", files, sizes, "--json --device cpu")
    said = ran.json["validations"][-1]
    assert said["chance"] == 0.5
    assert said["image_to_text"] >= 0.65, said  # 100 pictures: chance gives that once in 500 runs
    found = ch.load(tmp_path / "run").classify(tmp_path / rows[0]["image"], labels=[*words.values()])
    assert set(found.scores) == set(words.values())


def test_bad_rows_are_one_line(captions: pathlib.Path, tmp_path: pathlib.Path, clearhead) -> None:
    picture = captions.parent / "0.png"
    for text, complaint in {
        "image\tcaption\nnowhere.png\ta\n": "line 2: the image .*nowhere.png is not there",
        f"image\tcaption\n{picture}\t \n": "line 2: the caption is empty",
        f"image\tlabel\n{picture}\ta\n": "has no field 'caption'",
        f"image\tcaption\n{picture}\n": "has 1 column",
        "image\tcaption\n": "holds no row",
    }.items():
        (tmp_path / "rows.tsv").write_text(text)
        with pytest.raises(ch.InputError, match=complaint) as raised:
            read_captions(tmp_path / "rows.tsv")
        assert "\n" not in str(raised.value)
    for given, complaint in {
        ("clip", str(tmp_path / "none.tsv")): "is no file",
        ("nothing", str(captions)): "is no directory",
        ("clip", str(captions), "--batch-size", "1"): "set batch_size to 2 or more",
        ("clip", str(captions), "--batch-size", "40"): "needs more",
        ("clip", str(captions), "--batch-size", "4", "--resume"): "no run that can be resumed",
        (str(tmp_path), str(captions), "--d-model", "8"): "sizes of a new model",
    }.items():
        clearhead.refuses(complaint, "align", *given, f"--out {tmp_path}/run --device cpu")
    assert not (tmp_path / "run").exists()
