"""Evaluation and prediction between two iterations of a training, with its weights where they are.

The model runs in evaluation mode, in the stages of the training's Plan, each on the ranks that hold its weights. It
keeps no activations, and the training afterwards goes on as if there had been none.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from auto3d.capture.model import CapturedModel
from auto3d.capture.shard import Shard
from auto3d.data import TrainingData
from auto3d.errors import InputError
from auto3d.partition.evaluation import stages_in_evaluation
from auto3d.partition.samples import made_from_samples
from auto3d.plan import NO_OVERLAP, Plan, PlanError
from auto3d.runtime.exchange import Exchange
from auto3d.runtime.forward_stage import ForwardStage
from auto3d.runtime.inputs import MicroBatchInputs
from auto3d.runtime.layout import RankLayout, lay_out_plan, lay_out_rank, schedules_of
from auto3d.runtime.randomness import Randomness
from auto3d.runtime.rank import Rank, inputs_of
from auto3d.runtime.tensor_group import TensorParallelRank
from auto3d.runtime.training import Training
from auto3d.runtime.waiting import waiting_for
from auto3d.schedule.check import check
from auto3d.schedule.forward_only import forward_only
from auto3d.schedule.lowering import lower
from auto3d.schedule.program import Message
from auto3d.tensor_placement import PlacementKind, TensorPlacement


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """The same on every rank."""

    loss: float | None  # mean over the samples; None if it was not asked for
    outputs: dict[str, torch.Tensor]  # on the CPU, [samples, …] in the order of the samples; floats are float32
    losses: tuple[float, ...] = ()  # mean over each micro-batch, in the order of the samples


def evaluate(
    training: Training, data: TrainingData, *, samples: int, outputs: Sequence[str] = (), loss: bool = True
) -> EvaluationResult:
    """Run the first ``samples`` of ``data`` through the model of ``training`` as it is now, in evaluation mode.

    ``outputs`` names entries of the model's result. Without ``loss`` there is none, and ``data`` needs no inputs that
    only the loss uses. All ranks must call this with the same arguments, where the training is ``flushed``. The data
    are asked for whole global batches, of which those samples count that are among the first ``samples``.

    Raises InputError for what cannot be evaluated: emulated devices, an output that the model lacks or that does not
    have one entry per sample, and a model whose evaluation needs state that its training does not have.
    """
    assert training.flushed, "an evaluation comes between two iterations"
    if samples < 1:
        raise InputError(f"evaluation: found {samples} samples; it takes 1 or more")
    if not (loss or outputs):
        raise InputError("evaluation: found neither a loss nor outputs to compute; it takes at least one")
    rank = training.rank
    with _random_states_kept(rank.device):
        key = tuple(outputs), loss
        if key not in rank.evaluations:
            rank.evaluations[key] = _Evaluation(rank, outputs, loss=loss)
        return rank.evaluations[key].run(data, samples)


def evaluation_of(captured: CapturedModel, plan: Plan, outputs: Sequence[str] = (), *, loss: bool = True) -> Plan:
    """``plan`` as an evaluation runs it, with the stages of the model in evaluation mode.

    Ranks that are forked after this inherit the capture.
    """
    model = captured.in_evaluation(outputs, loss=loss)
    state = {*model.graph.parameters, *model.graph.buffers}
    return replace(
        plan,
        graph=model.graph.fingerprint,
        stages=stages_in_evaluation(plan.stages, captured.graph, model.graph),
        split={name: split for name, split in plan.split.items() if name in state},
        tensor_overlap=NO_OVERLAP,
    )


class _Evaluation:
    """What one rank needs to evaluate, made once: the stages in evaluation mode, their program and its messages."""

    def __init__(self, rank: Rank, outputs: Sequence[str], *, loss: bool) -> None:
        common, settings = rank.common, replace(rank.common.settings, iterations=1)
        if settings.emulation is not None:
            raise InputError("evaluation: found emulated devices, which compute nothing; it takes real ones")
        self._rank = rank
        plan = evaluation_of(common.captured, common.plan, outputs, loss=loss)
        model = common.captured.in_evaluation(outputs, loss=loss)
        schedule = forward_only(schedules_of(common.plan, 1)[0])
        check(schedule)
        layout = lay_out_rank(lay_out_plan(model, plan, settings, schedule), dist.get_rank())
        _check_state(rank.layout, layout)
        self._layout = layout
        self._program = lower(schedule, layout.transfers)[layout.device]
        self._exchange = Exchange(
            self._program,
            layout.transfers,
            ranks_of=layout.peers,
            device_of=schedule.device_of,
            sample_dimensions=layout.sample_dimensions,
            device=rank.device,
            run_ahead=rank.run_ahead,
            timeout_s=settings.timeout_s,
            groups=rank.exchange.groups,
        )
        self._timeout_s = settings.timeout_s
        graph = layout.captured.graph
        self._loss = graph.loss if loss else None
        self._outputs = [_Output.of(name, value, model, layout) for name, value in graph.outputs.items()]
        randomness = Randomness(
            plan.seed,
            first_micro_batch=layout.first_micro_batch,
            micro_batches=layout.micro_batches,
            replica=layout.replica,
            replicas=layout.replicas,
            device=rank.device,
        )
        tensor = None
        if layout.tensor is not None:
            assert rank.tensor_group is not None
            tensor = TensorParallelRank(model=layout.tensor, group=rank.tensor_group)
        constants = layout.captured.exported.constants
        used = {name for stage in layout.stages.values() for name in stage.state}
        self._constants = {name: value.to(rank.device) for name, value in constants.items() if name in used}
        self._stages = {
            pipe_stage: ForwardStage(
                stage,
                layout.captured,
                kept={output.value for output in self._outputs if output.stage == stage.index}
                | ({graph.loss} if loss and stage.has_loss else set()),
                randomness=randomness,
                device=rank.device,
                tensor=tensor,
            )
            for pipe_stage, stage in layout.stages.items()
        }

    def run(self, data: TrainingData, samples: int) -> EvaluationResult:
        global_batch, at_once = self._layout.plan.global_batch, self._layout.samples
        if self._loss is not None and samples % at_once:
            raise InputError(
                f"evaluation: found {samples} samples; with a loss it takes a multiple of {at_once}, the samples that "
                "run at once"
            )
        inputs = inputs_of(self._layout, data, self._rank.device)
        state = self._state()
        memory = {each.name: each.memory(self._layout.micro_batches, self._rank.device) for each in self._outputs}
        batches = [self._global_batch(inputs, state, memory, batch) for batch in range(-(-samples // global_batch))]
        inputs.end()
        outputs = {
            output.name: torch.cat([tensors[output.name] for _, tensors in batches])[:samples].to(output.dtype)
            for output in self._outputs
        }
        if self._loss is None:
            return EvaluationResult(loss=None, outputs=outputs)
        losses = torch.cat([each for each, _ in batches])[: samples // at_once]
        return EvaluationResult(loss=float(losses.mean()), outputs=outputs, losses=tuple(losses.tolist()))

    def _state(self) -> dict[str, torch.Tensor]:
        """The parameters and buffers that the stages use, without copies, except of what a forward writes to."""
        rank, written = self._rank, self._layout.captured.graph.written_buffers
        state = {**rank.parameters, **rank.buffers, **self._first_pipelines_buffers(), **self._constants}
        return {name: tensor.clone() if name in written else tensor for name, tensor in state.items()}

    def _first_pipelines_buffers(self) -> dict[str, torch.Tensor]:
        """Buffers that training writes to, such as batch statistics, as the first pipeline has them.

        Each pipeline writes to its own copy. All evaluate with one, or the result would depend on who runs a sample.
        """
        training, evaluation = self._rank.layout, self._layout
        used = {name for stage in evaluation.model_stages for name in stage.state}
        names = sorted(training.captured.graph.written_buffers & used)
        if not names:
            return {}
        home = {
            name: training.schedule.device_of[stage.index, 0]
            for stage in training.model_stages
            for name in stage.state
            if name in names
        }
        values = {name: training.captured.graph.buffers[name] for name in names}
        sizes = [int(np.prod(values[name].shape, dtype=int)) for name in names]
        everything = torch.zeros(training.plan.tp, sum(sizes), dtype=torch.float64)
        for name, place in zip(names, everything[training.shard].split(sizes), strict=True):
            if training.plan.placement[home[name]][training.shard] == dist.get_rank():
                place.copy_(self._rank.buffers[name].reshape(-1))
        with waiting_for("the buffers of the first pipeline", self._timeout_s):
            dist.all_reduce(everything)
        found = {}
        for name, place in zip(names, everything[training.shard].split(sizes), strict=True):
            if name in self._rank.buffers:
                own = self._rank.buffers[name]
                found[name] = place.reshape(own.shape).to(own.dtype).to(own.device)
        return found

    def _global_batch(
        self,
        inputs: MicroBatchInputs,
        state: dict[str, torch.Tensor],
        memory: dict[str, torch.Tensor],
        number: int,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The losses of all micro-batches of global batch ``number``, and its outputs, on every rank.

        The outputs that this rank makes come to ``memory``, [micro-batches, …] each.
        """
        rank = self._rank
        losses: dict[int, torch.Tensor] = {}
        inputs.start(self._program, {one: stage.stage.inputs for one, stage in self._stages.items()}, number)
        self._exchange.start()
        for step in self._program.steps:
            operation = step.operation
            rank.run_ahead.begin(f"in the evaluation at {operation} of stage {operation.stage}")
            for message in step.begins:
                assert isinstance(message, Message)  # a forward-only program has no sums
                self._exchange.post(message)
            arrived = self._exchange.receive_for(step)
            stage = self._stages[operation.stage, operation.pipe]
            for micro_batch in operation.micro_batches:
                received = {name: each for name, (each,) in arrived.get(micro_batch, {}).items()}
                loaded = inputs.of(micro_batch, stage.stage.inputs)
                sent, kept = stage.forward(micro_batch, state, received, loaded)
                self._exchange.send_from(step, micro_batch, sent)
                if self._loss is not None and self._loss in kept:
                    losses[micro_batch] = kept[self._loss]
                for output in self._outputs:
                    if output.value in kept:
                        memory[output.name][micro_batch].copy_(kept[output.value], non_blocking=True)
            rank.run_ahead.end()
        self._exchange.end()
        rank.run_ahead.catch_up()
        return self._all_losses(losses), {
            output.name: self._all_rows(output, memory[output.name], sorted(self._run_here(output)))
            for output in self._outputs
        }

    def _run_here(self, output: "_Output") -> set[int]:
        """The micro-batches whose ``output`` this rank makes."""
        return {
            micro_batch
            for step in self._program.steps
            for micro_batch in step.operation.micro_batches
            if step.operation.stage == output.stage
        }

    def _all_losses(self, losses: dict[int, torch.Tensor]) -> torch.Tensor:
        """The loss of each micro-batch of the global batch, over all replicas."""
        layout = self._layout
        everyones = torch.zeros(layout.plan.dp * layout.micro_batches, dtype=torch.float64)
        if layout.shard == 0:  # the others have computed the same
            for micro_batch, loss in losses.items():
                everyones[layout.first_micro_batch + micro_batch] = loss.item() / layout.replicas
        with waiting_for("the losses of all ranks", self._timeout_s):
            dist.all_reduce(everyones)
        return everyones

    def _all_rows(self, output: "_Output", local: torch.Tensor, micro_batches: Sequence[int]) -> torch.Tensor:
        """``output`` of the whole global batch; every element is written by one rank and zero on all others."""
        layout = self._layout
        whole = torch.zeros((layout.plan.global_batch, *output.shape[1:]), dtype=output.summed)
        rows = layout.samples // layout.replicas
        for micro_batch in micro_batches:
            first = (layout.first_micro_batch + micro_batch) * layout.samples + layout.replica * rows
            place = whole[first : first + rows]
            if output.placed.split is not None:
                Shard(output.placed.split, layout.shard, layout.plan.tp).put_back(local[micro_batch], place)
            elif layout.shard == 0 or output.placed.kind is PlacementKind.PARTIAL:
                place.copy_(local[micro_batch])
        with waiting_for(f"output {output.name} of all ranks", self._timeout_s):
            dist.all_reduce(whole)
        return whole


@dataclass(frozen=True, kw_only=True)
class _Output:
    """One output, as the stage that makes it has it for one micro-batch."""

    name: str
    value: str  # name of the value in the rank's program
    stage: int
    shape: tuple[int, ...]  # of the whole value
    local_shape: tuple[int, ...]  # of what this rank has of it
    dtype: torch.dtype  # of the result
    summed: torch.dtype  # in which it is gathered
    placed: TensorPlacement

    @staticmethod
    def of(name: str, value: str, model: CapturedModel, layout: RankLayout) -> "_Output":
        graph = layout.captured.graph
        whole = model.graph.value(model.graph.outputs[name])
        samples = model.graph.micro_batch_size
        if not whole.shape or whole.shape[0] != samples or whole.name not in made_from_samples(model.graph):
            raise InputError(
                f"evaluation: output {name} has shape {list(whole.shape)} for {samples} samples; an output needs one "
                "entry per sample along its first dimension"
            )
        maker = graph.nodes[graph.producer[value]].name
        dtype = getattr(torch, whole.dtype)
        return _Output(
            name=name,
            value=value,
            stage=next(stage.index for stage in layout.model_stages if maker in stage.nodes),
            shape=whole.shape,
            local_shape=graph.value(value).shape,
            dtype=torch.float32 if dtype.is_floating_point else dtype,
            summed=torch.float32 if dtype.is_floating_point else torch.int64,
            placed=layout.placement_of(value),
        )

    def memory(self, micro_batches: int, device: torch.device) -> torch.Tensor:
        """Memory on the host for what this rank makes in one global batch; a GPU copies to it without the host."""
        shape = (micro_batches, *self.local_shape)
        return torch.empty(shape, dtype=self.summed, pin_memory=device.type == "cuda")


def _check_state(training: RankLayout, evaluation: RankLayout) -> None:
    """Raise PlanError unless the evaluation holds the state of the rank's stages as training does."""
    held = {name for stage in training.stages.values() for name in stage.state}
    constants = evaluation.captured.exported.constants
    for stage in evaluation.stages.values():
        for name in stage.state:
            if name in constants:
                continue
            if name not in held or evaluation.placement_of(name).split != training.placement_of(name).split:
                raise PlanError(
                    f"stages: in evaluation stage {stage.index} needs {name} as training does not hold it; such a "
                    "model cannot be evaluated under this plan"
                )


@contextmanager
def _random_states_kept(device: torch.device) -> Iterator[None]:
    """Restore the random states of torch, numpy and Python at the end."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
