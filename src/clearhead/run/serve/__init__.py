"""Serving: an engine that answers many requests at once, each as if it were alone, and its HTTP routes.

Read in this order. `blocks` hands out blocks of a pool, `paged` is the cache over that pool, `ragged` is the
copy of a model that runs rows of unequal length as one. `jobs` holds one request, `engine` the steps.
"""
