"""Other systems as engines of a Plan: each trains what auto3d trains, for the same table. One file per peer."""
