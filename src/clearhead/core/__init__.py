"""The model: one block, one stack, one Transformer. `config` is what is built. Read in this order.

taps, dtypes, steps, norms, positions, masks, cache, attention, feedforward,
embedding, stack, heads, checks, transformer.
"""
