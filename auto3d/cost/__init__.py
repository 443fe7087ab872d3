"""Predict what a Plan costs: seconds per iteration and bytes per device, from a Graph or from measured layers."""
