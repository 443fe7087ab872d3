"""The tables and figures of papers, made again: each is a file of recipes/papers/."""
