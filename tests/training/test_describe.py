"""Models that read images tuned on answers about them: the loss is transformers', and they learn."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import clearhead as ch
from clearhead.errors import ConfigError, InputError
from clearhead.learn import losses
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.tasks.entries.describe import PicturedBatches, read_pictured
from tests import llava
from tests.llava import directory, processor, sized_directory, tiled_directory
from tests.parity.test_qwen_vl import reference_processor
from tests.training.test_run import StopAt

COLOURS = {"red": (220, 20, 20), "green": (20, 220, 20), "blue": (20, 20, 220)}
MADE = {"llava": directory, "idefics3": tiled_directory, "qwen2.5-vl": sized_directory}


@pytest.fixture(scope="module")
def squares(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Noisy pictures of three colours and of several sizes, each with a question and its answer."""
    folder, noise = tmp_path_factory.mktemp("squares"), np.random.default_rng(0)
    rows = []
    for number in range(40):
        name, colour = list(COLOURS.items())[number % 3]
        noisy = np.clip(np.array(colour) + noise.normal(0, 20, (16, 16, 3)), 0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(folder / f"{number}.png")
        rows.append({"image": f"{number}.png", "prompt": "Colour?", "answer": name})
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return folder


@pytest.fixture(scope="module", params=list(MADE))
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return MADE[request.param](tmp_path_factory.mktemp(request.param))


def test_the_loss_is_that_of_the_reference(base: pathlib.Path, squares: pathlib.Path) -> None:
    """Of a padded batch with one image and two, a caption, and messages; prompts count for nothing."""
    m, files = ch.load(base), [squares / f"{n}.png" for n in range(3)]
    asked = [{"type": "text", "text": "First"}, {"type": "image"}, {"type": "text", "text": "or second?"}]
    rows = [
        {"image": "0.png", "prompt": "Colour?", "answer": "a red one"},
        {"images": ["1.png", "2.png"], "messages": [
            {"role": "user", "content": [{"type": "image"}, *asked]},
            {"role": "assistant", "content": "the second is blue"}]},
        {"image": "2.png", "caption": "blue"},
    ]  # fmt: skip
    (squares / "three.jsonl").write_text("\n".join(map(json.dumps, rows)))
    plan = DataPlan(batch_size=3)
    batches = PicturedBatches(m, read_pictured(squares / "three.jsonl"), plan, 0, training=False)
    batch = batches.at(0)
    total, count = losses.batch_loss(m.model, batch)

    sized = m.image_encoder.config.any_size
    if sized:
        fast = transformers.AutoTokenizer.from_pretrained(base)
        reader = reference_processor(processor(min_pixels=256, max_pixels=24 * 64), fast)
    else:
        reader = transformers.AutoProcessor.from_pretrained(base)
    model = transformers.AutoModelForImageTextToText.from_pretrained(base, attn_implementation="eager")
    before = ["USER: <image>\nColour? ASSISTANT:", "USER: <image>\n<image>\nFirst or second? ASSISTANT:",
              "USER: <image>\nASSISTANT:"]  # fmt: skip
    sums, wanted = [], [" a red one", " the second is blue", " blue"]
    for text, answer, images in zip(before, wanted, (files[:1], files[1:], files[2:])):
        text = text.replace("<image>\n", llava.PICTURED) if sized else text
        pictures = [Image.open(file) for file in images]
        inputs = reader(images=pictures, text=text + answer, return_tensors="pt")
        prompt = reader(images=pictures, text=text, return_tensors="pt")["input_ids"].shape[1]
        labels = inputs["input_ids"].clone()
        labels[:, :prompt] = -100
        with torch.no_grad():
            sums.append(float(model(**inputs, labels=labels).loss) * len(answer))
    assert count == sum(map(len, wanted))
    assert float(total.detach()) == pytest.approx(sum(sums), rel=1e-5)
    total.backward()
    assert all(parameter.grad is None for parameter in m.image_encoder.parameters())
    apart = losses.batch_loss(m.model, batch.rows(slice(1, 3)))[0]
    assert float(apart.detach()) == pytest.approx(sum(sums[1:]), rel=1e-5)


SETTINGS = {
    "data.task": "describe", "data.batch_size": 12, "train.lr": 1e-2, "train.device": "cpu",
    "train.warmup": 0, "train.weight_decay": 0.0,
}  # fmt: skip


def colours(m: ch.Model, squares: pathlib.Path) -> list[bool]:
    """Whether the model names the colour of each held-out picture."""
    answers = []
    for number in (9, 19, 29, 39):
        asked = [{"type": "image", "image": squares / f"{number}.png"}, {"type": "text", "text": "Colour?"}]
        name = list(COLOURS)[number % 3]
        reply = m.chat([{"role": "user", "content": asked}], len(name) + 1)
        answers.append(reply.text.strip() == name)
    return answers


@pytest.mark.slow
def test_it_learns_to_name_colours_and_resumes(
    base: pathlib.Path, squares: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Whole weights and low-rank updates; the tower stays, and transformers opens what is left."""
    settings = {**SETTINGS, "model.base": str(base), "train.steps": 60, "train.validate_every": 30}
    done = ch.train(str(squares / "rows.jsonl"), out=tmp_path / "whole", settings=settings)
    m, before = ch.load(tmp_path / "whole"), ch.load(base)
    assert all(colours(m, squares)) and not all(colours(before, squares))
    assert done.metrics["loss"] < 0.1
    for name, own in before.image_encoder.state_dict().items():
        assert torch.equal(own, m.image_encoder.state_dict()[name]), name
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "whole")
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        assert torch.allclose(m.model(ids).logits, theirs(input_ids=ids).logits, atol=2e-5)

    more = {**settings, "train.lora": 8, "train.lora_targets": "all-linear", "train.steps": 6}
    more |= {"train.validate_every": 3}
    whole = ch.train(str(squares / "rows.jsonl"), out=tmp_path / "lora", settings=more)
    ch.train(str(squares / "rows.jsonl"), out=tmp_path / "run", settings=more, stop=StopAt(3))
    again = ch.train(resume=tmp_path / "run")
    assert again.metrics == whole.metrics
    tuned, resumed = (ch.load(tmp_path / name) for name in ("lora", "run"))
    for name, own in tuned.model.state_dict().items():
        assert torch.equal(own, resumed.model.state_dict()[name]), name
        learned = not torch.equal(own, before.model.state_dict()[name])
        assert learned == (name.endswith("weight") and (".attention." in name or ".feedforward." in name)), (
            name
        )


def test_what_cannot_be_learned_from_is_refused(squares: pathlib.Path, tmp_path: pathlib.Path) -> None:
    rows = {
        "no image": ({"image": "no.png", "answer": "red"}, "no.png is not there"),
        "no answer": ({"image": "0.png", "prompt": "What?"}, "has no answer"),
        "parts": ({"image": "0.png", "messages": [
            {"role": "user", "content": [{"type": "image"}, {"type": "image"}]},
            {"role": "assistant", "content": "red"}]}, "2 parts of type image, and names 1"),
        "url": ({"image": "0.png", "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            {"role": "assistant", "content": "red"}]}, "supported are text and"),
    }  # fmt: skip
    for name, (row, words) in rows.items():
        path = squares / f"{name}.jsonl"
        path.write_text(json.dumps(row))
        with pytest.raises(InputError, match=words):
            read_pictured(path)
    data, base = str(squares / "rows.jsonl"), str(directory(tmp_path / "base"))
    for more, words in (
        ({"data.packing": "isolated"}, "data.packing"),
        ({"data.token_dropout": 0.1}, "data.token_dropout"),
        ({"data.bpe_dropout": 0.1}, "data.bpe_dropout"),
        ({"tokens.kind": "bpe"}, "tokens. is not for describe"),
        ({"model.dropout": 0.1}, "model.dropout"),
        ({"data.max_length": 5}, "within 5 tokens"),
        ({"data.task": "chat"}, "add /text or /image"),
    ):
        with pytest.raises((ConfigError, InputError, ch.CheckpointError), match=words):
            ch.train(data, out=tmp_path / "out", settings={**SETTINGS, "model.base": base, **more})
    with pytest.raises(InputError, match=r"set model\.base"):
        ch.train(data, out=tmp_path / "out", settings=SETTINGS)
