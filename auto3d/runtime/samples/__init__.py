"""The samples of a rank's micro-batches: read, loaded, of unusual sizes, and their targets counted."""
