"""The simulator: a timeline from a schedule and its costs, and the figures and drawings of a timeline.

Nothing here knows a schedule by name.
"""
