"""Weights in 8 or 4 bits: how they are chosen (`grid`, `methods`), kept (`layers`), put in place (`apply`).

Reading order: `grid`, `layers`, `methods`, `apply`.
"""
