"""Variants: parts that build on the core, which finds them by name (`core.config.registry`).

kinds (of attention): blocks and block_attention, global_attention, linear, latent; recurrent: gated_delta and
state_space; halves, of blocks that lack a sublayer. Positions, fronts, routing (experts, depth), heads,
caches. Models of two towers. Presets; steps and costs, of any model.
"""
