"""Pictures of what `inside` returns: each function takes its data and gives a matplotlib figure; `save` writes it."""
