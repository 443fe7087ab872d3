"""Standard output and standard error: results, tables, pictures and progress."""
