"""What RaNNC's items count by themselves."""

from launch.papers.claims import check
from launch.papers.experiments.rannc_coarsening import steps_of_algorithm_1
from launch.papers.item import Claim, Part
from launch.papers.row import Row


def test_steps_are_those_of_the_loops_of_algorithm_1():
    """Lines 8 to 12, without the shortcut of d_min."""
    blocks, devices = 7, 4
    for stages in range(1, devices + 1):
        steps = 0
        for s in range(1, stages + 1):
            for b in range(s, blocks - stages + s + 1):
                for d in range(devices - (stages - s), s - 1, -1):
                    steps += len(range(s - 1, b)) * len(range(s - 1, d))
        assert steps_of_algorithm_1(blocks, stages, devices) == steps


def test_the_largest_model_is_that_of_all_settings():
    part = Part(how="experiment", title="", quantity="size")
    claim = Claim(says="", system="a", against="b", form="largest", quantity="size", paper=5.0)
    rows = [
        Row(setting=("1",), system="a", values={"size": 2.0}),
        Row(setting=("1",), system="b", values={"size": 2.0}),
        Row(setting=("2",), system="a", values={"size": 10.0}),
        Row(setting=("2",), system="b", problem="needs 9 GiB; it has 1", kind="memory"),
    ]
    found = check(part, claim, rows, lambda *_: rows[0])
    assert (found.ours, found.holds) == ("5", True)
