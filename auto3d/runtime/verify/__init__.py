"""Checks of programs before a training: against the eager module, the whole program and the rules for programs."""
