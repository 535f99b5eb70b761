"""The model: one block, one stack, one Transformer. `config` is what is built. Read in this order.

config (`fields`) and taps, at a glance; attention, masks, feedforward, norms, stack, embedding, heads,
transformer; then positions, cache, dtypes.
"""
