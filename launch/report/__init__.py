"""What `auto3d report` writes: one HTML page with all its data, styles and scripts."""
