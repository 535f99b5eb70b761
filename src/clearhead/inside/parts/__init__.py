"""What a model's parts are for: switched off, ranked, taken away."""
