"""The ranks watch each other's reads while a Trainer trains, as the ranks of `auto3d train` do."""

from auto3d.plan import Plan
from auto3d.runtime.training import Training
from auto3d.trainer.rank_zero import tell
from auto3d.trainer.setup import setup


class ReadsWatch:
    """Prints a line on rank 0 when stages begin to wait for data. All ranks make the same calls."""

    def __init__(self, training: Training, plan: Plan, device: str) -> None:
        self._training = training
        self._watch = training.watch(plan, setup().world.device(device))
        self._has_told = False

    def after_step(self) -> None:
        self._watch.after(self._training.done)
        slow = self._watch.latest.slow_data
        if slow is not None and not self._has_told:
            tell(f"warning: {slow}")
        self._has_told = slow is not None
