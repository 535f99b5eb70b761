"""Find an experiment by its name."""

import importlib

from clearhead.labs.lab.experiment import Experiment
from clearhead.labs.lab.table import EXPERIMENTS


def find(name: str) -> Experiment:
    """Return the experiment of a name in the list."""
    module, attribute = EXPERIMENTS[name].target.split(":")
    found: Experiment = getattr(importlib.import_module(f"clearhead.labs.lab.{module}"), attribute)
    return found
