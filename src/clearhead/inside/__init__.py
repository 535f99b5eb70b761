"""Looking inside: functions that return data about a model. Drawing and printing are done elsewhere.

`dir(clearhead.inside)` lists the modules and the functions in them that no module has the name of; each is
imported when it is first used. The most used are at the top as well: `clearhead.lens`, `clearhead.patch`.

What an analysis is made of:

    inputs         what the model reads, as one row with a label for each token (`prepare`), and what its head
                   chooses among (`Choices`): the metric of most analyses is the score of a choice
    names          heads, layers and states by the names that people type
    interventions  a `Site`, the values put there, and passes with many of them at once
    results        the base of what is returned, written as JSON

The command of an analysis, its tables, picture and page view are one row of app/views.py.
"""

import importlib as _importlib
import pkgutil as _pkgutil

_MODULES = [module.name for module in _pkgutil.iter_modules(__path__)]
_FUNCTIONS = {
    "ablate": "ablation",
    "ablate_each": "pruning",
    "ablating": "interventions",
    "analogy": "geometry",
    "check": "checks",
    "contributions": "lens",
    "effect": "ablation",
    "explain": "story",
    "firing": "logit_attribution",
    "fit_jacobian": "translators",
    "fit_tuned": "translators",
    "fold_norms": "folding",
    "followed": "lens",
    "head_roles": "heads",
    "importance": "pruning",
    "looks": "attribution",
    "mean_activations": "ablation",
    "neighbours": "geometry",
    "occlusion": "attribution",
    "path_patch": "circuit",
    "paths": "attribution",
    "prune": "pruning",
    "prune_curve": "pruning",
    "run_with_cache": "inputs",
    "similarity": "geometry",
    "steering": "interventions",
    "steering_vector": "interventions",
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
