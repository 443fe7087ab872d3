"""The cores of a rank on a GPU, on an imaginary machine with two sockets of 8 physical cores.

Cores 0 to 15 are the first hardware threads, 16 to 31 the second ones.
"""

import pytest

from auto3d.runtime.process.affinity import cores_near

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
    return [cores_near(gpus, index, allowed, sysfs) for index in range(len(gpus))]


def test_ranks_near_one_socket_divide_its_physical_cores(sysfs):
    """If cores were divided by number, the second rank would get the second threads of the first rank's cores."""
    assert cores(sysfs, GPUS, ALL) == [
        {0, 1, 2, 3, 16, 17, 18, 19},
        {4, 5, 6, 7, 20, 21, 22, 23},
        {8, 9, 10, 11, 24, 25, 26, 27},
        {12, 13, 14, 15, 28, 29, 30, 31},
    ]


def test_a_single_rank_gets_all_cores_near_its_gpu(sysfs):
    assert cores(sysfs, GPUS[3:], ALL) == [{*range(8, 16), *range(24, 32)}]


def test_ranks_get_only_cores_that_the_process_may_use(sysfs):
    assert cores(sysfs, GPUS, {0, 1, 2, 8, 9}) == [{0}, {1, 2}, {8}, {9}]


def test_each_rank_gets_all_near_cores_if_there_are_fewer_than_ranks(sysfs):
    assert cores(sysfs, GPUS, {5, 21, 9, 10}) == [{5, 21}, {5, 21}, {9}, {10}]


def test_a_rank_with_no_core_near_its_gpu_gets_all(sysfs):
    """For example if SLURM gave the job cores of only one socket."""
    assert cores(sysfs, GPUS, {0, 1, 2, 3}) == [{0, 1}, {2, 3}, {0, 1, 2, 3}, {0, 1, 2, 3}]


def test_a_rank_gets_all_cores_if_the_kernel_reports_none_as_near(tmp_path):
    assert cores(tmp_path, GPUS, ALL) == [ALL] * 4
