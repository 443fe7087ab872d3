"""What is drawn as samples are read leaves the generators of the process as they were, and follows from the seed."""

import random

import numpy as np
import pytest
import torch

from auto3d.data.drawing import drawing


def drawn() -> list[float]:
    return [random.random(), random.gauss(), np.random.random(), torch.rand(()).item()]


def seeded(seed: int) -> list[float]:
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    return drawn()


def draw_and_fail() -> None:
    with drawing():
        drawn()
        raise ZeroDivisionError


def test_generators_are_as_before_at_the_end_and_after_an_error():
    seeded(3)
    drawn()  # Python's generator makes normal numbers two at a time, and has kept the second
    expected = drawn()
    seeded(3)
    with drawing() as begin:
        assert drawn() != expected
        begin(1, 2)
        drawn()
        random.seed(5)
    with pytest.raises(ZeroDivisionError):
        draw_and_fail()
    drawn()
    assert drawn() == expected


def test_draws_are_those_of_the_seeds_that_the_functions_of_each_library_take():
    with drawing() as begin:
        seed = begin(4, 1)
        found = drawn()
    with drawing():
        assert found == seeded(seed)


def test_a_block_inside_another_leaves_the_draws_of_the_outer_one():
    def of(*inner: int) -> list[list[float]]:
        with drawing() as begin:
            begin(7)
            found = [drawn()]
            if inner:
                with drawing() as begin_inner:
                    begin_inner(*inner)
                    drawn()
                    with drawing() as begin_innermost:
                        begin_innermost(*inner)
                        drawn()
            return [*found, drawn(), drawn()]

    assert of(1) == of(2, 3) == of()
