"""Programs derived from a captured model: what a rank runs of it with other ranks, or in turns."""
