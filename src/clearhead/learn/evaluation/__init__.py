"""Evaluation: a model judged on data, each figure with its interval."""
