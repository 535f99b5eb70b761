"""Islands that the rest does not build on: the experiments, retrieval, and speed next to other libraries."""
