"""Looking inside: functions that return data about a model. Drawing and printing are done elsewhere.

`dir(clearhead.inside)` lists the modules and the functions in them that no module has the name of; each is
imported when it is first used. The most used are at the top as well: `clearhead.lens`, `clearhead.patch`.
"""

import importlib as _importlib
import pkgutil as _pkgutil

_MODULES = [module.name for module in _pkgutil.iter_modules(__path__)]
_FUNCTIONS = {
    "ablate": "ablation",
    "ablate_each": "pruning",
    "ablating": "ablation",
    "analogy": "geometry",
    "check": "checks",
    "contributions": "lens",
    "effect": "ablation",
    "firing": "logit_attribution",
    "fold_norms": "folding",
    "followed": "lens",
    "head_roles": "heads",
    "importance": "pruning",
    "looks": "attribution",
    "mean_activations": "ablation",
    "neighbours": "geometry",
    "occlusion": "attribution",
    "paths": "attribution",
    "prune": "pruning",
    "prune_curve": "pruning",
    "run_with_cache": "inputs",
    "similarity": "geometry",
    "steering": "patch",
    "steering_vector": "patch",
    "syntax": "alignments",
}


def __getattr__(name: str) -> object:
    """Import a module, or a function of one, when it is first used."""
    if name in _FUNCTIONS:
        return getattr(_importlib.import_module(f"{__name__}.{_FUNCTIONS[name]}"), name)
    if name in _MODULES:
        return _importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*_MODULES, *_FUNCTIONS])
