"""Pictures of what `inside` returns, as matplotlib figures: data in, figure out."""

FORMATS = (".png", ".svg", ".pdf")  # endings of picture files; to look at them needs no matplotlib
