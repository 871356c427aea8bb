"""Attention of our own inside models of transformers, without touching their code: see `interface`."""
