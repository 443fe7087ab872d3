"""`auto3d doctor`: checks of a machine, its devices and a cluster. Each check does what a trial would do."""
