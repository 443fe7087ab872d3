"""The tables and figures of papers, made again: every item is a file of recipes/papers/."""
