"""Speed in one place: replacements for parts of a model that compute the same, faster.

`prepare` builds the copy that generates, and `training` puts replacements into a model that is to be
trained. The replacements are in `attention`, `feedforward`, `linears` and `step`; `parts` builds one part
from another.
"""
