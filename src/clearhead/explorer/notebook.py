"""The page inside a notebook: the same files with one recorded run, in a frame of its own."""

import html
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clearhead.api import Model
from clearhead.explorer.pages import single_file
from clearhead.model.transformer import Transformer


@dataclass(frozen=True)
class Shown:
    """What `show` gives: a notebook draws it, `save` writes it as a page."""

    recorded: dict[str, Any]
    height: int = 720

    def _repr_html_(self) -> str:
        page = html.escape(single_file(self.recorded, notebook=True), quote=True)
        size = f"width:100%;height:{self.height}px;border:1px solid #ccc"
        frame = f'sandbox="allow-scripts allow-downloads" srcdoc="{page}" style="{size}"'
        return f'<iframe {frame} title="clearhead explorer"></iframe>'

    def save(self, path: str | Path) -> Path:
        """Write it as one self-contained page."""
        from clearhead.explorer.record import export

        return export(self.recorded, path)


def show(
    m: Model | Transformer, given: Any, target: Any = None, pair: str | None = None, height: int = 720
) -> Shown:
    """Show the explorer on one input, inline in a notebook.

    Args:
        m: what `load` gave, or a bare model, which takes ids or pixels.
        given, target, pair: as for `inside.inputs.prepare`.
        height: of the frame, in pixels.
    """
    from clearhead.explorer.record import record  # not at the top: `import clearhead` stays quick

    m = m if isinstance(m, Model) else Model(m)
    name = m.folder.name if m.folder is not None else m.config.family
    return Shown(record(m, name, given, target, pair), height)
