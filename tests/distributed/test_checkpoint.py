"""Checkpoints on real processes: a training that ended early and resumes equals, to the bit, one that never ended."""

from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from auto3d.capture.shard import joined
from auto3d.partition.methods.uniform import uniform
from auto3d.plan import Plan
from auto3d.runtime.checkpoint import CheckpointError, Checkpoints, newest
from auto3d.runtime.settings import TrainingSettings
from auto3d.runtime.training import TrainingResult, train
from auto3d.schedule import samples_at_once
from tests.distributed.parity import ADAMW, SGD, make_plan
from tests.models import TRAINED, captured

ITERATIONS = 6
ENDS_AFTER = 2


def run(
    world, model: str, plan: Plan, optimizer, folder: Path, every: int | None, ends_after: int | None
) -> TrainingResult | str:
    """Train as one rank; only the last rank is asked to end. Returns the message of a CheckpointError, if any."""
    settings = TrainingSettings(
        iterations=ITERATIONS, optimizer=optimizer, device="cpu", threads_per_rank=1, timeout_s=60
    )
    looked = count(1)  # number of calls, one at the end of each iteration
    try:
        return train(
            captured(model, samples_at_once(plan)),
            plan,
            settings,
            TRAINED[model][1],
            world,
            checkpoints=Checkpoints(folder=folder, every=every),
            asked_to_end=lambda: world.rank == world.size - 1 and next(looked) == ends_after,
        )
    except CheckpointError as error:
        return str(error)


def tensors(folder: Path, iteration: int) -> dict[str, tuple[str, torch.Tensor]]:
    """Everything in a checkpoint: name -> (file, tensor)."""
    found = {}
    for file in sorted((folder / f"iteration-{iteration:08d}").glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as opened:
            for name in list(opened.keys()):
                assert name not in found, f"{name} is in two files"
                found[name] = (file.name, opened.get_tensor(name))
    return found


CLIP_NOTHING = replace(ADAMW, clip_norm=0.0)


@pytest.mark.parametrize(
    ("model", "degrees", "options", "optimizer"),
    [
        ("gpt2", {"dp": 2, "pp": 2}, {"schedule": "1f1b"}, ADAMW),
        ("gpt2", {"dp": 1, "pp": 2}, {"schedule": "chimera"}, SGD),
        ("t5", {"dp": 1, "pp": 2}, {"schedule": "zb-v"}, ADAMW),
        ("gpt2", {"dp": 2, "pp": 2}, {"schedule": "1f1b", "shard_optimizer": True}, ADAMW),
        ("llama", {"dp": 1, "pp": 2}, {"schedule": "pipedream", "options": {"iterations": 2}}, CLIP_NOTHING),
        ("gpt2-dropout", {"dp": 1, "tp": 2, "pp": 2}, {"schedule": "1f1b"}, ADAMW),
        ("t5", {"dp": 1, "tp": 2, "pp": 2}, {"schedule": "zb-h1", "sequence_parallel": True}, SGD),
        ("llama", {"dp": 2, "tp": 2, "pp": 1}, {"schedule": "1f1b", "shard_optimizer": True}, ADAMW),
    ],
    ids=lambda value: value.get("schedule") if isinstance(value, dict) and "schedule" in value else None,
)
def test_goes_on_as_if_it_had_never_ended(processes, tmp_path, model, degrees, options, optimizer):
    shard = options.pop("shard_optimizer", False)
    if options["schedule"] == "zb-v":  # two stages on each device
        options = options | {"stages": uniform(captured(model, 2).graph, 4)}
    plan = replace(make_plan(model, **degrees, **options), shard_optimizer=shard)
    size = plan.ranks
    whole = processes.run(size, run, model, plan, optimizer, tmp_path / "whole", ITERATIONS, None)
    first = processes.run(size, run, model, plan, optimizer, tmp_path / "parts", None, ENDS_AFTER)
    assert {(len(one.loss), one.asked_to_end) for one in first} == {(ENDS_AFTER, True)}
    assert newest(tmp_path / "parts") == ENDS_AFTER
    second = processes.run(size, run, model, plan, optimizer, tmp_path / "parts", ITERATIONS, None)
    assert {(one.first_iteration, one.asked_to_end) for one in second} == {(ENDS_AFTER, False)}
    assert first[0].loss + second[0].loss == whole[0].loss
    assert first[0].grad_norm + second[0].grad_norm == whole[0].grad_norm
    one, other = (tensors(tmp_path / name, ITERATIONS) for name in ("whole", "parts"))
    assert one.keys() == other.keys()
    assert {name.partition(".")[0] for name in one} == {"model", "optimizer"}
    for name, (_, tensor) in one.items():
        assert torch.equal(tensor, other[name][1]), name


def test_ranks_write_equal_shares_and_two_checkpoints_are_kept(processes, tmp_path):
    plan = make_plan("gpt2", dp=2, pp=1)
    processes.run(2, run, "gpt2", plan, ADAMW, tmp_path, 2, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iteration-00000004", "iteration-00000006"]
    written = dict.fromkeys(["rank-00000.safetensors", "rank-00001.safetensors"], 0)
    for file, tensor in tensors(tmp_path, 6).values():
        written[file] += tensor.nbytes
    assert max(written.values()) < 0.6 * sum(written.values())
    assert (tmp_path / "iteration-00000006").stat().st_mode & 0o077 == 0


def test_what_is_not_written_whole_is_no_checkpoint(processes, tmp_path):
    plan = make_plan("gpt2", dp=1, pp=2)
    processes.run(2, run, "gpt2", plan, ADAMW, tmp_path, None, ENDS_AFTER)
    in_the_way = tmp_path / "iteration-00000004" / "rank-00001.safetensors"
    in_the_way.mkdir(parents=True)
    with pytest.raises(AssertionError, match=r"rank-00001\.safetensors: a checkpoint cannot be written"):
        processes.run(2, run, "gpt2", plan, ADAMW, tmp_path, 4, None)
    assert newest(tmp_path) == ENDS_AFTER
    in_the_way.rmdir()
    again = processes.run(2, run, "gpt2", plan, ADAMW, tmp_path, ITERATIONS, None)
    assert again[0].first_iteration == ENDS_AFTER


def test_another_models_checkpoint_is_refused_by_name(processes, tmp_path):
    processes.run(1, run, "gpt2", make_plan("gpt2", dp=1, pp=1), ADAMW, tmp_path, None, ENDS_AFTER)
    (told,) = processes.run(1, run, "t5", make_plan("t5", dp=1, pp=1), ADAMW, tmp_path, None, None)
    assert "it lacks model." in told
    file = next(tmp_path.glob("*/rank-*"))
    file.write_bytes(file.read_bytes()[:-1])
    (told,) = processes.run(1, run, "gpt2", make_plan("gpt2", dp=1, pp=1), ADAMW, tmp_path, None, None)
    assert f"{file}: " in told
    assert "cannot be read" in told


@pytest.mark.parametrize("shard_optimizer", [False, True])
def test_each_shard_is_written_once_and_read_back_to_the_bit(processes, tmp_path, shard_optimizer):
    plan = make_plan("gpt2", dp=1, tp=2, pp=2, shard_optimizer=shard_optimizer)
    whole = processes.run(4, run, "gpt2", plan, ADAMW, tmp_path / "whole", ITERATIONS, None)
    first = processes.run(4, run, "gpt2", plan, ADAMW, tmp_path / "parts", None, ENDS_AFTER)
    second = processes.run(4, run, "gpt2", plan, ADAMW, tmp_path / "parts", ITERATIONS, None)
    assert first[0].loss + second[0].loss == whole[0].loss
    assert first[0].grad_norm + second[0].grad_norm == whole[0].grad_norm
    one, other = (tensors(tmp_path / name, ITERATIONS) for name in ("whole", "parts"))
    assert one.keys() == other.keys()
    for name, (_, tensor) in one.items():
        assert torch.equal(tensor, other[name][1]), name
    graph = captured("gpt2", 2).graph
    stored = {name: tensor for name, (_, tensor) in one.items() if name.startswith("model.")}
    for name, value in graph.parameters.items():
        if (split := plan.split.get(name)) is None:
            assert stored.pop(f"model.{name}").shape == value.shape
        else:
            shards = [stored.pop(f"model.{name}[shard {shard} of 2]") for shard in range(2)]
            assert joined(shards, split).shape == value.shape
    assert {name.removeprefix("model.") for name in stored} == set(graph.buffers), "nothing is stored twice"


def test_a_checkpoint_of_another_split_is_refused(processes, tmp_path):
    plan = make_plan("gpt2", dp=1, tp=2, pp=1)
    processes.run(2, run, "gpt2", plan, ADAMW, tmp_path, None, ENDS_AFTER)
    for told in processes.run(2, run, "gpt2", make_plan("gpt2", dp=1, pp=2), ADAMW, tmp_path, None, None):
        assert told.endswith(
            "it was written with tp = 2, and this plan has tp = 1; train from it with a plan of tp = 2"
        )

    other = replace(plan, split={key: value for key, value in plan.split.items() if ".mlp." not in key})
    for told in processes.run(2, run, "gpt2", other, ADAMW, tmp_path, None, None):
        assert "transformer.h.0.mlp.c_fc.bias is split along dimension 0 in blocks of [128] in it, and whole in" in told
