"""Whatever strikes a sweep or a training, it ends as it should: all of them twice, at random moments."""

import pytest

from tests.slurm.faults import FAULTS, TIMES, strike


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(TIMES))
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_it_ends_as_it_should(cluster, fault, seed):
    assert strike(cluster, fault, seed).wrong == []
