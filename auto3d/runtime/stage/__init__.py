"""A stage of the model on a rank: its programs, and what its passes compute and keep."""
