"""Hugging Face checkpoints, both ways: reversible rule tables, one short file of data per architecture.

Read `rules` (tensors), `fields` (config.json), `architecture` (the two together), then any architecture's
file.
"""
