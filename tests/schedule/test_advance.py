"""Devices advance while they can, and stop where none can go on."""

from auto3d.schedule.advance import advance_devices


def walked(totals: list[int], after: dict[tuple[int, int], tuple[int, int]]) -> list[str]:
    """The order of a walk in which ``after`` maps an operation to another that must run before it."""
    order: list[str] = []
    ended = [0] * len(totals)

    def run_next(device: int, index: int) -> bool:
        assert index == ended[device]
        other, needed = after.get((device, index), (device, -1))
        if ended[other] <= needed:
            return False
        order.append(f"{device}.{index}")
        return True

    advance_devices(ended, totals, run_next)
    assert [sum(one.startswith(f"{device}.") for one in order) for device in range(len(totals))] == ended
    return order


def test_a_device_goes_on_until_it_has_to_wait():
    after = {(0, 2): (1, 0), (1, 1): (0, 3)}
    assert walked([4, 2], after) == ["0.0", "0.1", "1.0", "0.2", "0.3", "1.1"]


def test_devices_that_wait_for_each_other_stop():
    assert walked([2, 2], {(0, 1): (1, 1), (1, 1): (0, 1)}) == ["0.0", "1.0"]
