"""The model: one block, one stack, one Transformer. `config` is what is built. Read in this order.

taps, attention, masks, feedforward, norms, stack, embedding, heads, transformer; positions, cache, dtypes.
"""
