"""clearhead: a Transformer you can see through.

The public names are listed in `__init__.pyi`. Each is imported when it is first used, so that the help of the
command line needs no torch.
"""

import ast as _ast
import importlib as _importlib
import warnings as _warnings
from pathlib import Path as _Path

from clearhead.errors import nearest as _nearest

__version__ = "0.1.0"

_STUB = _ast.parse(_Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
_IMPORTS = [node for node in _STUB if isinstance(node, _ast.ImportFrom)]
_MODULES = {alias.name: node.module for node in _IMPORTS for alias in node.names}
_OLD_NAMES = {node.targets[0].id: node.value.id for node in _STUB if isinstance(node, _ast.Assign)}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    """Import a public name, or a module of the package, when it is first used."""
    if name in _MODULES or name in _OLD_NAMES:
        current = _OLD_NAMES.get(name, name)
        if name != current:
            warning = f"ch.{name} is now ch.{current}; the next release drops the old name"
            _warnings.warn(warning, DeprecationWarning, stacklevel=2)
        globals()[name] = value = getattr(_importlib.import_module(_MODULES[current]), current)
        return value
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    path = f"{__name__}.{name}"
    try:
        return _importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path:  # the module exists, and something that it imports does not
            raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_nearest(name, __all__)}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
