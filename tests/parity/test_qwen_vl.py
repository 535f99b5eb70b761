"""Qwen2.5-VL beside transformers: logits, gradients, tokens, both ways; images of any size in prompts."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

import clearhead as ch
from clearhead.errors import CheckpointError, InputError
from clearhead.hub.checkpoint import rules_of
from clearhead.hub.files import read_json
from clearhead.hub.rules import matches
from clearhead.hub.towers import JoinedImages
from clearhead.inside.attribution import occlusion
from clearhead.inside.inputs import prepare
from clearhead.inside.interventions import Site, patched_scores
from clearhead.inside.lens import contributions
from clearhead.learn.tasks.images import ids_of, pixels_of_prompt, vectors_of
from clearhead.run.generate import decode
from clearhead.variants.images import ImageConfig, placed
from tests.llava import PICTURED, QWEN, TOKEN, build, image, processor, sized_directory
from tests.parity.harness import GRADIENTS, LOGITS, close, reopened

SIZES = ((3, 5), (1, 2), (4, 1))  # rows and columns of squares


def patches(config: ImageConfig, pixels: Tensor) -> Tensor:
    """Return the patches [N, C·frames·P²] of an image as the reference takes them, one by one."""
    size, side, tower = config.tower.patch_size, config.shuffle, config.tower
    frames, found = tower.d_input // (tower.n_channels * size**2), []
    for top in range(0, pixels.shape[1], size * side):
        for left in range(0, pixels.shape[2], size * side):
            for y in range(top, top + size * side, size):
                for x in range(left, left + size * side, size):
                    square = pixels[:, None, y : y + size, x : x + size]
                    found.append(square.expand(-1, frames, -1, -1).flatten())
    return torch.stack(found)


def fed(config: ImageConfig, ids: Tensor, *images: Tensor) -> dict[str, Tensor]:
    """Return what the reference reads of a prompt and its images."""
    grids = [[1, *(side // config.tower.patch_size for side in each.shape[1:])] for each in images]
    return {
        "input_ids": ids,
        "pixel_values": torch.cat([patches(config, each) for each in images]),
        "image_grid_thw": torch.tensor(grids),
        "mm_token_type_ids": (ids == TOKEN).int(),
    }


def logits(m: ch.Model, row: list[int], images: list[Tensor]) -> Tensor:
    """Return our logits of one prompt, with gradients to the image tower."""
    assert m.image_encoder is not None
    ids, vectors = torch.tensor([row]), torch.cat([m.image_encoder(each[None])[0] for each in images])
    own = vectors_of(m, row, ch.ImagePrompt(row, images))
    assert own is not None and own.axes is not None
    x = placed(m.model.main.embedding.front, ids, TOKEN, vectors[None])
    return m.model(ids, vectors=x, axes=own.axes[None]).logits


@pytest.mark.slow
@pytest.mark.parametrize("label", QWEN)
def test_images_of_any_size(label: str, tmp_path: pathlib.Path) -> None:
    model = build(label, tmp_path / "reference")
    ours = ch.load(tmp_path / "reference")
    encoder = ours.image_encoder
    assert encoder is not None and ours.description is not None
    config, generator = encoder.config, torch.Generator().manual_seed(1)
    side, channels = config.multiple, config.tower.n_channels
    pixels = [torch.randn(channels, side * h, side * w, generator=generator) for h, w in SIZES]
    words = torch.randint(3, 290, (2, 9), generator=generator).tolist()
    first, second, third = ([TOKEN] * (h * w) for h, w in SIZES)
    rows = [[*words[0][:4], *first, *words[0][4:]], [*second, *words[1][:2], *third, *words[1][2:]]]
    given = [pixels[:1], pixels[1:]]

    def theirs_of(model: Any, number: int) -> Tensor:
        model.model.rope_deltas = None  # of the call before
        return model(**fed(config, torch.tensor([rows[number]]), *given[number])).logits

    compared: set[str] = set()
    for number, row in enumerate(rows):
        theirs, mine = theirs_of(model, number), logits(ours, row, given[number])
        close("logits", mine, theirs, LOGITS)
        other = logits(ours, row, [each.flip(0, 1, 2) for each in given[number]])
        assert float((other - mine).detach().abs().max()) > 1e-3
        for parameter in (*model.parameters(), *ours.model.parameters(), *encoder.parameters()):
            parameter.grad = None
        for each in (theirs, mine):
            F.cross_entropy(each[0, :-1], torch.tensor(row[1:])).backward()
        wanted = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        for place, part, rules in (
            ("text", ours.model, rules_of(ours.description.architecture, ours.model)),
            ("image", encoder.tower, rules_of(encoder.tower_description.architecture, encoder.tower)),
            ("joint", encoder, encoder.table.rules),
        ):
            named = dict(part.named_parameters())
            for rule in matches(rules, named):
                name = encoder.table.name_in_file(place, rule.theirs.removeprefix("visual."))
                if name in wanted:
                    owner = config.tower if place != "text" else ours.config
                    grads = rule.operation.save([named[each].grad for each in rule.ours], owner)[0]
                    close(f"gradient of {name}", grads, wanted[name], GRADIENTS)
                    compared.add(name)
        assert compared == set(wanted)

    # Greedy tokens: as transformers and as without a cache; in a batch, with drafts, beams, chunks as alone.
    prompts = [*(ch.ImagePrompt(row, images) for row, images in zip(rows, given)), [5, 6, 7]]
    alone = [ours.generate(prompt, 12).ids for prompt in prompts]
    for number, (row, images) in enumerate(zip(rows, given)):
        model.model.rope_deltas = None
        inputs = fed(config, torch.tensor([row]), *images)
        reply = model.generate(**inputs, max_new_tokens=12, do_sample=False)
        assert alone[number] == reply[0, len(row) :].tolist()
        whole = row + alone[number]
        with torch.no_grad():
            assert logits(ours, whole, images)[0, len(row) - 1 : -1].argmax(-1).tolist() == alone[number]
    assert [each.ids for each in ours.generate(prompts, 12)] == alone
    assert ours.generate(prompts[1], 12, lookup=3).ids == alone[1]
    assert ours.generate(prompts[1], 12, cache="int8").ids[:1] == alone[1][:1]
    beams = ours.generate(prompts[1], 6, num_beams=3).ids
    model.model.rope_deltas = None
    inputs = fed(config, torch.tensor([rows[1]]), *given[1])
    reply = model.generate(**inputs, max_new_tokens=6, num_beams=3, do_sample=False)
    assert beams == reply[0, len(rows[1]) :].tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "PREFILL_CHUNK", 3)
        assert ours.generate(prompts[1], 12).ids == alone[1]
        assert ours.generate(prompts[1], 6, num_beams=3).ids == beams

    with torch.no_grad():
        fresh = JoinedImages(config, table=encoder.table)  # its config.json is written from ours
        fresh.load_state_dict(encoder.state_dict())
        for name, saved in (("saved", ours), ("fresh", ch.Model(ours.model, image_encoder=fresh))):
            saved.save(tmp_path / name)
            back = reopened(type(model), tmp_path / name)
            close(f"transformers reads what was {name}", theirs_of(back, 1), theirs_of(model, 1), 1e-6)
            again = ch.load(tmp_path / name)
            assert again.image_encoder is not None and again.image_encoder.config == config
            assert torch.equal(logits(again, rows[1], given[1]), logits(ours, rows[1], given[1]))
        text = ch.load(tmp_path / "saved" / "text")  # each part opens alone, and is a model of its own
        text.save(tmp_path / "text")
        plain = torch.tensor([[5, 6, 7]])
        assert torch.equal(ch.load(tmp_path / "text").model(plain).logits, ours.model(plain).logits)
        tower = ch.load(tmp_path / "saved" / "image")
        tower.save(tmp_path / "image")
        assert ch.load(tmp_path / "image").config == config.tower


def test_files_of_the_release(tmp_path: pathlib.Path) -> None:
    """They have the decoder at the top of config.json, `mrope` as a kind of scaling, and older names."""
    model = build(next(iter(QWEN)), tmp_path)
    theirs = read_json(tmp_path / "config.json")
    text, image = theirs.pop("text_config"), theirs["vision_config"]
    parameters = text.pop("rope_parameters")
    image |= {"in_chans": image.pop("in_channels"), "model_type": "qwen2_5_vl"}
    scaling = {"type": "mrope", "mrope_section": parameters["mrope_section"]}
    flat = {**text, **theirs, "rope_scaling": scaling, "rope_theta": parameters["rope_theta"]}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    tensors = load_file(tmp_path / "model.safetensors")
    names = {name: name.replace("model.visual", "visual").replace("language_model.", "") for name in tensors}
    save_file({names[name]: x for name, x in tensors.items()}, tmp_path / "model.safetensors")
    m, row = ch.load(tmp_path), [4, TOKEN, TOKEN, 5]
    pixels = torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(0))
    assert m.image_encoder is not None
    expected = model(**fed(m.image_encoder.config, torch.tensor([row]), pixels)).logits
    close("logits", logits(m, row, [pixels]), expected, LOGITS)
    m.save(tmp_path / "saved")
    assert read_json(tmp_path / "saved" / "config.json") == flat
    back = reopened(type(model), tmp_path / "saved")
    again = back(**fed(m.image_encoder.config, torch.tensor([row]), pixels)).logits
    close("transformers reads what was saved", again, expected, 1e-6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return sized_directory(tmp_path_factory.mktemp("qwen"))


def reference_processor(*parts: Any) -> transformers.Qwen2_5_VLProcessor:
    """Return the reference's, without its class for videos."""

    class Processor(transformers.Qwen2_5_VLProcessor):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return type(argument)

    return Processor(*parts)


def test_pixels_and_tokens_are_those_of_the_reference(folder: pathlib.Path) -> None:
    """Pixels bit for bit and the ids of a prompt, of several images of other sizes; then the conversation."""
    m = ch.load(folder)
    assert m.image_encoder is not None and m.text_tokenizer is not None
    config, fast = m.image_encoder.config, transformers.AutoTokenizer.from_pretrained(folder)
    sizes = [(20, 31), (40, 8), (48, 48), (9, 90), (7, 5), (1, 90)]
    pictures = [image(n, *size) for n, size in enumerate(sizes)]
    for changes in (
        {"min_pixels": 256, "max_pixels": 24 * 64},
        {"min_pixels": 64, "max_pixels": 64 * 8, "resample": 2},
        {"size": {"shortest_edge": 4000, "longest_edge": 9999}, "do_normalize": False},
        {"image_mean": [0.1, 0.2, 0.3], "rescale_factor": 0.01},
    ):
        theirs = reference_processor(processor(**changes), fast)
        mine = dataclasses.replace(m, images=json.loads(theirs.image_processor.to_json_string()))
        for some in ([pictures[-1]], pictures):
            text = "\n".join(f"{n}: {PICTURED}What?" for n in range(len(some)))
            inputs = theirs(images=[Image.fromarray(each) for each in some], text=text, return_tensors="pt")
            pixels = pixels_of_prompt(mine, some)
            assert torch.equal(torch.cat([patches(config, x) for x in pixels]), inputs["pixel_values"])
            ids = ids_of(mine, ch.ImagePrompt(text, some))
            assert ids == inputs["input_ids"][0].tolist() == ids_of(mine, ch.ImagePrompt(ids, some))

    model = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    some = pictures[:2]
    content = [
        *({"type": "image", "image": each} for each in some),
        {"type": "text", "text": "What is this?"},
    ]
    text = fast.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    theirs = reference_processor(processor(min_pixels=256, max_pixels=24 * 64), fast)
    inputs = theirs(images=[Image.fromarray(each) for each in some], text=text, return_tensors="pt")
    reply = model.generate(**inputs, max_new_tokens=15, do_sample=False)
    talk = [{"role": "user", "content": content}]
    assert m.chat(talk, 15).ids == reply[0, inputs["input_ids"].shape[1] :].tolist()
    for _ in range(2):
        assert m.chat(talk, 15, reuse=True).ids == m.chat(talk, 15).ids


def test_what_does_not_fit_is_refused(folder: pathlib.Path) -> None:
    m, prompt = ch.load(folder), f"USER: {PICTURED}What? ASSISTANT:"
    with pytest.raises(InputError, match="200 times"):
        m.generate(ch.ImagePrompt(prompt, [np.zeros((1, 201, 3), np.uint8)]), 2)
    with pytest.raises(InputError, match="multiples of 8"):
        m.generate(ch.ImagePrompt(prompt, [torch.zeros(3, 8, 12)]), 2)
    other = dataclasses.replace(m, images={**m.images, "patch_size": 14})
    with pytest.raises(CheckpointError, match=r"squares of patch_size · merge_size = 28"):
        other.generate(ch.ImagePrompt(prompt, [image(1)]), 2)
    for kind in ("video", "video_url"):
        with pytest.raises(InputError, match="video"):
            m.chat([{"role": "user", "content": [{"type": kind, kind: "a.mp4"}]}], 2)
    for axes, words in ((torch.zeros(1, 3, 2), "axes"), (torch.zeros(1, 3, 3), "whole numbers")):
        with pytest.raises(InputError, match=words):
            m.model(torch.tensor([[1, 2, 3]]), axes=axes)


def test_looking_inside_goes_by_the_positions_of_the_image(folder: pathlib.Path) -> None:
    m, prompt = ch.load(folder), ch.ImagePrompt(f"USER: {PICTURED}What? ASSISTANT:", [image(1)])
    prepared, written = prepare(m, prompt), m.generate(prompt, 1, logprobs=True)
    assert prepared.tokens.labels[7:12] == ("0,0", "0,1", "0,2", "0,3", "1,0")
    with torch.no_grad():
        logits = prepared.run().required_logits[0, -1]
        counted = dataclasses.replace(prepared, axes=None).run().required_logits[0, -1]
    assert float((logits - counted).abs().max()) > 1e-4
    assert float(logits.log_softmax(-1).max()) == pytest.approx(written.logprobs[0], abs=1e-5)
    logit = pytest.approx(float((logits - logits.mean()).max()), abs=1e-5)
    assert ch.trace(m, prompt).difference < 1e-5
    assert contributions(m, prompt).logit == logit
    assert ch.graph(m, prompt, nodes=8).logit == logit
    assert occlusion(m, prompt).logit == logit
    site = Site("blocks.1.attention.out")  # a late layer: rows are resumed there
    assert float(patched_scores(prepared, {}, [(), (site,)])[0].max()) == pytest.approx(float(logits.max()))
