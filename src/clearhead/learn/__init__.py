"""Learning: from files to a trained model, and how good it is.

`data` reads files, `batches` makes batches of their rows, `tasks` says what each task does, `recipe` holds
the settings. `training` is the loop, `parallel` spreads it over devices, `evaluation` measures the result.
"""
