"""Serving: an engine that answers many requests at once, each as if it were alone, and its HTTP routes.

Read in this order. `kv_cache` is the pool of blocks and the cache over it, `model_runner` runs chunks of
several sequences in one step, `sequence` holds one request, `engine` schedules steps, `app` has the routes.
"""
