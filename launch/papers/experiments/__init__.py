"""What a paper measures that is not a grid of plans: functions that make the rows of a part.

A function takes ``tell``, which shows a line of progress, and the ``arguments`` of the part.
"""

from collections.abc import Callable, Iterable

from launch.papers.experiments import amp
from launch.papers.experiments.merak_availability import availability
from launch.papers.experiments.merak_layer import (
    fitted_accelerator,
    measured_layers,
    predicted_layers,
    published_layers,
)
from launch.papers.experiments.merak_loader import split_loader
from launch.papers.experiments.merak_sharding import sharding_times, stage_subgraphs
from launch.papers.experiments.rannc_coarsening import rannc_coarsening
from launch.papers.experiments.schedule_formulas import schedule_formulas
from launch.papers.row import Row

Experiment = Callable[..., Iterable[Row]]

MADE = {  # experiment -> how its rows are made
    "amp": "simulated",
    "amp-published": "measured",  # by the authors, who released the times
    "availability": "measured",
    "fitted-accelerator": "simulated",
    "measured-layers": "measured",
    "predicted-layers": "simulated",
    "published-layers": "simulated",
    "rannc-coarsening": "simulated",
    "schedule-formulas": "simulated",
    "sharding-times": "measured",
    "split-loader": "measured",
    "stage-subgraphs": "simulated",
}

EXPERIMENTS: dict[str, Experiment] = {
    "amp": amp.strategies,
    "amp-published": amp.published_strategies,
    "availability": availability,
    "fitted-accelerator": fitted_accelerator,
    "measured-layers": measured_layers,
    "predicted-layers": predicted_layers,
    "published-layers": published_layers,
    "rannc-coarsening": rannc_coarsening,
    "schedule-formulas": schedule_formulas,
    "sharding-times": sharding_times,
    "split-loader": split_loader,
    "stage-subgraphs": stage_subgraphs,
}
