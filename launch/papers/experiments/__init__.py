"""What a paper measures that is not a grid of plans: functions that make the rows of a part.

A function takes ``tell``, which shows a line of progress, and the ``arguments`` of the part.
"""

from collections.abc import Callable, Iterable

from launch.papers.experiments.rannc_coarsening import rannc_coarsening
from launch.papers.row import Row

Experiment = Callable[..., Iterable[Row]]

EXPERIMENTS: dict[str, Experiment] = {"rannc-coarsening": rannc_coarsening}
