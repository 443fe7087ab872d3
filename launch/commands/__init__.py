"""The commands: one file per verb, which reads the arguments, calls what does the work, and prints the result."""
