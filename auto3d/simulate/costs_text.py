"""Costs as the option ``times`` of a schedule whose order depends on how long operations take."""

from statistics import fmean

from auto3d.schedule.operation_times import EQUAL
from auto3d.simulate.costs import Costs

_UNITS = 1000  # F + I + W, in the unit of the text


def write_times(costs: Costs) -> str:
    """The text that ``auto3d.schedule.operation_times.parse_times`` reads: F, I, W and a message at ``costs``.

    Stages are averaged, and so are messages: one micro-batch's activations between two stages. Times are rounded to
    thousandths of F + I + W, so plans whose times hardly differ have the same order. F, I and W are at least 1. If
    operations take no time, the text is ``EQUAL``.
    """
    means = [fmean(costs.forward), fmean(costs.backward_input), fmean(costs.backward_weight)]
    unit = sum(means) / _UNITS
    if not unit:
        return EQUAL
    message = fmean(cost.latency + cost.forward for cost in costs.messages) if costs.messages else 0.0
    return "-".join(map(str, [*(max(1, round(time / unit)) for time in means), round(message / unit)]))
