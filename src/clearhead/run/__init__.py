"""Running a model: generation, serving, quantization, and the kernels that make them fast.

`quant` and `kernels` build faster modules from a model's own. `generate` turns prompts into new tokens,
`serve` answers many requests at once over HTTP. `bundle` is a model with its tokenizer and
settings, `api` opens one.
"""
