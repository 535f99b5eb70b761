"""The model: one block, one stack, one Transformer. Read in this order.

taps, dtypes, steps, norms, positions, masks, attend, cache, attention,
feedforward, fronts, stack, heads, checks, transformer.
"""
