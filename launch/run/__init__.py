"""Processes on this machine: the ranks of a run, their devices, waits and failures."""
