"""Retrieval: passages of files, found by their meaning, by their words, or by both."""
