"""Cases that repeat a behaviour of the suite at more sizes, models or schedules: `make soak` runs them."""

from typing import Any

import pytest


def soak(*cases: Any) -> list[Any]:
    """``cases`` of a parametrised test, which the suite leaves out; a tuple has the values of several arguments."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.soak) for case in cases]
