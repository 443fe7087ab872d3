"""Trials executed: one trial, trials on this machine, and trials as jobs of SLURM."""
