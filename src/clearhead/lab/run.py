"""Find an experiment by its name."""

import importlib

from clearhead.lab.experiment import Experiment
from clearhead.lab.table import EXPERIMENTS


def find(name: str) -> Experiment:
    """Return the experiment of a name in the list."""
    module, attribute = EXPERIMENTS[name].target.split(":")
    found: Experiment = getattr(importlib.import_module(f"clearhead.lab.{module}"), attribute)
    return found
