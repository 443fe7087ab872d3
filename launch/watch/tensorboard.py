"""The metrics of a training as TensorBoard's events."""

from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from auto3d.runtime.watch.metrics import Metrics
from launch.watch.metrics_file import numbers_of


class TensorBoard:
    """Writes to ``folder`` from iteration ``first`` on; TensorBoard forgets later iterations of an earlier run."""

    def __init__(self, folder: Path, first: int) -> None:
        self._writer = SummaryWriter(str(folder), purge_step=first)

    def write(self, metrics: Metrics) -> None:
        for name, value in numbers_of(metrics).items():
            self._writer.add_scalar(name, value, metrics.iteration)

    def close(self) -> None:
        self._writer.close()
