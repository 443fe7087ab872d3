"""Epochs are permutations, which look random, and a last batch that is not full is dropped or padded."""

from collections import Counter

import pytest

from auto3d.data.interface import DataError
from auto3d.data.order import Order


@pytest.mark.parametrize("samples", [1, 2, 3, 5, 16, 17, 100, 997])
@pytest.mark.parametrize("last_batch", ["drop", "pad"])
def test_every_epoch_is_a_permutation(samples, last_batch):
    size = max(samples // 3, 1)
    order = Order(samples=samples, global_batch=size, seed=7, last_batch=last_batch)
    taken = order.batches * size
    epochs = [[order.sample(epoch * taken + place) for place in range(taken)] for epoch in range(3)]
    for epoch in epochs:
        real = [sample for sample in epoch if sample is not None]
        assert len(set(real)) == len(real) == (samples if last_batch == "pad" else taken)
        assert set(real) <= set(range(samples))
        assert epoch[: len(real)] == real, "samples that do not count are the last ones"
    assert samples < 17 or epochs[0] != epochs[1] != epochs[2]
    assert samples < 17 or epochs[0] != [order.sample(place) for place in range(taken)][::-1]


def test_orders_differ_by_seed_and_are_sorted_where_samples_are_not_shuffled():
    first, second = (Order(samples=50, global_batch=5, seed=seed) for seed in (1, 2))
    assert [first.sample(place) for place in range(50)] != [second.sample(place) for place in range(50)]
    plain = Order(samples=12, global_batch=5, seed=1, shuffle=False)
    assert [plain.sample(number) for number in range(20)] == [*range(10), *range(10)]


@pytest.mark.parametrize("samples", [4, 6, 13])
def test_every_pair_of_places_holds_every_pair_of_samples_equally_often(samples):
    epochs = 60 * samples**2
    order = Order(samples=samples, global_batch=samples, seed=3)
    pairs = Counter(
        (order.sample(epoch * samples), order.sample(epoch * samples + 1 + epoch % (samples - 1)))
        for epoch in range(epochs)
    )
    cells = samples * (samples - 1)
    expected = epochs / cells
    statistic = sum((pairs[pair] - expected) ** 2 / expected for pair in pairs)
    assert len(pairs) == cells
    assert statistic < cells + 6 * (2 * cells) ** 0.5, "chi-square of uniform pairs"


def test_a_permutation_of_a_huge_corpus_takes_no_memory():
    order = Order(samples=10**12, global_batch=8, seed=3)
    found = {order.sample(number) for number in range(2000)}
    assert len(found) == 2000
    assert max(found) > 9 * 10**11


def test_the_last_batch_is_described():
    def described(**changes: object) -> str:
        return Order(**{"samples": 1010, "global_batch": 100, "seed": 1, "shuffle": False, **changes}).describe()

    assert described() == (
        "1,010 samples, 10 iterations per epoch; the last batch is not full and is dropped: "
        "10 samples per epoch, numbers 1,000 to 1,009"
    )
    assert "10 samples per epoch, others in each epoch" in described(shuffle=True)
    assert described(last_batch="pad") == (
        "1,010 samples, 11 iterations per epoch; the last has 10 of 100 samples and is padded with 90"
    )
    with pytest.raises(DataError, match="less than one global batch of 2000; use a global batch of at most 1010"):
        described(global_batch=2000)
