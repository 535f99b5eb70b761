"""What a model is for: generate, score, classify, tag, fill, answer, translate, embed.

Each task is a function of a `Bundle` and a list of inputs. It returns a list of results in the same order.
Inputs of like length share a batch, padded on the right, and come out as they would alone. The methods of
`Model` take one input as well as a list.
"""
