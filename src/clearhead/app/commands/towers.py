"""The command that trains two towers from captioned pictures: align."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional

from clearhead.app.commands.common import Device, Json, load_model, option, print_notes, show_result
from clearhead.errors import refuse

KINDS = ("clip", "siglip")


def align(
    model: Annotated[
        Positional[str], option("a directory of CLIP or SigLIP; or clip, siglip: a new model", metavar="DIR")
    ],
    data: Annotated[
        Positional[Path],
        option("rows of image and caption: TSV or CSV with a header, JSON lines", metavar="DATA"),
    ],
    out: Annotated[Path, option("the directory of the run")],
    validation: Annotated[Path | None, option("held-out rows; default: every tenth of DATA")] = None,
    steps: Annotated[int, option("batches to train on")] = 1000,
    batch_size: Annotated[int, option("pairs that are told from each other")] = 64,
    lr: Annotated[float, option("the peak learning rate")] = 5e-4,
    weight_decay: Annotated[float, option("of matrices")] = 0.1,
    seed: Annotated[int, option("of new weights, and of the order of pairs")] = 0,
    validate_every: Annotated[int, option("steps; a checkpoint is written too")] = 100,
    d_model: Annotated[int | None, option("new model: width of both towers; default: 128")] = None,
    n_layers: Annotated[
        int | None, option("new model: of the text tower, default 2; images have twice as many")
    ] = None,
    resume: Annotated[bool, option("go on with the run in --out, given all else as before")] = False,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Train two towers, so that a picture and its caption come to lie near each other.

    The loss is the model's own: CLIP's cross entropy or SigLIP's sigmoid loss.

    For example:
      clearhead align clip captions.tsv --out run/
      clearhead align my-clip/ captions.jsonl --out run/ --lr 1e-5
      clearhead align clip captions.tsv --out run/ --resume
    """
    refuse(
        model not in KINDS and not Path(model).is_dir(),
        f"{model} is no directory: name one of CLIP or SigLIP, or clip or siglip for a new model",
    )
    refuse(
        model not in KINDS and (d_model is not None or n_layers is not None),
        f"--d-model and --n-layers are sizes of a new model, and {model} has its own: leave them out",
    )
    from clearhead.learn.training.captions import CaptionPlan, read_captions, train_towers
    from clearhead.learn.training.new_towers import new_towers
    from clearhead.run.bundle import best_device

    plan = CaptionPlan(
        steps=steps, batch_size=batch_size, lr=lr, weight_decay=weight_decay, seed=seed,
        validate_every=validate_every,
    )  # fmt: skip
    if model in KINDS:
        rows = read_captions(data)
        captions = [row.caption for row in rows]
        made = new_towers(model, captions, rows[0].image, d_model or 128, n_layers or 2, seed=seed)
    else:
        made = load_model(Path(model), dtype="float32")
    made.to(best_device(device))

    def told(figures: dict[str, float]) -> None:
        found = f"{figures['image_to_text']:.1%} of images find their caption"
        chance = f"chance {figures['chance']:.1%}"
        print_notes([f"step {figures['step']:.0f}: loss {figures['loss']:.4f}, {found} ({chance})"])

    lines = train_towers(made, data, out, plan, validation, resume, told)
    note = f"wrote {out}: try clearhead classify {out} IMAGE --labels A B"
    show_result({"validations": lines, "folder": str(out)}, json, [note])
