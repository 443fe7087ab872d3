"""The row of a part: the result of one system at one setting."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from auto3d.errors import ProblemKind
from launch.papers.item import Setting


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result of one system at one setting: ``values`` by quantity, or the ``problem`` that left none."""

    setting: Setting
    system: str
    values: Mapping[str, float] = field(default_factory=dict)
    plan: str = ""
    problem: str = ""
    kind: ProblemKind = "other"  # kind of the problem
    made_on: str = ""  # device and software of a run; empty for predictions
