"""Attention of other kinds than one softmax over all keys. Read in this order.

choices, packed, blocks, strided, flex, gathered, stream_cache, linear, gated_delta, everywhere, layers.
"""
