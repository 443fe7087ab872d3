"""The one base of all errors that a user can mend."""


class InputError(ValueError):
    """What a user gave cannot be used. The message is for them: what, where, and what would be accepted."""
