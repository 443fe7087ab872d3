"""An evaluation between two iterations of a training gives what the plain module gives, and leaves no trace."""

from collections.abc import Collection
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from auto3d.capture.shard import joined
from auto3d.capture.skeleton import seed_all
from auto3d.data import Batches, BatchSlice, Reading
from auto3d.errors import InputError
from auto3d.partition.methods.uniform import uniform
from auto3d.partition.stage import cut
from auto3d.plan import Plan
from auto3d.runtime.evaluation.run import EvaluationResult, evaluate, evaluation_of
from auto3d.runtime.layout import schedules_of
from auto3d.runtime.process.world import World, leave
from auto3d.runtime.replicas import capture_slices
from auto3d.runtime.settings import TrainingSettings
from auto3d.runtime.training import Training
from auto3d.schedule import build_schedule, samples_at_once
from tests.distributed.found_orders import BY_NAME
from tests.distributed.parity import ADAMW, assert_close, make_plan
from tests.models import SEQUENCE, TEXT, TRAINED, captured
from tests.soak import soak

AT = 1  # iterations before the evaluation
ITERATIONS = 3


@dataclass(frozen=True, kw_only=True)
class Case:
    model: str
    dp: int = 1
    tp: int = 1
    pp: int = 2
    micro_batches: int = 4
    schedule: str = "1f1b"
    options: dict = field(default_factory=dict)
    replicas: int = 1
    outputs: tuple[str, ...] = ("logits",)
    more: dict = field(default_factory=dict)  # further fields of the plan

    def __str__(self) -> str:
        return f"{self.model}-dp{self.dp}-tp{self.tp}-pp{self.pp}-{self.schedule}"


CASES = [
    Case(model="resnet-transformers", pp=2, schedule="chimera"),
    Case(model="llama", pp=4, schedule="pipedream", options={"iterations": 2}),
    Case(model="bert-dropout", **BY_NAME["two-way-2-recompute"].choices),
    Case(model="gpt2-4-heads-dropout", schedule="seq1f1b", options={"slices": 2}),
    Case(model="gpt2-4-heads-dropout", tp=2, more={"sequence_parallel": True, "tensor_overlap": "sub-pipelined"}),
    *soak(
        Case(model="residual", dp=2, outputs=()),
        Case(model="gpt2-4-heads-dropout", tp=2, more={"sequence_parallel": True}),
        Case(model="bert-4-heads-dropout", tp=2, more={"tensor_overlap": "sub-pipelined"}),
        Case(model="t5-dropout", schedule="interleaved-1f1b", options={"chunks": 2}),
        Case(model="gpt2-dropout", dp=2),
        Case(model="bert-dropout", pp=4, schedule="chimera"),
        Case(model="resnet-transformers", dp=2),
        Case(model="vit-dropout", schedule="zb-v"),
        Case(model="t5-dropout", **BY_NAME["v-4-recompute"].choices),
        Case(model="t5-dropout", dp=2, schedule="gpipe"),
        Case(model="gpt2-4-heads-dropout", tp=2),
    ),
]


def plan_of(case: Case) -> Plan:
    shape = build_schedule(case.schedule, devices=case.pp, micro_batches=case.micro_batches, **case.options)
    return make_plan(
        case.model,
        dp=case.dp,
        tp=case.tp,
        pp=case.pp,
        micro_batches=case.micro_batches,
        micro_batch_size=2 * shape.sample_parts,
        schedule=case.schedule,
        options=case.options,
        stages=uniform(captured(case.model, 2).graph, shape.stages),
        **case.more,
    )


def capture_before_forks(case: Case, plan: Plan, *, loss: bool = True) -> None:
    model = captured(case.model, samples_at_once(plan))
    capture_slices(model.in_evaluation(case.outputs, loss=loss), evaluation_of(model, plan, case.outputs, loss=loss))


def run_rank(world: World, case: Case, plan: Plan, samples: int) -> dict:
    """Train with an evaluation after AT iterations, or without one if ``samples`` is 0."""
    clip_norm = 0.0 if case.schedule == "pipedream" else 0.1
    settings = TrainingSettings(
        iterations=ITERATIONS,
        optimizer=replace(ADAMW, clip_norm=clip_norm),
        device="cpu",
        threads_per_rank=1,
        timeout_s=60,
    )
    data = TRAINED[case.model][1]
    found: dict = {"losses": []}
    try:
        training = Training(captured(case.model, samples_at_once(plan)), plan, settings, data, world)
        rank = training.rank
        for number, result in training.iterations():
            found["losses"].append(result.loss)
            if training.flushed and samples and "evaluations" not in found and number + 1 >= AT:
                found["state"] = {
                    name: t.detach().clone().numpy() for name, t in (rank.parameters | rank.buffers).items()
                }
                found["split"] = {name: shard.split for name, shard in rank.shards.items()}
                with torch.autograd.graph.saved_tensors_hooks(_refuse, _refuse):
                    found["evaluations"] = [
                        evaluate(training, data, samples=samples, outputs=case.outputs) for _ in range(2)
                    ]
        found["end"] = {name: part.tensor.detach().clone().numpy() for name, part in rank.state().items()}
    finally:
        leave()
    return found


def _refuse(tensor: torch.Tensor) -> None:
    raise AssertionError("an evaluation keeps an activation")


def state_of(ranks: list[dict], case: Case, plan: Plan) -> dict[str, torch.Tensor]:
    """The model's state as the first pipeline and the first pipe have it."""
    state: dict[str, torch.Tensor] = {}
    graph = captured(case.model, samples_at_once(plan)).graph
    device_of = schedules_of(plan, 1)[0].device_of
    for stage in cut(graph, plan.stages):
        shards = [ranks[rank] for rank in plan.placement[device_of[stage.index, 0]][: plan.tp]]
        for name in set(stage.state) - set(graph.constants):
            split = shards[0]["split"].get(name)
            tensors = [torch.from_numpy(shard["state"][name]) for shard in shards]
            state[name] = tensors[0] if split is None else joined(tensors, split)
    return state


def plainly(case: Case, plan: Plan, state: dict[str, torch.Tensor], samples: int) -> EvaluationResult:
    """The reference: the unmodified module in evaluation mode."""
    build, data = TRAINED[case.model]
    module = build()
    module.load_state_dict(state, strict=False)
    module.eval()
    size = samples_at_once(plan)
    batches = Batches(data, seed=plan.seed, global_batch=plan.global_batch, micro_batch_size=size)
    losses, outputs = [], []
    with torch.no_grad():
        for number in range(samples // size):
            iteration, index = divmod(number, plan.global_batch // size)
            output = module(**batches.micro_batch(iteration, index, tuple(data.inputs)))
            losses.append((output if isinstance(output, torch.Tensor) else output["loss"]).item())
            outputs += [output[name] for name in case.outputs]
    return EvaluationResult(
        loss=float(np.mean(losses)), outputs={name: torch.cat(outputs) for name in case.outputs}, losses=tuple(losses)
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_equals_the_plain_module_and_leaves_no_trace(processes, case):
    plan = plan_of(case)
    capture_before_forks(case, plan)
    samples = plan.global_batch + 2 * samples_at_once(plan)  # a last global batch that counts in part
    ranks = processes.run(plan.ranks, run_rank, case, plan, samples)
    expected = plainly(case, plan, state_of(ranks, case, plan), samples)
    for rank in ranks:
        for result in rank["evaluations"]:
            assert_close(np.array(result.losses), np.array(expected.losses), "losses")
            assert result.loss == pytest.approx(expected.loss, rel=1e-5)
            assert result.outputs.keys() == expected.outputs.keys()
            for name, value in expected.outputs.items():
                assert result.outputs[name].shape == value.shape
                assert_close(result.outputs[name].numpy(), value.numpy(), name)
        for name, value in ranks[0]["evaluations"][0].outputs.items():
            assert torch.equal(rank["evaluations"][1].outputs[name], value), "every rank has the same bits, both times"

    for with_one, without in zip(ranks, processes.run(plan.ranks, run_rank, case, plan, 0), strict=True):
        assert with_one["losses"] == without["losses"]
        for name, value in without["end"].items():
            np.testing.assert_array_equal(with_one["end"][name], value, name)


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """Text whose labels are partly ignored; all of samples from number ``samples`` on, if that is given."""

    samples: int | None = None
    has_labels: bool = True
    may_ignore_targets: bool = True
    incomplete: None = None
    lengths: None = None
    read_once: bool = False
    is_by_position: bool = True
    is_read_anew: bool = False

    def begins_epoch(self, iteration: int) -> bool:
        return False

    def reads(self, names: Collection[str]) -> bool:
        return bool(names)

    def micro_batches(self, part: BatchSlice) -> "LabelledBatches":
        return LabelledBatches(self, part)


class LabelledBatches:
    def __init__(self, data: Labelled, part: BatchSlice) -> None:
        self._data, self._part = data, part
        self._text = TEXT.micro_batches(part)

    def read(self, iteration: int, index: int, names: Collection[str]) -> Reading:
        reading = self._text.read(iteration, index, names)
        made = reading.inputs
        if "labels" in names:
            assert self._data.has_labels
            size = self._part.micro_batch_size // self._part.replicas
            first = iteration * self._part.global_batch + index * self._part.micro_batch_size
            for row, labels in enumerate(made["labels"]):
                sample = first + self._part.replica * size + row
                labels[: 3 * sample % SEQUENCE] = -100
                if self._data.samples is not None and sample >= self._data.samples:
                    labels[:] = -100
        return reading

    def fingerprints(self, iteration: int, index: int, replica: int | None = None) -> np.ndarray | None:
        return self._text.fingerprints(iteration, index, replica)


def evaluate_rank(world: World, case: Case, plan: Plan, samples: int) -> dict:
    """The result of each call, or the error that it raised."""
    settings = TrainingSettings(iterations=1, optimizer=ADAMW, device="cpu", threads_per_rank=1, timeout_s=60)
    calls: dict[str, tuple[Labelled, dict]] = {
        "all": (Labelled(samples=samples), {"samples": samples}),
        "padded": (Labelled(), {"samples": samples}),
        "prediction": (Labelled(has_labels=False), {"samples": samples, "outputs": ("logits",), "loss": False}),
        "no samples": (Labelled(), {"samples": 0}),
        "nothing": (Labelled(), {"samples": 1, "loss": False}),
        "unknown": (Labelled(), {"samples": 1, "outputs": ("answers",)}),
        "not per sample": (Labelled(), {"samples": 2, "outputs": ("loss",)}),
    }
    found: dict = {}
    try:
        training = Training(captured(case.model, samples_at_once(plan)), plan, settings, Labelled(), world)
        for name, (data, arguments) in calls.items():
            if name == "unknown" and world.rank:
                continue  # a capture that fails is tried in several ways, and ends before ranks meet
            try:
                found[name] = evaluate(training, data, **arguments)
            except InputError as error:
                found[name] = str(error)
    finally:
        leave()
    return found


@pytest.mark.parametrize("case", [Case(model="gpt2", dp=2), *soak(Case(model="gpt2-4-heads", tp=2))], ids=str)
def test_a_last_batch_in_part_targets_that_are_ignored_and_predictions(processes, case):
    plan = plan_of(case)
    capture_before_forks(replace(case, outputs=()), plan)
    capture_before_forks(case, plan, loss=False)
    captured(case.model, samples_at_once(plan)).in_evaluation(("loss",))  # what the ranks look at and refuse
    samples = plan.global_batch + 2 * samples_at_once(plan) + 1
    ranks = processes.run(plan.ranks, evaluate_rank, case, plan, samples)
    seed_all(plan.seed)
    module = TRAINED[case.model][0]()
    module.eval()
    everything = Labelled().micro_batches(BatchSlice(seed=plan.seed, global_batch=samples, micro_batch_size=samples))
    with torch.no_grad():
        expected = module(**everything.read(0, 0, ("input_ids", "labels")).inputs)
    assert "gives no output answers" in ranks[0]["unknown"]
    for found in ranks:
        assert found["all"].loss == pytest.approx(expected["loss"].item(), rel=1e-5)
        assert np.isfinite(found["all"].losses).all()
        assert len(found["all"].losses) == -(-samples // samples_at_once(plan))
        assert found["prediction"].loss is None
        assert_close(found["prediction"].outputs["logits"].numpy(), expected["logits"].numpy(), "logits")
        assert "labels of later ones" in found["padded"]
        assert "0 samples" in found["no samples"]
        assert "neither a loss nor outputs" in found["nothing"]
        assert "one entry per sample" in found["not per sample"]
