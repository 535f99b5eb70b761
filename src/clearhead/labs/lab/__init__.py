"""Experiments and toy tasks: small, seeded, over in seconds or minutes on a CPU."""
