"""Beyond one device: how a model is divided, and what each division takes."""
