"""Checkpoints: their format, and how ranks write and read them."""
