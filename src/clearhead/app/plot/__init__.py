"""Pictures of what `inside` returns, as matplotlib figures: data in, figure out."""
