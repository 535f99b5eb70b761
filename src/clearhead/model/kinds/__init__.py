"""Attention of other kinds than one softmax over all keys. Read in this order.

choices, blocks, strided, flex, gathered, stream_cache, linear, gated_delta, layers.
"""
