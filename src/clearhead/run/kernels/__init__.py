"""Speed in one place: replacements for parts of a model that compute the same, faster.

`prepare` builds the copy that generates; one token may go through the few kernels of `kernels`. `training`
puts replacements into a model that is to be trained. `parts` builds one part from another. `lora` is a layer
that learns by a low-rank update.
"""
