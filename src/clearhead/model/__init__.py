"""The model: one block, one stack, one Transformer. Read in this order.

taps, dtypes, steps, norms, rope, positions, masks, attend, cache, fixed_cache, window_cache, attention,
feedforward, experts, block, fronts, stack, heads, initialise, checks, transformer.
"""
