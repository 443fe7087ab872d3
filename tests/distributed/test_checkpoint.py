"""Checkpoints on real processes: a training that ended early and resumes equals one that never ended, under any plan.

Under the same plan it does to the bit.
"""

import re
import resource
import shutil
import signal
from dataclasses import replace
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from time import monotonic, sleep

import pytest
import torch
from safetensors.torch import save_file
from schedulefree import AdamWScheduleFree
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from auto3d.capture.shard import Shard
from auto3d.partition.stage import cut
from auto3d.plan import Plan
from auto3d.runtime.checkpoint.format import (
    Checkpoint,
    CheckpointError,
    Checkpoints,
    StoredPart,
    StoredTensor,
    newest,
    to_json,
)
from auto3d.runtime.checkpoint.reading import CheckpointReader
from auto3d.runtime.checkpoint.state_part import StatePart
from auto3d.runtime.checkpoint.writing import CheckpointWriter
from auto3d.runtime.process.world import join
from auto3d.runtime.settings import OptimizerSettings, ParameterGroup, TrainingSettings
from auto3d.runtime.training import Training, TrainingResult, train
from auto3d.schedule import samples_at_once
from auto3d.tensor_placement import Split
from tests.distributed.found_orders import BY_NAME
from tests.distributed.parity import ADAMW, SGD, make_plan, plain_pytorch
from tests.models import TRAINED, captured, gpt2
from tests.soak import soak

ITERATIONS = 6
ENDS_AFTER = 2


def run(
    world, model: str, plan: Plan, optimizer, folder: Path, every: int | None, ends_after: int | None, keep: int = 2
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
            checkpoints=Checkpoints(folder=folder, every=every, keep=keep),
            asked_to_end=lambda: world.rank == world.size - 1 and next(looked) == ends_after,
        )
    except CheckpointError as error:
        return str(error)


def tensors(folder: Path, iteration: int) -> dict[str, torch.Tensor]:
    """Everything in a checkpoint, whole."""
    with CheckpointReader(folder / f"iteration-{iteration:08d}") as reader:
        return {name: reader.whole(name) for name in reader.checkpoint.tensors}


CLIP_NOTHING = replace(ADAMW, clip_norm=0.0)


@pytest.mark.parametrize(
    ("model", "degrees", "options", "optimizer"),
    [
        ("gpt2", {"dp": 2, "pp": 2}, {"schedule": "1f1b"}, ADAMW),
        ("gpt2", {"dp": 2, "pp": 2}, {"schedule": "1f1b", "shard_optimizer": True}, ADAMW),
        ("llama", {"dp": 1, "pp": 2}, {"schedule": "pipedream", "options": {"iterations": 2}}, CLIP_NOTHING),
        ("gpt2-dropout", {"dp": 1}, BY_NAME["v-2-recompute"].choices, ADAMW),
        *soak(
            ("t5", {"dp": 1, "pp": 2}, {"schedule": "zb-v"}, ADAMW),
            ("gpt2", {"dp": 1, "pp": 2}, {"schedule": "chimera"}, SGD),
            ("llama", {"dp": 2, "pp": 2}, {"schedule": "seq1f1b", "shard_optimizer": True}, ADAMW),
            ("t5-dropout", {"dp": 1}, BY_NAME["two-way-4-recompute"].choices, SGD),
            ("t5", {"dp": 1, "tp": 2, "pp": 2}, {"schedule": "zb-h1", "sequence_parallel": True}, SGD),
            ("llama", {"dp": 2, "tp": 2, "pp": 1}, {"schedule": "1f1b", "shard_optimizer": True}, ADAMW),
        ),
    ],
    ids=lambda value: value.get("schedule") if isinstance(value, dict) and "schedule" in value else None,
)
def test_goes_on_as_if_it_had_never_ended(processes, tmp_path, model, degrees, options, optimizer):
    plan = make_plan(model, **degrees, **options)
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
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


FROM = {
    "dp2-pp2": {"dp": 2, "pp": 2},
    "dp2-pp2-zero1": {"dp": 2, "pp": 2, "shard_optimizer": True},
    "tp2-dp2-zero1": {"dp": 2, "tp": 2, "pp": 1, "shard_optimizer": True},
    "synthesized": {"dp": 1, "micro_batch_size": 1} | BY_NAME["v-4-recompute"].choices,
}
TO = {
    "one": {"dp": 1, "pp": 1},
    "pp4": {"dp": 1, "pp": 4, "schedule": "gpipe"},
    "dp4": {"dp": 4, "pp": 1},
    "dp4-zero1": {"dp": 4, "pp": 1, "shard_optimizer": True},
    "chimera": {"dp": 1, "pp": 2, "schedule": "chimera"},
    "tp2-pp2": {"dp": 1, "tp": 2, "pp": 2},
    "tp4": {"dp": 1, "tp": 4, "pp": 1},
    "tp2-synthesized": {"dp": 1, "tp": 2, "micro_batch_size": 1} | BY_NAME["v-2-recompute"].choices,
}
FOUR_HEADS = "gpt2-four-heads"


@pytest.fixture(scope="module")
def four_heads():
    """A GPT-2 that four tensor-parallel ranks can split, whose vocabulary they must pad."""
    TRAINED[FOUR_HEADS] = (partial(gpt2, n_head=4, vocab_size=257), TRAINED["gpt2"][1])
    yield FOUR_HEADS
    del TRAINED[FOUR_HEADS]


COUNTING = ParameterGroup(names=("*.mlp.*",), optimizer="tests.distributed.test_optimizers:Warming")
GROUPS = replace(ADAMW, groups=(COUNTING, ParameterGroup(names=("*.bias",), learning_rate=3e-3)))
AVERAGES = OptimizerSettings(
    optimizer="schedulefree:AdamWScheduleFree", learning_rate=1e-3, weight_decay=0.01, arguments={"warmup_steps": 2}
)

ADDS_UP = OptimizerSettings(optimizer="prodigyopt:Prodigy", learning_rate=1.0, arguments={"d0": 1e-4, "eps": 1e-6})


@pytest.mark.parametrize(
    ("source", "targets", "optimizer"),
    [
        ("dp2-pp2-zero1", ("one", "dp4", "dp4-zero1", "tp2-pp2", "tp2-synthesized"), ADAMW),
        *soak(("tp2-dp2-zero1", ("pp4", "chimera", "tp4"), ADAMW)),
        ("synthesized", ("dp4-zero1",), ADAMW),
        ("dp2-pp2-zero1", ("one", "dp4-zero1"), GROUPS),
        ("dp2-pp2", ("tp2-pp2",), GROUPS),
        ("dp2-pp2-zero1", ("one", "tp2-pp2"), AVERAGES),
        ("dp2-pp2", ("one", "pp4"), ADDS_UP),
        *soak(*((source, tuple(TO), optimizer) for source in FROM for optimizer in (ADAMW, GROUPS))),
    ],
    ids=lambda value: {id(GROUPS): "groups", id(AVERAGES): "averages", id(ADDS_UP): "adds up"}.get(id(value)),
)
def test_goes_on_under_another_plan(processes, tmp_path, source, targets, optimizer, four_heads):
    whole = processes.run(4, run, FOUR_HEADS, plan_of(FROM[source]), optimizer, tmp_path / "whole", 1, None, 9)[0]
    for name in targets:
        plan, folder = plan_of(TO[name]), tmp_path / name
        shutil.copytree(tmp_path / "whole" / f"iteration-{ENDS_AFTER:08d}", folder / f"iteration-{ENDS_AFTER:08d}")
        for one in processes.run(plan.ranks, run, FOUR_HEADS, plan, optimizer, folder, None, None):
            assert one.first_iteration == ENDS_AFTER
            assert one.loss == pytest.approx(whole.loss[ENDS_AFTER:], rel=1e-5), name
            assert one.grad_norm == pytest.approx(whole.grad_norm[ENDS_AFTER:], rel=1e-5), name


def test_a_checkpoint_holds_the_weights_of_evaluation_where_the_optimizer_averages(processes, tmp_path, four_heads):
    plan = plan_of({"dp": 2, "tp": 2, "pp": 1, "shard_optimizer": True})
    processes.run(4, run, FOUR_HEADS, plan, AVERAGES, tmp_path, ITERATIONS, None)
    made: list = []

    def optimizers(module: nn.Module) -> list[tuple]:
        made.append(module)
        made.append(AdamWScheduleFree(module.parameters(), lr=1e-3, weight_decay=0.01, warmup_steps=2))
        made[1].train()
        return [(made[1], LambdaLR(made[1], lambda _: 1.0))]

    plain_pytorch(FOUR_HEADS, micro_batch_size=2, optimizer=AVERAGES, iterations=ITERATIONS, optimizers=optimizers)
    found, (module, optimizer) = tensors(tmp_path, ITERATIONS), made
    in_training = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    optimizer.eval()
    changes = []
    for name, parameter in module.named_parameters():
        assert torch.allclose(found[f"model.{name}"], parameter, rtol=1e-4, atol=1e-5), name
        changes.append((in_training[name] - parameter).abs().max())
    assert max(changes) > 1e-4, "they differ, so that it matters"


def plan_of(degrees: dict) -> Plan:
    return make_plan(FOUR_HEADS, **degrees)


def test_dropout_goes_on_under_another_plan(processes, tmp_path):
    """As many samples in a micro-batch draw the same dropout wherever they run."""
    plan = make_plan("gpt2-dropout", dp=2, pp=2)
    whole = processes.run(4, run, "gpt2-dropout", plan, SGD, tmp_path, 1, None, 9)[0]
    for iteration in range(ENDS_AFTER + 1, ITERATIONS + 1):
        shutil.rmtree(tmp_path / f"iteration-{iteration:08d}")
    for degrees in ({"dp": 1, "pp": 4}, {"dp": 1, "pp": 2, "schedule": "chimera"}):
        plan = make_plan("gpt2-dropout", **degrees)
        one = processes.run(plan.ranks, run, "gpt2-dropout", plan, SGD, tmp_path, None, None)[0]
        assert one.loss == pytest.approx(whole.loss[ENDS_AFTER:], rel=1e-5)


def buffers_of(world, model: str, plan: Plan, folder: Path) -> dict[str, torch.Tensor]:
    """Train as one rank and write a checkpoint at the end; this rank's buffers."""
    settings = TrainingSettings(iterations=2, optimizer=SGD, timeout_s=60)
    program, data = captured(model, samples_at_once(plan)), TRAINED[model][1]
    training = Training(program, plan, settings, data, world, checkpoints=Checkpoints(folder=folder, every=2))
    for _ in training.iterations():
        pass
    training.result()
    return {name: tensor.clone() for name, tensor in training.rank.buffers.items()}


def test_batch_statistics_are_those_of_the_first_pipeline(processes, tmp_path):
    """As evaluation uses them: an exported model then computes what the training's evaluation did."""
    plan = make_plan("residual", dp=2, pp=2, schedule="chimera")
    ranks = processes.run(4, buffers_of, "residual", plan, tmp_path)
    stored = tensors(tmp_path, 2)
    statistics = [name for name in ranks[0] if name.endswith("running_mean")]
    assert statistics
    differ = 0
    for device in range(2):  # each rank of Chimera holds both stages, the first pipe's is that of its own number
        stage_state = cut(captured("residual", samples_at_once(plan)).graph, plan.stages)[device].state
        first, other = (ranks[rank] for rank in plan.placement[device])
        for name in set(statistics) & set(stage_state):
            assert torch.equal(stored[f"model.{name}"], first[name]), name
            differ += not torch.equal(first[name], other[name])
    assert differ


def test_ranks_write_equal_shares_and_two_checkpoints_are_kept(processes, tmp_path):
    plan = make_plan("gpt2", dp=2, pp=1)
    processes.run(2, run, "gpt2", plan, ADAMW, tmp_path, 2, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iteration-00000004", "iteration-00000006"]
    files = sorted((tmp_path / "iteration-00000006").glob("*.safetensors"))
    written = {file.name: file.stat().st_size for file in files}
    assert list(written) == ["rank-00000.safetensors", "rank-00001.safetensors"]
    assert max(written.values()) < 0.6 * sum(written.values())
    assert (tmp_path / "iteration-00000006").stat().st_mode & 0o077 == 0


def test_a_rank_reads_only_its_bytes(processes, tmp_path):
    """Where the degrees change but not the split, and from whole tensors to any split along their first dimension."""
    plan = make_plan("gpt2", dp=2, pp=2, shard_optimizer=True)
    processes.run(4, run, "gpt2", plan, ADAMW, tmp_path, None, ENDS_AFTER)
    with CheckpointReader(tmp_path / f"iteration-{ENDS_AFTER:08d}") as reader:
        for shard in (None, Shard(Split(0, (96,)), 1, 3), Shard(Split(1, (64, 64)), 0, 2)):
            name = (
                "model.transformer.h.0.mlp.c_fc.weight" if shard and shard.split.dim else "model.transformer.wpe.weight"
            )
            shape = reader.checkpoint.tensors[name].shape
            if shard and not shard.split.dim:
                shard = replace(shard, split=Split(0, (shape[0],)))
            part = torch.empty(shape if shard is None else shard.shape(shape))
            before = reader.bytes_read
            reader.load({name: StatePart(tensor=part, shape=shape, shard=shard)})
            whole = reader.whole(name)
            assert torch.equal(part, whole if shard is None else shard.of(whole))
            needed = (
                sum(n for _, _, n in shard.runs()) / shape[shard.split.dim] * whole.nbytes if shard else whole.nbytes
            )
            assert reader.bytes_read - before - whole.nbytes == needed


def test_ranges_of_flattened_shards_are_put_together(tmp_path):
    """Any ranges and shards, written by hand: every other way to cut the tensors gives the same elements."""
    generator = torch.Generator().manual_seed(3)

    def random(most: int) -> int:
        return int(torch.randint(1, most + 1, (), generator=generator))

    for case in range(40):
        blocks = tuple(random(5) for _ in range(random(3)))
        shape = [random(4), random(4), random(4)][: random(3)]
        dim = random(len(shape)) - 1
        shape[dim] = sum(blocks)
        whole = torch.rand(shape, generator=generator)
        cuts = [
            [None],
            [Shard(Split(dim, blocks), number, 3) for number in range(3)],
            [Shard(Split(dim, blocks), number, 2) for number in range(2)],
            [Shard(Split(0, (shape[0],)), number, 2) for number in range(2)],
        ]
        for number, shards in enumerate(cuts):
            folder = tmp_path / f"{case}-{number}"
            by_hand(folder, whole, shards, pieces=random(4), generator=generator)
            with CheckpointReader(folder) as reader:
                assert torch.equal(reader.whole("model.x"), whole)
                for wanted in (one for others in cuts for one in others):
                    local = whole if wanted is None else wanted.of(whole)
                    first = random(local.numel() + 1) - 1
                    last = first + random(local.numel() - first + 1) - 1
                    for flat in (None, (first, last)):
                        tensor = torch.full_like(local if flat is None else local.flatten()[first:last], torch.nan)
                        part = StatePart(tensor=tensor, shape=tuple(shape), shard=wanted, flat=flat)
                        reader.load({"model.x": part})
                        assert torch.equal(tensor, local if flat is None else local.flatten()[first:last])


def by_hand(folder: Path, whole: torch.Tensor, shards: list[Shard | None], *, pieces: int, generator) -> None:
    """Write a checkpoint of ``whole`` as model.x, each of its ``shards`` in ``pieces`` ranges."""
    folder.mkdir()
    parts, files = [], {}
    for number, shard in enumerate(shards):
        local = (whole if shard is None else shard.of(whole)).flatten()
        cuts = torch.randint(0, local.numel() + 1, (pieces - 1,), generator=generator).sort().values.tolist()
        for first, last in pairwise([0, *cuts, local.numel()]):
            name = f"rank-{len(files):05d}.safetensors"
            save_file({"model.x": local[first:last].clone()}, folder / name)
            files[name] = (folder / name).stat().st_size
            parts.append(StoredPart(file=name, shard=number, flat=(first, last)))
    split = None if shards[0] is None else shards[0].split
    tensors = {"model.x": StoredTensor(shape=tuple(whole.shape), parts=parts, split=split, shards=len(shards))}
    checkpoint = Checkpoint(iteration=1, learnt={}, numbers={}, files=files, tensors=tensors)
    (folder / "checkpoint.json").write_text(to_json(checkpoint))


def test_what_is_not_written_whole_is_no_checkpoint(processes, tmp_path):
    plan = make_plan("gpt2", dp=1, pp=2)
    processes.run(2, run, "gpt2", plan, ADAMW, tmp_path, None, ENDS_AFTER)
    with pytest.raises(
        AssertionError, match=r"rank-00001\.safetensors: a checkpoint cannot be written: .*File too large"
    ):
        processes.run(2, run_without_room, "gpt2", plan, ADAMW, tmp_path, 4, None)
    assert newest(tmp_path) == ENDS_AFTER
    assert list(tmp_path.glob(".iteration-00000004.*"))
    again = processes.run(2, run, "gpt2", plan, ADAMW, tmp_path, ITERATIONS, None)
    assert again[0].first_iteration == ENDS_AFTER
    assert not list(tmp_path.glob(".*")), "what the failed run left is removed"


def run_without_room(world, *arguments) -> TrainingResult | str:
    """Rank 1 may write no more than 4 KiB into a file, as if its disk were full."""
    if world.rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    return run(world, *arguments)


def test_a_rank_without_state_leaves_the_folder_to_the_others(processes, tmp_path):
    processes.run(2, save_nothing, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["iteration-00000001"]


def save_nothing(world, folder: Path) -> None:
    """As ranks of emulated training do; rank 1 comes to its folder late, when rank 0 has renamed it."""
    join(world, device=torch.device("cpu"), timeout_s=60)
    make = Path.mkdir

    def make_late(self: Path, *arguments, **options) -> None:
        end = monotonic() + 5
        while world.rank == 1 and newest(folder) is None and monotonic() < end:
            sleep(0.01)
        make(self, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "mkdir", make_late)
        writer = CheckpointWriter(Checkpoints(folder=folder, every=None, keep=1), {})
        writer.save({}, iteration=1, numbers={})
        writer.finish()


def test_what_cannot_be_read_or_belongs_to_another_training_is_refused_in_one_line(processes, tmp_path):
    def told(model: str = "gpt2", optimizer=ADAMW, **changes) -> str:
        plan = replace(make_plan(model, dp=1, pp=1), **changes)
        (line,) = processes.run(1, run, model, plan, optimizer, tmp_path, None, None)
        assert "\n" not in line
        return line

    more = replace(ADAMW, arguments={"amsgrad": True})
    processes.run(1, run, "gpt2", make_plan("gpt2", dp=1, pp=1), more, tmp_path, None, ENDS_AFTER)
    assert re.search(r": it has optimizer\.\S+\.max_exp_avg_sq, which the optimizer does not keep here$", told())
    shutil.rmtree(tmp_path)
    processes.run(1, run, "gpt2", make_plan("gpt2", dp=1, pp=1), ADAMW, tmp_path, None, ENDS_AFTER)
    folder = tmp_path / f"iteration-{ENDS_AFTER:08d}"
    assert f"{folder}: it belongs to another model: it lacks the parameter " in told("t5")
    assert told(optimizer=SGD) == f"{folder}: it was trained with optimizer adamw; this training has sgd"
    assert told(global_batch=16) == f"{folder}: it was trained with global batch 8; this training has 16"
    assert told(seed=6) == f"{folder}: it was trained with seed 5; this training has 6"
    (file,) = folder.glob("rank-*")
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    assert f"{file}: it has {len(content) - 1} bytes, but {len(content)} were written; remove {folder} to" in told()
    file.write_bytes(bytes(len(content)))
    assert re.match(rf"{file}: \S+ cannot be read: ", told())
    index = folder / "checkpoint.json"
    text = index.read_text()
    index.write_text(text.replace('"version": 2', '"version": 1'))
    assert f"{index}: it has version 1, and this version of auto3d reads version 2; remove {folder}" in told()
    index.write_text(text[:-9])
    assert f"{index}: it is damaged; remove {folder} to continue from an earlier one" in told()
    shutil.rmtree(tmp_path)
    tmp_path.touch()
    assert told() == f"{tmp_path}: checkpoints cannot be read from it: Not a directory"


@pytest.mark.parametrize("shard_optimizer", [*soak(False), True])
def test_each_shard_is_written_once_and_read_back_to_the_bit(processes, tmp_path, shard_optimizer):
    plan = make_plan("gpt2-dropout", dp=1, tp=2, pp=2, shard_optimizer=shard_optimizer)
    whole = processes.run(4, run, "gpt2-dropout", plan, ADAMW, tmp_path / "whole", ITERATIONS, None)
    first = processes.run(4, run, "gpt2-dropout", plan, ADAMW, tmp_path / "parts", None, ENDS_AFTER)
    second = processes.run(4, run, "gpt2-dropout", plan, ADAMW, tmp_path / "parts", ITERATIONS, None)
    assert first[0].loss + second[0].loss == whole[0].loss
    assert first[0].grad_norm + second[0].grad_norm == whole[0].grad_norm
    one, other = (tensors(tmp_path / name, ITERATIONS) for name in ("whole", "parts"))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name
    graph = captured("gpt2-dropout", 2).graph
    for name, value in {**graph.parameters, **graph.buffers}.items():
        assert one.pop(f"model.{name}").shape == value.shape
    assert all(name.startswith("optimizer.") for name in one)
    files = (tmp_path / "whole" / f"iteration-{ITERATIONS:08d}").glob("*.safetensors")
    stored = sum(file.stat().st_size for file in files)
    assert stored < 1.1 * sum(tensor.nbytes for tensor in tensors(tmp_path / "whole", ITERATIONS).values())
