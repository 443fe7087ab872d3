"""Fingerprints of samples as datasets give them: other content gives another number, an unknown kind none."""

from collections import UserDict
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from PIL import Image

from auto3d.data.fingerprint import BITS
from auto3d.trainer.item_fingerprint import item_fingerprints


@dataclass
class Example:
    tokens: list
    label: int


def image(last):
    pixels = np.zeros((2, 3, 3), dtype=np.uint8)
    pixels[-1, -1, -1] = last
    return Image.fromarray(pixels)


PAIRS = {  # two samples that differ in one place
    "numbers": ({"a": 1}, {"a": 2}),
    "types": ({"a": 1}, {"a": 1.0}),
    "names": ({"a": 1}, {"b": 1}),
    "texts": ({"a": "one"}, {"a": "two"}),
    "lists": ({"a": [1, 2, 3]}, {"a": [1, 2, 4]}),
    "where lists end": ({"a": [[1], [2, 3]]}, {"a": [[1, 2], [3]]}),
    "nothing": ({"a": None}, {"a": 0}),
    "tensors": ({"a": torch.tensor([1, 2])}, {"a": torch.tensor([1, 3])}),
    "shapes": ({"a": torch.zeros(2, 3)}, {"a": torch.zeros(3, 2)}),
    "kinds of tensors": ({"a": torch.zeros(2, dtype=torch.int32)}, {"a": torch.zeros(2)}),
    "low precision": ({"a": torch.ones(2, dtype=torch.bfloat16)}, {"a": torch.zeros(2, dtype=torch.bfloat16)}),
    "arrays": ({"a": np.array([1.0, 2.0])}, {"a": np.array([1.0, 2.5])}),
    "numbers of numpy": ({"a": np.int64(1)}, {"a": np.int64(2)}),
    "tuples": ((torch.tensor([1]), 0), (torch.tensor([1]), 1)),
    "objects": (Example([1, 2], 0), Example([1, 2], 1)),
    "other mappings": (UserDict(a=1), UserDict(a=2)),
    "images": ({"image": image(0)}, {"image": image(1)}),
}


@pytest.mark.parametrize("name", PAIRS)
def test_what_differs_has_another_number(name):
    one, other = PAIRS[name]
    found = item_fingerprints([one, other, one])
    assert found is not None
    assert found.dtype == np.uint64
    assert (found < 1 << BITS).all()
    assert found[0] == found[2] != found[1]


def test_what_is_not_known_has_none():
    assert item_fingerprints([{"a": object()}]) is None
    assert item_fingerprints([{"a": np.array([object()])}]) is None
    endless = {}
    endless["a"] = endless
    assert item_fingerprints([endless]) is None
