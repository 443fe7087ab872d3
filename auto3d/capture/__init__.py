"""Capture an unmodified model as a Graph, without memory for any weight."""
