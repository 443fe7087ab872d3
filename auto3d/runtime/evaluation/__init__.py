"""Evaluation and prediction between two iterations of a training."""
