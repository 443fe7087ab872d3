"""What ends the program with one line."""


class DevClusterError(Exception):
    """Something on this machine does not work; the message says what, and where to look."""


class DescriptionError(DevClusterError):
    """The user asked for a cluster that cannot be."""
