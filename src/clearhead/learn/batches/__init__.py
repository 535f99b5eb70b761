"""Batches: a corpus as the tensors that one training step reads."""
