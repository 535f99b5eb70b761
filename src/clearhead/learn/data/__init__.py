"""Data: files to examples, examples to batches."""
