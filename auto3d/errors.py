"""The base class of all errors that a user can fix."""


class InputError(ValueError):
    """The user's input cannot be used. The message tells the user what is wrong, where, and what would be accepted."""
