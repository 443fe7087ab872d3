"""The cores of a rank on a GPU, on a made machine: two sockets of 8 physical cores.

The second hardware threads of its cores 0 to 15 are 16 to 31.
"""

import pytest

from auto3d.runtime.affinity import cores_near

GPUS = ["0000:3b:00.0", "0000:5e:00.0", "0000:af:00.0", "0000:d8:00.0"]  # two near each socket
NEAR = {0: "0-7,16-23", 1: "8-15,24-31"}  # socket -> cores
ALL = set(range(32))


@pytest.fixture
def sysfs(tmp_path):
    for number, gpu in enumerate(GPUS):
        folder = tmp_path / "bus/pci/devices" / gpu
        folder.mkdir(parents=True)
        (folder / "local_cpulist").write_text(NEAR[number // 2] + "\n")
    for core in ALL:
        folder = tmp_path / f"devices/system/cpu/cpu{core}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{core % 16},{core % 16 + 16}\n")
    return tmp_path


def cores(sysfs, gpus, allowed) -> list[set[int]]:
    return [cores_near(gpus, own, allowed, sysfs) for own in range(len(gpus))]


def test_ranks_near_one_socket_share_its_physical_cores(sysfs):
    """Dealt out by number, the second rank would have the second threads of the first one's cores."""
    assert cores(sysfs, GPUS, ALL) == [
        {0, 1, 2, 3, 16, 17, 18, 19},
        {4, 5, 6, 7, 20, 21, 22, 23},
        {8, 9, 10, 11, 24, 25, 26, 27},
        {12, 13, 14, 15, 28, 29, 30, 31},
    ]


def test_a_rank_alone_has_all_cores_near_its_gpu(sysfs):
    assert cores(sysfs, GPUS[3:], ALL) == [{*range(8, 16), *range(24, 32)}]


def test_only_cores_that_the_process_may_use(sysfs):
    assert cores(sysfs, GPUS, {0, 1, 2, 8, 9}) == [{0}, {1, 2}, {8}, {9}]


def test_too_few_near_cores_are_all_for_each(sysfs):
    assert cores(sysfs, GPUS, {5, 21, 9, 10}) == [{5, 21}, {5, 21}, {9}, {10}]


def test_where_none_is_near_all_stay(sysfs):
    """As where SLURM gave the job cores of one socket alone."""
    assert cores(sysfs, GPUS, {0, 1, 2, 3}) == [{0, 1}, {2, 3}, {0, 1, 2, 3}, {0, 1, 2, 3}]


def test_where_the_kernel_does_not_say_all_stay(tmp_path):
    assert cores(tmp_path, GPUS, ALL) == [ALL] * 4
