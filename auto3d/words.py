"""Words of messages: numbers that agree with their nouns."""


def counted(number: int, noun: str, plural: str = "") -> str:
    """``number`` and its noun: 1 plan, 2 plans. Give the ``plural`` where it is not the noun with an s."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"
