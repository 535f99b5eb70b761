"""What a finished run leaves beside its model: the adapter, where it trained low-rank updates."""

from pathlib import Path

from clearhead.api import Model
from clearhead.data.files import RECIPE
from clearhead.hub.peft import RankUpdate, write_adapter
from clearhead.hub.weights import open_tensors
from clearhead.recipe import BASE, read_recipe
from clearhead.training.loop import TrainingRun
from clearhead.training.state import TENSORS

ADAPTER = "adapter"


def leave_adapter(run: TrainingRun, chosen: Model, checkpoint: Path) -> None:
    """Write the low-rank updates of a checkpoint as PEFT's adapter of the run's base model.

    A head that was trained along is no part of an adapter: a run that has one leaves the merged model alone.
    """
    if not run.plan.lora or chosen.config.head != "lm":
        return
    stored = open_tensors(checkpoint, TENSORS)
    prefix = "ema/" if run.ema is not None else "weights/"
    parts = {name.removeprefix(prefix): one for name, one in stored.items() if name.startswith(prefix)}
    layers = [name.removesuffix(".a") for name in parts if name.endswith(".a")]
    updates = {
        layer: RankUpdate(
            parts[f"{layer}.a"].read().clone(), parts[f"{layer}.b"].read().clone(), run.plan.lora_alpha
        )
        for layer in layers
    }
    base = read_recipe(run.folder / RECIPE).model.get(BASE)
    architecture = chosen.described().architecture
    write_adapter(run.folder / ADAPTER, updates, chosen.config, architecture, base)
