"""What a run leaves in runs/: private files, the manifest of starts and ends, trials and their measurements."""
