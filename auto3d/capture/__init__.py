"""Unmodified model -> Graph, without holding a single weight."""
