"""Fingerprints differ where samples differ, and do not depend on how samples are put into batches."""

from dataclasses import replace

import numpy as np
import pytest

from auto3d.data import Batches
from auto3d.data.fingerprint import BITS, fingerprints, total
from tests.models import TEXT


@pytest.mark.parametrize("dtype", ["bool", "int8", "float32", "int64"])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5, 2)])
def test_each_changed_bit_changes_the_fingerprint_of_its_sample_alone(dtype, shape):
    random = np.random.default_rng(0)
    value = random.integers(0, 2, (6, *shape)).astype(dtype)
    before = fingerprints({"x": value, "y": np.arange(6)})
    assert before.shape == (6,)
    assert (before < 1 << BITS).all()
    flat = value.reshape(6, -1).view(np.uint8)
    for _ in range(50):
        row, place = random.integers(6), random.integers(flat.shape[1])
        changed = flat.copy()
        changed[row, place] ^= 1 << random.integers(1 if dtype == "bool" else 8)
        after = fingerprints({"x": changed.view(dtype).reshape(value.shape), "y": np.arange(6)})
        assert (after != before).tolist() == [other == row for other in range(6)]


def test_names_and_the_order_of_values_count():
    x, y = np.arange(4.0), np.arange(4.0) + 1
    same = fingerprints({"x": x, "y": y})
    assert (fingerprints({"y": y, "x": x}) == same).all()
    assert (fingerprints({"x": y, "y": x}) != same).all()
    assert (fingerprints({"x": x, "z": y}) != same).all()
    assert (fingerprints({"x": np.array([[1, 2]])}) != fingerprints({"x": np.array([[2, 1]])})).all()


def test_the_places_of_samples_count_and_parts_add_up():
    found = fingerprints({"x": np.arange(12)})
    parts = total(found[:4], 100) + total(found[4:], 104)
    assert parts % (1 << BITS) == total(found, 100)
    assert len({total(found, 100), total(found[::-1], 100), total(found, 101)}) == 3


def test_a_sample_has_one_fingerprint_in_every_batch_and_for_every_input():
    def of(size: int, replicas: int, names: tuple[str, ...]) -> list[int]:
        parts = [
            Batches(TEXT, seed=3, global_batch=12, micro_batch_size=size, replica=each, replicas=replicas)
            for each in range(replicas)
        ]
        found = [part.read(2, index, names).fingerprints for index in range(12 // size) for part in parts]
        return np.concatenate(found).tolist()

    whole = of(12, 1, ("input_ids", "labels"))
    assert len(set(whole)) == 12
    assert of(4, 1, ("labels",)) == of(6, 3, ("input_ids",)) == whole
    assert not Batches(TEXT, seed=3, global_batch=12, micro_batch_size=4).read(0, 0, ()).inputs
    other = replace(TEXT, files=(np.__file__,))
    different = Batches(other, seed=3, global_batch=12, micro_batch_size=12).read(2, 0, ("labels",)).fingerprints
    assert not set(different.tolist()) & set(whole)
