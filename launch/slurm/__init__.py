"""SLURM: its commands, the states of jobs, the text of an sbatch script, and the signals that a job receives."""
