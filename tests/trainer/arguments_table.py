"""Print the table of arguments in docs/trainer.md: python -m tests.trainer.arguments_table"""

from auto3d.trainer.supported import ARGUMENTS, Decision, Honoured, WithoutEffect


def meaning(decision: Decision) -> str:
    match decision:
        case Honoured(only=None):
            return "as in transformers"
        case Honoured():
            return f"only {listed(decision.only or ())}: {decision.otherwise}"
        case WithoutEffect():
            return f"changes nothing: {decision.why}"
        case _:
            return f"refused unless it is {listed(decision.accepted)}: {decision.why}"


def listed(values: tuple) -> str:
    return " or ".join(f"`{value!r}`" for value in values)


def table() -> str:
    """Arguments with the same meaning are in one row."""
    rows: dict[str, list[str]] = {}
    for name, decision in ARGUMENTS.items():
        rows.setdefault(meaning(decision), []).append(f"`{name}`")
    lines = [f"| {', '.join(names)} | {text} |" for text, names in rows.items()]
    return "\n".join(["| argument | here |", "| --- | --- |", *lines])


if __name__ == "__main__":
    print(table())
