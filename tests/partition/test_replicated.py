"""Stages and their replicas against every possibility."""

from itertools import accumulate, combinations, product
from random import Random

from auto3d.partition.replicated import fastest_stages


def test_no_other_cuts_and_replicas_are_faster():
    for seed in range(300):
        random = Random(seed)
        parts, stages = random.randint(2, 7), random.randint(2, 4)
        devices = stages + random.randint(0, 4)
        counts = sorted({1, *random.sample([2, 3, 4], 2)} - ({1} if random.random() < 0.2 else set()))
        heavy = [random.choice([1, 1, 2, 7]) * random.random() for _ in range(parts)]
        before = {  # a replica has a share of the samples, and what does not shrink with them
            count: [0.0, *accumulate(weight / count + 0.1 * random.random() for weight in heavy)] for count in counts
        }

        def slowest(bounds, replicas, before=before):
            spans = zip(bounds, bounds[1:], replicas, strict=False)
            return max(before[count][last] - before[count][first] for first, last, count in spans)

        best = min(
            (
                slowest((0, *inner, parts), replicas)
                for inner in combinations(range(1, parts), stages - 1)
                for replicas in product(counts, repeat=stages)
                if sum(replicas) == devices
            ),
            default=None,
        )
        found = fastest_stages(before, stages=stages, devices=devices)
        assert (found is None) == (best is None), seed
        if found is not None:
            bounds, replicas = found
            assert sum(replicas) == devices
            assert bounds == sorted(set(bounds))
            assert (bounds[0], bounds[-1], len(bounds)) == (0, parts, stages + 1)
            assert slowest(bounds, replicas) <= best * (1 + 1e-9), seed
