"""All architectures.

A checkpoint's `model_type` names one; for a config of ours, the one that expresses it best is found.
"""

from pathlib import Path
from typing import Any

from clearhead.core.config import ModelConfig
from clearhead.errors import CheckpointError
from clearhead.hub import bert, gpt, hybrids, latent, llama, mixtures, seq2seq, vision, vision_language
from clearhead.hub.architecture import Architecture
from clearhead.hub.files import read_json_if_any
from clearhead.hub.vision import SECTIONS, Tower, TowersTable
from clearhead.hub.vision_language import ImagesTable

# Tables of each family. `nearest_to` tries them in this order and that of their files: of several that are
# exact, the best known comes first.
FAMILIES = (gpt, llama, mixtures, latent, hybrids, bert, vision, seq2seq, vision_language)
TABLES = [table for family in FAMILIES for table in vars(family).values()]
ARCHITECTURES: dict[str, Architecture] = {
    table.model_type: table for table in TABLES if isinstance(table, Architecture)
}
# Two architectures each, which are found by `architecture_of` and never by `nearest_to`.
TOWERS: dict[str, TowersTable] = {
    table.model_type: table for table in TABLES if isinstance(table, TowersTable)
}
# A decoder and an image tower each, which are opened together.
IMAGES: dict[str, ImagesTable] = {
    table.model_type: table for table in vars(vision_language).values() if isinstance(table, ImagesTable)
}
ONE_TOWER = {tower.model_type: tower for table in TOWERS.values() for tower in (table.text, table.image)}
ONE_TOWER |= {tower.model_type: tower for table in IMAGES.values() for tower in table.towers.values()}


def architecture_of(theirs: dict[str, Any]) -> Architecture:
    """Return the architecture that a config.json names."""
    kind = theirs.get("model_type")
    known = {**ARCHITECTURES, **ONE_TOWER}
    if isinstance(kind, str) and kind in (*TOWERS, *IMAGES):
        parts = "two towers" if kind in TOWERS else "a decoder and an image tower"
        raise CheckpointError(
            f"{kind} has {parts}, and this needs one: add /text or /image to the name of the directory"
        )
    if not isinstance(kind, str) or kind not in known:
        raise CheckpointError(
            f"config.json has model_type {kind!r:.60}, none of the {len(ARCHITECTURES)} architectures "
            "that clearhead opens: docs/models.md lists them"
        )
    return known[kind]


def tower_path(path: Path) -> tuple[Path, TowersTable | ImagesTable, Tower] | None:
    """Return directory, table and part of a name such as clip/text, where clip has two towers; else None."""
    if path.name not in SECTIONS or path.exists():
        return None
    kind = read_json_if_any(path.parent / "config.json").get("model_type")
    table = (TOWERS | IMAGES).get(kind) if isinstance(kind, str) else None
    return None if table is None else (path.parent, table, "text" if path.name == "text" else "image")


def nearest_to(config: ModelConfig) -> tuple[Architecture | None, list[str]]:
    """Return the architecture that expresses this config with the fewest differences, and the differences."""
    best: tuple[Architecture | None, list[str]] = (None, [f"family {config.family!r}"])
    for architecture in ARCHITECTURES.values():
        differences = architecture.differences(config)
        if differences == []:
            return architecture, []
        if differences is not None and (best[0] is None or len(differences) < len(best[1])):
            best = architecture, differences
    return best
