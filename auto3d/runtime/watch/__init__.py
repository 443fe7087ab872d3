"""Watching a training: when operations ran, which rank is slow, traces, metrics and memory."""
