"""Attention of other kinds than one softmax over all keys. Read in this order.

blocks, linear, gated_delta, layers.
"""
