"""The model: one block, one stack, one Transformer. `config` is what is built. Read in this order.

config, taps, attention, masks, feedforward, norms, stack, embedding, heads, transformer; positions, cache,
dtypes. `clearhead.minimal` is shorter: one file, equal to this on real weights.
"""
