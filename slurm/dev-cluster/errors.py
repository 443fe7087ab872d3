"""Errors that end the program with a message of one line."""


class DevClusterError(Exception):
    """Something on this machine does not work; the message says what it is and where to look."""


class DescriptionError(DevClusterError):
    """The user asked for an impossible cluster."""
