"""Photos of unequal sizes: brought to one size in training as `classify`, `evaluate` and transformers do."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import clearhead as ch
from clearhead.errors import ClearheadError
from clearhead.hub.preprocessor import to_pixels
from clearhead.learn.data.corpus import open_corpus
from clearhead.learn.data.pictures import common_side, crop
from clearhead.learn.data.plan import DataPlan

TINY = {
    "train.steps": 1, "train.threads": 1, "train.samples": 0, "data.batch_size": 4,
    "model.d_model": 16, "model.n_layers": 1, "model.n_heads": 2,
}  # fmt: skip


def photo(seed: int, height: int, width: int, mode: str = "RGB") -> Image.Image:
    random = np.random.default_rng(seed)
    return Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8)).convert(mode)


def write_photos(folder: Path) -> None:
    """Write two classes of pictures of all sizes and modes, one of them on its side by EXIF."""
    modes = ("RGB", "L", "RGBA", "P", "CMYK", "LA")
    for number in range(18):
        path = folder / f"{'ab'[number % 2]}" / f"{number}.{'tif' if number % 6 == 4 else 'png'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        photo(number, 20 + 3 * number, 60 - 2 * number, modes[number % 6]).save(path)
    exif = Image.Exif()
    exif[0x0112] = 6
    photo(99, 30, 50).save(folder / "a" / "turned.jpg", exif=exif)
    (folder / "Thumbs.db").write_bytes(b"\0\1\2")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, ch.Trained, list[str]]:
    folder = tmp_path_factory.mktemp("photos")
    write_photos(folder / "set")
    notes: list[str] = []
    found = ch.train(
        folder / "set", out=folder / "run", settings=TINY,
        on_event=lambda event: notes.append(getattr(event, "line", "")),
    )  # fmt: skip
    return folder, found, notes


def test_pixels_in_training_are_those_of_classify_evaluate_and_transformers(trained):
    folder, _, notes = trained
    assert any("shorter side resized to 32, and the middle cropped" in note for note in notes)
    assert any("1 file" in note and "Thumbs.db" in note for note in notes)
    m = ch.load(folder / "run")
    corpus = open_corpus(DataPlan(paths=(str(folder / "set"),)))
    seen = {picture.tobytes() for side in (corpus.train, corpus.validation) for picture in side.pixels}
    assert len(seen) == 19
    theirs = transformers.AutoImageProcessor.from_pretrained(folder / "run")
    for path in sorted((folder / "set").glob("*/*.*")):
        ours = to_pixels(path, m.config, m.images)
        mean, std = (torch.tensor(m.images[name])[:, None, None] for name in ("image_mean", "image_std"))
        shown = ((ours * std + mean) * 255).round().byte().permute(1, 2, 0).contiguous().numpy()
        assert shown.tobytes() in seen, path  # what was trained on, to the bit
        with Image.open(path) as image:
            upright = image.transpose(Image.Transpose.ROTATE_270) if path.name == "turned.jpg" else image
            wanted = theirs(upright.convert("RGB"), return_tensors="pt")["pixel_values"][0]
        assert torch.allclose(ours, wanted, atol=1e-5), path
    said = m.classify(sorted((folder / "set").glob("*/*.*")))
    judged = ch.evaluate(m, folder / "set")
    assert [line.label for line in said] == list(judged.outputs)


@pytest.mark.parametrize(("height", "width"), [(32, 50), (51, 33), (40, 40), (97, 8), (8, 8)])
def test_a_crop_is_that_of_the_preprocessor(height, width):
    """The data's own crop equals the one of `preprocessor_config.json`, to the bit."""
    pixels = np.asarray(photo(1, height, width))
    settings = {
        "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 16}, "resample": 2,
        "do_center_crop": True, "crop_size": {"height": 16, "width": 16}, "do_rescale": False,
        "do_normalize": False,
    }  # fmt: skip
    config = ch.preset("vit-tiny").replace(image_size=(16, 16), patch_size=4, max_positions=17)
    wanted = to_pixels(pixels, config, settings)
    assert np.array_equal(crop(pixels, 16), wanted.numpy().transpose(1, 2, 0))


@pytest.mark.parametrize(
    ("shorter", "side"), [((500, 600, 700), 224), ((100, 30, 120), 96), ((50, 61, 70), 60), ((3, 2, 1), 4)]
)
def test_the_common_side_is_the_median_in_whole_patches(shorter, side):
    assert common_side([(short, 2 * short) for short in shorter]) == side


def test_a_base_decides_the_size_and_a_wrong_one_is_one_line(trained, tmp_path):
    folder, _, _ = trained
    for number in range(12):  # all of one size, which is not that of the base
        path = tmp_path / "set" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        photo(number, 45, 75).save(path)
    base = {**TINY, "model.base": str(folder / "run")}
    again = ch.train(tmp_path / "set", out=tmp_path / "run", settings={
        name: value for name, value in base.items() if not name.startswith("model.") or name == "model.base"
    })  # fmt: skip
    assert again.model.config.image_size == (32, 32)
    with pytest.raises(ClearheadError, match=r"45 x 75 are no whole number of patches .* data.image_size=32"):
        ch.train(tmp_path / "set", out=tmp_path / "none", settings={**TINY, "model.patch_size": 16})
    with pytest.raises(ClearheadError, match=r"data.image_size is for training"):
        ch.evaluate(again.model, tmp_path / "set", DataPlan(image_size=8))
