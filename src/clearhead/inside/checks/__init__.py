"""The equality suite: what must come out equal, on the user's own model and machine.

Each row computes one thing in two ways that must agree, and says what was compared, the largest difference
and what is allowed. Inputs are random but seeded, and short. A model in half precision has the tolerance of
its dtype.

    independent  against the float64 reference, which shares no code with the model, and against transformers;
                 quantized models, two towers
    long         the same on long inputs, past every length at which a model changes what it does
    rows         kernels, batches, padding, caches, copies on disk; pruning, the lens, devices, the compiler;
                 accumulated gradients, resumed runs
    decoding     blocks of a diffusion language model: their cache, blocks of 1 = autoregressive, the loss;
                 drafts of MTP layers change no token; their loss is a loop's
    effects      contributions, scores and graphs add up; circuits of all edges and of none, one edge by hand,
                 integrated gradients; a dictionary computes its formula, and with its error changes nothing
"""

import time
from collections.abc import Callable

import torch

from clearhead.core.transformer import Transformer
from clearhead.errors import refuse
from clearhead.inside.checks.decoding import diffusion_rows, mtp_rows
from clearhead.inside.checks.effects import edge_rows, effects_rows, feature_rows
from clearhead.inside.checks.independent import formula_rows, named, quantized_rows, reference_rows
from clearhead.inside.checks.rows import (
    LARGE,
    TOLERANCE,
    Check,
    Comparison,
    Inputs,
    forward_rows,
    inside_rows,
    training_rows,
)
from clearhead.run.api import Model
from clearhead.run.quant.layers import quantized_parts
from clearhead.variants.contexts import evaluating, unwrapped

__all__ = ["Check", "check", "checks_for"]


def check(
    m: Model | Transformer,
    reference: bool = False,
    *,
    compile: bool = False,
    large: bool = False,
    on_row: Callable[[Check | Comparison], None] = lambda row: None,
) -> list[Check]:
    """Run the suite on a model where it is: on a GPU, a row that compares with the CPU comes along.

    Args:
        m: what `load` gave, a bare model, or a wrapper of one; it is left as it was.
        reference: compare with transformers too, for a model loaded from its directory.
        compile: compare with torch.compile's model too; that takes a quarter of a minute and more.
        large: do not leave out, for a model of more than 500 million parameters, the rows that copy it.
        on_row: told each row before it is run, and what came of it.
    """
    model: Transformer = unwrapped(m)
    dtype = next(model.parameters()).dtype
    refuse(
        dtype not in TOLERANCE,
        f"the suite has no tolerance for {dtype}: check the model in {', '.join(map(str, TOLERANCE))}",
    )
    count = sum(weight.numel() for weight in model.parameters())
    done = []
    towers, images = (m.towers, m.image_encoder) if isinstance(m, Model) else (None, None)
    image = towers.image if towers is not None else images.tower if images is not None else None
    with torch.no_grad(), evaluating(model), evaluating(towers or images or model):
        rows = [*checks_for(model, compile)]
        if image is not None:
            rows = [*named("text", rows), *named("image", checks_for(image, compile))]
        rows += reference_rows(m) if reference else []
        for row in (row for row in rows if row.fits):
            on_row(row)
            if row.copies and count > LARGE and not large:
                note = f"too large: {count:,} parameters, and it makes a copy of them"
                done.append(Check(row.name, row.compared, None, row.tolerance, 0.0, note, skipped=True))
            else:
                done.append(_run(row))
            on_row(done[-1])
    return done


def checks_for(model: Transformer, compile: bool = False) -> list[Comparison]:
    """Return every row of the suite; `fits` says which make sense for this model."""
    inputs = Inputs(model)
    if quantized_parts(model):
        return quantized_rows(inputs)
    return [
        *formula_rows(inputs),
        *forward_rows(inputs),
        *diffusion_rows(inputs),
        *mtp_rows(inputs),
        *training_rows(inputs),
        *inside_rows(inputs, compile),
        *effects_rows(inputs),
        *edge_rows(inputs),
        *feature_rows(inputs),
    ]


def _run(row: Comparison) -> Check:
    """Run one row; one that raises has failed, and the others go on."""
    start, difference, note = time.perf_counter(), None, ""
    try:
        difference = row.run()
    except Exception as error:  # whatever a broken model does, the user should read it
        note = f"{type(error).__name__}: {error}".splitlines()[0]
    return Check(row.name, row.compared, difference, row.tolerance, time.perf_counter() - start, note)
