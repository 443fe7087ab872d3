"""The walk through a schedule that the checker, the lowering and the placement of operations have in common."""

from collections.abc import Callable, Sequence


def advance_devices(ended: list[int], totals: Sequence[int], run_next: Callable[[int, int], bool]) -> None:
    """Advance each device while it can, in turns, until all have ended or none can go on.

    ``run_next(device, index)`` runs the ``index``-th operation of ``device`` and returns True, or returns False if that
    operation cannot run yet. ``ended`` counts the operations that each device has run, out of ``totals``; it is updated
    in place, so that ``run_next`` sees how far the other devices are.
    """
    moved = True
    while moved:
        moved = False
        for device, total in enumerate(totals):
            while ended[device] < total and run_next(device, ended[device]):
                ended[device] += 1
                moved = True
