"""Sparse features of a model: dictionaries trained on its activations, shown, and used to change it.

dictionary   `Dictionary`: encode, decode, edits of a model by feature; on disk in SAELens's layout
"""

from clearhead.inside.features.dictionary import Dictionary, find_taps, load

__all__ = ["Dictionary", "find_taps", "load"]
