"""The engine of auto3d: capture, partition, schedule, search and run.

A library: it knows nothing of YAML, SLURM or the command line.
"""
