"""The model: one block, one stack, one Transformer. `config` is what is built. Read in this order.

attention, feedforward, norms, stack, embedding, heads, transformer,
masks, positions, cache, taps, dtypes.
"""
