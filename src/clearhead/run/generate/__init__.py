"""Generation: from a model and a prompt to new tokens."""
