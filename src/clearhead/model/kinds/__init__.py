"""Attention of other kinds than one softmax over all keys. Read in this order.

choices, blocks, stream_cache, linear, gated_delta, layers.
"""
