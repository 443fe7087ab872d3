"""Optimizers: which a training uses, what they hold, and how they update."""
