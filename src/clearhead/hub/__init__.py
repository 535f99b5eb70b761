"""Hugging Face checkpoints, both ways: reversible rule tables, data alone for each architecture.

Read `rules` (tensors), `fields` (config.json), `architecture` (the two together), then any family's file.
"""
