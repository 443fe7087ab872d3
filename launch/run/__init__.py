"""Processes on this machine: the ranks of a run, their devices, their failures, and processes that a launcher started."""
