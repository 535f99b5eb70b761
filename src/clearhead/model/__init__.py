"""The model: one block, one stack, one Transformer. Read in this order.

taps, dtypes, norms, positions, masks, attend, cache, window_cache, attention, feedforward, experts, block, fronts, heads,
initialise, checks, transformer.
"""
