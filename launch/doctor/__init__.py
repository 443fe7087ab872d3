"""`auto3d doctor`: what a machine, its devices and a cluster must have, each checked by doing it."""
