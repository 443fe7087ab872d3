"""Processes on this machine: the ranks of a run, their devices, their waits and their failures."""
