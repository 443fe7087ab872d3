"""Many small cases as one test: a test for each takes longer to collect, set up and report than the case itself."""

from collections.abc import Callable, Iterable
from functools import wraps
from inspect import signature
from typing import Any


def for_each(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Callable], Callable]:
    """The test runs with each of ``cases`` as its argument ``names``, in their order; a failure names its case.

    With several names a case is a tuple. Arguments of other names stay those of pytest.
    """
    given = (names,) if isinstance(names, str) else names

    def decorate(test: Callable) -> Callable:
        @wraps(test)
        def run(**others: Any) -> None:
            for case in cases:
                try:
                    test(**dict(zip(given, (case,) if isinstance(names, str) else case, strict=True)), **others)
                except Exception as error:
                    error.add_note(f"{names} = {case!r}")
                    raise

        whole = signature(test)
        left = [parameter for name, parameter in whole.parameters.items() if name not in given]
        run.__signature__ = whole.replace(parameters=left)  # type: ignore[attr-defined]
        return run

    return decorate
