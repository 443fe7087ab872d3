"""The application: recipes, command line, trials, result store, tables."""
