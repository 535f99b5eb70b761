"""One block, one stack, one Transformer, by a `config`; `clearhead.minimal` is shorter. Read in this order.

taps, attention, masks, feedforward, norms, stack, embedding, heads, transformer; positions, cache, dtypes.
"""
