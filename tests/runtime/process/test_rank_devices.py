"""Ranks whose GPUs NCCL cannot connect are refused in one line, before NCCL tries."""

import pytest
import torch

from auto3d.runtime.process.rank_devices import RankDevice, SharedDeviceError, connection_problem, gather_rank_devices
from auto3d.runtime.process.world import World, join, leave

A100 = "NVIDIA A100-SXM4-40GB"
INSTANCE = f"{A100} MIG 1g.5gb"


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        ([("n1", "a", A100), ("n1", "b", A100), ("n2", "c", A100)], ""),
        ([("n1", "a", A100), ("n2", "a", A100)], ""),  # two cloud nodes whose virtual GPUs have the same UUID
        ([("n1",)] * 4, ""),  # on the CPU
        ([("n1", "a", A100)], ""),
        ([("n1", "a", INSTANCE)], ""),
        ([("n1", "a", A100), ("n2", "b", A100), ("n1", "a", A100)], "ranks 0 and 2 on n1 have the same GPU, a; "),
        ([("n1", "a", A100)] * 3, "ranks 0, 1 and 2 on n1 have the same GPU, a; "),
        ([("n1", "a", A100), ("n1", "b", INSTANCE)], f"rank 1 on n1 has {INSTANCE}, and NCCL does not"),
    ],
)
def test_ranks_that_nccl_cannot_connect(devices, words):
    problem = connection_problem([RankDevice(*one) for one in devices])
    assert problem.startswith(words)
    assert bool(problem) == bool(words)


def _compare(world: World, uuids: list[str]) -> str:
    join(world, device=torch.device("cpu"), timeout_s=60)
    try:
        gather_rank_devices(RankDevice("n1", uuids[world.rank], A100))
    except SharedDeviceError as error:
        return str(error)
    finally:
        leave()
    return "distinct"


@pytest.mark.parametrize(("uuids", "answer"), [(["a", "b"], "distinct"), (["a", "a"], "ranks 0 and 1 on n1 have")])
def test_every_rank_reports_the_same_problem(processes, uuids, answer):
    answers = processes.run(2, _compare, uuids)
    assert answers[0] == answers[1]
    assert answers[0].startswith(answer)


@pytest.mark.parametrize(("visible", "index"), [(1, 0), (4, 2)])
def test_a_rank_uses_the_only_visible_gpu_or_that_of_its_local_rank(monkeypatch, visible, index):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    world = World(rank=6, size=8, local_rank=2, meeting_point="tcp://n1:1")
    assert world.device("cuda") == torch.device("cuda", index)
    assert world.device("cpu") == torch.device("cpu")
