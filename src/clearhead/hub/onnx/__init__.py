"""A model as a graph that other programs run: `torch.export`'s and ONNX's, for any batch and length."""
