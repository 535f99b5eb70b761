"""Beyond one process: a mesh of them, what each part of a model may be split by, one set of numbers."""
