"""Stages and their replicas against every possibility."""

from itertools import accumulate, combinations, product
from random import Random

from auto3d.partition.replicated import fastest_stages


def test_no_other_cuts_and_replicas_are_faster():
    """Stages differ in what they recompute, so in the seconds of the same parts."""
    for seed in range(600):
        random = Random(seed)
        parts, stages = random.randint(2, 7), random.randint(2, 4)
        devices = stages + random.randint(0, 4)
        counts = sorted({1, *random.sample([2, 3, 4], 2)} - ({1} if random.random() < 0.2 else set()))
        heavy = [random.choice([1, 1, 2, 7]) * random.random() for _ in range(parts)]
        fixed = [0.1 * random.random() for _ in heavy]  # what does not shrink with the share of the samples
        recomputed = [random.choice([0, 0.3, 1]) if random.random() < 0.7 else 1 for _ in range(stages)]
        before = {
            count: [
                [0.0, *accumulate((1 + again) * each / count + more for each, more in zip(heavy, fixed, strict=True))]
                for again in recomputed
            ]
            for count in counts
        }

        def slowest(bounds, replicas, before=before):
            spans = enumerate(zip(bounds, bounds[1:], replicas, strict=False))
            return max(
                before[count][stage][last] - before[count][stage][first] for stage, (first, last, count) in spans
            )

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
