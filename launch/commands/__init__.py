"""The commands: what each takes, and what it prints. To import a file of them adds its commands to ``cli``."""

from launch.commands import jobs, planning, reference, trials
from launch.commands.group import cli

__all__ = ["cli", "jobs", "planning", "reference", "trials"]
