"""Which GPUs a process may use; concurrent trials get different ones. A fake nvidia-smi stands in for the driver."""

import os
import subprocess
import sys

import pytest
import torch

from auto3d.errors import InputError
from auto3d.runtime.measurement import Status
from launch.drivers.sweep import sweep_of
from launch.executors.local import LocalTrials
from launch.model import graphs
from launch.model.build import captured_model
from launch.model.compare import compare_on_gpu
from launch.recipe.load import load
from launch.run import devices
from launch.run.devices import DevicePool, Gpu, parse_gpu_list, parse_visible_devices, present_devices, visible_devices
from launch.store.watcher import Watcher
from tests.fake_gpus import FOUR, SPLIT, WITNESS, seen_in, write_nvidia_smi
from tests.promises.preloaded import SCRIPT

WHOLE = [Gpu("GPU-aa-1"), Gpu("GPU-ab-2"), Gpu("GPU-c-3")]
MIXED = [Gpu("GPU-aa-1", ("MIG-x", "MIG-y")), Gpu("GPU-ab-2")]


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("0,1", ("0", "1")),
        (" 2 , 0", ("2", "0")),
        ("", ()),
        ("-1", ()),
        ("0,2,-1,1", ("0", "2")),
        ("NoDevFiles", ()),
        ("1,GPU-aa", ("1",)),
        ("1,0,1", ()),
        ("1st,+2", ("1", "2")),
        ("GPU-aa,GPU-c,0", ("GPU-aa", "GPU-c")),
        ("GPU-aa,GPU-aa", ()),
        ("MIG-x,MIG-y,GPU-aa", ("MIG-x", "MIG-y")),
    ],
)
def test_the_variable_is_read_as_cuda_reads_it(value, names):
    assert parse_visible_devices(value) == names


@pytest.mark.parametrize(
    ("named", "gpus", "names"),
    [
        (None, WHOLE, ("GPU-aa-1", "GPU-ab-2", "GPU-c-3")),
        (("2", "0"), WHOLE, ("2", "0")),
        (("0", "3", "1"), WHOLE, ("0",)),
        (("GPU-c", "GPU-a"), WHOLE, ("GPU-c-3",)),  # GPU-a matches two GPUs
        (("GPU-ab-2", "GPU-d"), WHOLE, ("GPU-ab-2",)),
        (None, MIXED, ("MIG-x", "MIG-y", "GPU-ab-2")),
        (("1", "0"), MIXED, ("1", "MIG-x", "MIG-y")),
        (("MIG-y",), MIXED, ("MIG-y",)),
        (("MIG-z",), MIXED, ()),
        (("GPU-aa",), MIXED, ("MIG-x", "MIG-y")),
    ],
)
def test_the_devices_end_before_the_first_absent_one(named, gpus, names):
    assert present_devices(named, gpus) == names


def test_the_list_of_nvidia_smi_has_instances_below_their_gpu():
    assert [gpu.uuid for gpu in parse_gpu_list(FOUR)] == ["GPU-00-a", "GPU-11-a", "GPU-22-a", "GPU-33-a"]
    assert parse_gpu_list(SPLIT) == [Gpu("GPU-00-a", ("MIG-c6d4f1ef", "MIG-cba663e8")), Gpu("GPU-11-a")]
    older = "GPU 0: A100 (UUID: GPU-5-d)\n  MIG 1g.5gb Device 0: (UUID: MIG-GPU-5-d/7/0)\n"
    assert parse_gpu_list(older) == [Gpu("GPU-5-d", ("MIG-GPU-5-d/7/0",))]
    assert parse_gpu_list("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n") == []


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A function that sets the output of nvidia-smi, and the value of CUDA_VISIBLE_DEVICES."""

    def have(text: str, value: str | None = None) -> None:
        monkeypatch.setenv("PATH", f"{write_nvidia_smi(tmp_path / 'bin', text)}:{os.environ['PATH']}")
        if value is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)

    return have


def test_visible_devices(machine):
    machine(FOUR)
    assert visible_devices() == ("GPU-00-a", "GPU-11-a", "GPU-22-a", "GPU-33-a")
    machine(FOUR, "2,0,7")
    assert visible_devices() == ("2", "0")
    machine(FOUR, "")
    assert visible_devices() == ()
    machine("")
    assert visible_devices() == (), "the list is empty, and this torch has no CUDA"


@pytest.mark.parametrize(("value", "names"), [(None, ("0", "1")), ("3,1,0", ("3", "1")), ("GPU-c", ("GPU-c",))])
def test_without_nvidia_smi_a_child_asks_torch(machine, monkeypatch, value, names):
    machine("", value)
    monkeypatch.setattr(devices, "torch_device_count", lambda: 2)
    assert visible_devices() == names


# The pool


def test_a_trial_keeps_its_devices_until_it_returns_them():
    pool = DevicePool(["2", "0", "1"])
    assert pool.max_ranks() == 3
    first, second = pool.take(2), pool.take(1)
    assert (first, second) == (("2", "0"), ("1",))
    assert pool.take(1) is None
    pool.give_back(first)
    assert pool.take(2) == ("2", "0")


def test_several_ranks_get_whole_gpus_and_a_single_rank_an_instance():
    pool = DevicePool(["MIG-x", "0", "MIG-y", "1"])
    assert pool.max_ranks() == 2
    assert [pool.take(1), pool.take(2), pool.take(1), pool.take(1)] == [("MIG-x",), ("0", "1"), ("MIG-y",), None]
    assert DevicePool(["MIG-x", "MIG-y"]).max_ranks() == 1
    assert DevicePool([]).max_ranks() == 0


@pytest.mark.parametrize(
    ("text", "value", "ranks", "words"),
    [
        (FOUR, None, 5, "5 ranks need a GPU each, and this machine has 4"),
        (FOUR, "1,3", 3, "3 ranks need a GPU each, and this process may use 2, by CUDA_VISIBLE_DEVICES=1,3"),
        (FOUR, "-1", 1, "1 rank needs a GPU each, and this process may use 0, by CUDA_VISIBLE_DEVICES=-1"),
        (SPLIT, "0", 2, "2 ranks cannot run on MIG instances, which NCCL does not connect: use whole GPUs"),
    ],
)
def test_too_few_devices_are_refused_in_one_line(folder, machine, text, value, ranks, words):
    machine(text, value)
    with pytest.raises(InputError, match=words) as caught:
        devices.devices_for(load("own.yaml", ["cluster.device=cuda"]), ranks, size=ranks)
    assert "\n" not in str(caught.value)


def test_a_rank_of_a_larger_run_gets_no_instance(folder, machine):
    machine(SPLIT, "MIG-c6d4f1ef")
    recipe = load("own.yaml", ["cluster.device=cuda"])
    assert devices.devices_for(recipe, 1, size=1) == ("MIG-c6d4f1ef",)
    with pytest.raises(InputError, match="2 ranks cannot run on MIG instances"):
        devices.devices_for(recipe, 1, size=2)


# Ranks that a launcher started


@pytest.mark.parametrize(
    ("text", "value", "local_rank", "refused"),
    [
        (FOUR, "2", 2, ""),  # the launcher bound it to the task, as with --gpus-per-task
        (FOUR, "0,1,2", 2, ""),
        (FOUR, "0,1", 2, "rank 2 of its node sees 2 GPUs"),
        (FOUR, "", 0, "rank 0 of its node sees 0 GPUs"),
        (SPLIT, "MIG-c6d4f1ef", 0, "4 ranks cannot run on MIG instances"),
        (SPLIT, "0", 0, "4 ranks cannot run on MIG instances"),
    ],
)
def test_a_joined_rank_has_its_bound_device_or_that_of_its_local_rank(
    folder, machine, monkeypatch, text, value, local_rank, refused
):
    machine(text, value)
    monkeypatch.setattr(devices, "torch_has_cuda", lambda: True)
    recipe = load("own.yaml", ["cluster.device=cuda"])
    if not refused:
        devices.check_joined_device(recipe, local_rank=local_rank, size=4)
        return
    with pytest.raises(InputError, match=refused):
        devices.check_joined_device(recipe, local_rank=local_rank, size=4)


# Forking


def test_a_process_in_which_cuda_has_started_forks_no_ranks(tmp_path, monkeypatch):
    from launch.run.ranks import run_ranks

    assert not devices.cuda_has_started()
    (tmp_path / "fd").mkdir()
    for number, target in enumerate(["/dev/nvidiactl", "/dev/null"]):
        (tmp_path / "fd" / str(number)).symlink_to(target)
    assert not devices.cuda_has_started(tmp_path), "only NVML was used"
    (tmp_path / "fd" / "9").symlink_to("/dev/nvidia-uvm")
    assert devices.cuda_has_started(tmp_path)
    monkeypatch.setattr(devices, "cuda_has_started", lambda: True)
    with pytest.raises(RuntimeError, match="CUDA has started in the process that starts the ranks"):
        run_ranks(1, lambda world, report: None, limit_s=60, devices=["0"])


def test_ranks_see_only_their_devices(monkeypatch):
    from launch.run.ranks import run_ranks

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    outcome = run_ranks(2, lambda world, report: os.environ["CUDA_VISIBLE_DEVICES"], limit_s=60, devices=["3", "1"])
    assert outcome.result == "3,1"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"


# Concurrent trials


class ExpectedFailure(Watcher):
    def end(self, ended):
        assert NO_GPU in ended.measurement.error, "it ran as far as it can"


@pytest.fixture
def ran(folder, machine, monkeypatch):
    """A function that runs trials of two ranks, at most two at a time; it returns each rank and the devices it saw."""
    monkeypatch.setattr(devices, "torch_has_cuda", lambda: True)  # only in this process, which does not use CUDA
    (folder / "witness.py").write_text(WITNESS)

    def run(value: str, sizes: str, *, expected: int):
        machine(FOUR, value)
        model = ["model.factory=witness:make", f"model.arguments={{expected: {expected}, folder: {folder}}}"]
        changes = [f"search.micro_batch_size={sizes}", "cluster.device=cuda", "launch.concurrent_trials=2"]
        recipe = load("own.yaml", [*model, *changes])
        with LocalTrials(recipe) as trials:
            trials.run(sweep_of(recipe).trials, ExpectedFailure())
        return [(one.rank, one.devices) for one in seen_in(folder)]

    return run


@pytest.mark.soak
def test_concurrent_trials_see_different_devices(ran):
    seen = ran("3,1,2,0", "[2,4,8]", expected=4)
    assert [rank for rank, _ in seen] == [0, 1] * 3
    first, second, third = (names for _, names in seen[::2])
    assert [names for _, names in seen[1::2]] == [first, second, third], "both ranks of a trial see the same"
    assert (first, second) == ("3,1", "2,0")
    assert third in (first, second), "the third trial takes the devices of one that has ended"


@pytest.mark.soak
def test_a_trial_waits_until_enough_devices_are_free(ran):
    assert ran("1,2,3", "[2,4]", expected=2) == [(0, "1,2"), (1, "1,2")] * 2


NO_GPU = "Found no NVIDIA driver" if torch.backends.cuda.is_built() else "Torch not compiled with CUDA"

# Where the model is captured: a rank cannot use its GPU if its process, or the one it was forked from, has captured

IMPORTS = """
from importlib import import_module
from pkgutil import walk_packages
import torch

def fail():
    raise AssertionError("an import begins a FakeTensorMode, which asks CUDA for its devices and so starts it")

torch._C._ensureCUDADeviceGuardSet = fail
import auto3d, launch
for package in (auto3d, launch):
    for module in walk_packages(package.__path__, f"{package.__name__}."):
        if not module.name.endswith("__main__") and not module.name.startswith("launch.peers"):
            import_module(module.name)
"""


def test_no_import_starts_cuda(tmp_path):
    """Except for those of other systems, which run in processes of their own; preloaded.py looks at its own imports."""
    (tmp_path / SCRIPT).write_text(IMPORTS)
    subprocess.run([sys.executable, SCRIPT], cwd=tmp_path, check=True, timeout=120)


@pytest.fixture
def no_fake_mode(monkeypatch):
    """Fail if this process begins a FakeTensorMode."""
    begun: list[None] = []
    monkeypatch.setattr(torch._C, "_ensureCUDADeviceGuardSet", lambda: begun.append(None))
    yield
    assert not begun, "the process that forks the ranks has started CUDA"


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="without a GPU, a torch with CUDA ends before it captures")
def test_a_training_on_gpus_captures_in_its_ranks(folder, machine, auto3d, monkeypatch, no_fake_mode):
    for module in (devices, graphs):
        monkeypatch.setattr(module, "torch_has_cuda", lambda: True)
    machine(FOUR, "3,1")
    (folder / "witness.py").write_text(WITNESS)
    model = ["model.factory=witness:make", f"model.arguments={{expected: 2, folder: {folder}}}"]
    error = auto3d("train", "own.yaml", *model, "cluster.device=cuda", code=1).err
    assert NO_GPU in error, "it ran as far as it can"
    assert [(one.rank, one.devices) for one in seen_in(folder)] == [(0, "3,1"), (1, "3,1")]
    assert "witness" not in sys.modules, "the process that forks the ranks did not import it"


def test_the_ranks_of_a_training_on_gpus_share_what_is_stored(folder, machine, auto3d, monkeypatch, no_fake_mode):
    """The model's factory is called by the process that captures it, and by no rank before it needs its GPU."""
    for module in (devices, graphs):
        monkeypatch.setattr(module, "torch_has_cuda", lambda: True)
    machine(FOUR, "3,1")
    (folder / "witness.py").write_text(WITNESS.replace("return Captured", "return Net"))
    model = ["model.factory=witness:make", f"model.arguments={{expected: 2, folder: {folder}}}"]
    error = auto3d("train", "own.yaml", *model, "cluster.device=cuda", code=1).err
    assert NO_GPU in error, "it ran as far as it can"
    assert seen_in(folder) == []
    assert "witness" not in sys.modules, "the process that forks the ranks read the program without the model's code"


def test_a_capture_is_compared_on_a_gpu_in_a_fresh_process(folder):
    recipe = load("own.yaml", ["cluster.device=cuda"])
    outcome = compare_on_gpu(recipe, 4, limit_s=120)
    assert (outcome.status, NO_GPU in outcome.error) == (Status.FAILED, True), outcome.error
    with pytest.raises(InputError, match=r"model\.arguments: refused by mine:make"):
        compare_on_gpu(load("own.yaml", ["model.arguments={depth: 3}"]), 4, limit_s=120)


def test_gpus_are_hidden_if_ranks_inherit_a_capture(folder, machine, monkeypatch):
    """Otherwise the first backward starts a thread per GPU, after which no forked process can run a backward."""
    monkeypatch.setattr(devices, "torch_has_cuda", lambda: True)
    machine(FOUR, "3,1")
    captured_model(load("own.yaml", ["cluster.device=cuda"]), 4)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3,1"
    captured_model(load("own.yaml"), 4)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
