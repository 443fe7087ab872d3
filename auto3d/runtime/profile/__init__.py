"""Measures a machine for the cost model."""
