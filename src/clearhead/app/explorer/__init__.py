"""The explorer: a page in which one sees a model think.

Views from `inside`, served live or recorded into one file.
"""
