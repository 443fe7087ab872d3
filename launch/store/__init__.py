"""The files of runs/: private folders, the manifest of starts and ends, trials and their measurements."""
