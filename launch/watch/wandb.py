"""The metrics of a training in Weights & Biases."""

import os
from pathlib import Path

from auto3d.runtime.watch.metrics import Metrics
from launch.watch.metrics_file import numbers_of


class WeightsAndBiases:
    """A W&B run of project ``recipe`` in the group ``training``: each time that a training is continued has its own.

    W&B gets the metrics and these names, and neither the recipe, which may hold secrets, nor the environment. Its files
    lie in ``folder``/wandb. Where to send them, and as whom, follows from W&B's own environment variables and log-in.
    """

    def __init__(self, folder: Path, recipe: str, training: str, first: int) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", recipe),
            group=training,
            name=f"{training} from iteration {first}",
            dir=folder,
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, disable_code=True, x_disable_meta=True
            ),
        )

    def write(self, metrics: Metrics) -> None:
        self._run.log(numbers_of(metrics), step=metrics.iteration)

    def close(self) -> None:
        self._run.finish()
