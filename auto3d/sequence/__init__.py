"""A captured model in slices of its sequence: one program for each slice, which sees the slices before it."""
