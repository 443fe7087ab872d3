"""`auto3d train`: the line that a training ends with, and what `--check` finds."""

from collections.abc import Mapping, Sequence
from typing import Any

from auto3d.words import counted
from launch.console.output import print_json


def print_training(record: dict[str, Any], *, as_json: bool) -> None:
    """Print the result of a training, on one line."""
    if as_json:
        print_json(record)
        return
    if not record["iteration_s"]:
        print("the training was complete before its job started")
        return
    under = f"{counted(len(record['iteration_s']), 'iteration')} under {record['plan_name']}"
    if record["emulated"]:
        print(f"{under}: {record['samples_per_s']:.1f} samples/s (emulated, not measured: nothing was computed)")
        return
    print(
        f"{under}: loss {record['loss'][0]:.3f} to {record['loss'][-1]:.3f}, {record['samples_per_s']:.1f} samples/s, "
        f"{_memory(record)}"
    )


def print_spec(broken: Mapping[str, Sequence[str]], *, as_json: bool) -> None:
    """Print each rule, and under it the places that break it."""
    if as_json:
        print_json(broken)
        return
    for says, places in broken.items():
        print(f"broken at {counted(len(places), 'place')}: {says}" if places else f"holds: {says}")
        for place in places:
            print(f"  {place}")


def _memory(record: dict[str, Any]) -> str:
    """Largest peak memory that a rank has measured, and the predicted peak."""
    peak, used, predicted = (
        f"{max(record[name], default=0) / 2**20:.0f} MiB" for name in ("peak_bytes", "used_bytes", "predicted_bytes")
    )
    if not record["used_bytes"]:  # CPUs do not report it
        return f"peak memory {peak} per rank (measured; {predicted} predicted)"
    return f"peak memory {peak} per rank, {used} used on its device (measured; {predicted} predicted)"
