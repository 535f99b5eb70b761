"""Training: the loop and what it is made of."""
