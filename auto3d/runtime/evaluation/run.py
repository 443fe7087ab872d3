"""Evaluation and prediction between two iterations of a training, with its weights where they are.

The model runs in evaluation mode, in the stages of the training's Plan, each on the ranks that hold its weights. It
keeps no activations, and the training afterwards goes on as if there had been none.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.distributed as dist

from auto3d.capture.model import CapturedModel
from auto3d.data import TrainingData
from auto3d.errors import InputError
from auto3d.partition.evaluation import stages_in_evaluation
from auto3d.plan import NO_OVERLAP, Plan
from auto3d.runtime.agreement import check_same_plan
from auto3d.runtime.evaluation.loss import EvaluationLoss, ForwardLoss
from auto3d.runtime.evaluation.output import Output
from auto3d.runtime.evaluation.state import check_state, first_pipelines_buffers
from auto3d.runtime.layout import lay_out_plan, lay_out_rank, schedules_of
from auto3d.runtime.messages.exchange import Exchange
from auto3d.runtime.messages.gathered import of_all_ranks
from auto3d.runtime.messages.tensor_group import TensorParallelRank
from auto3d.runtime.randomness import Randomness
from auto3d.runtime.rank import Rank, inputs_of
from auto3d.runtime.samples.inputs import MicroBatchInputs
from auto3d.runtime.stage.build import computation_of
from auto3d.runtime.stage.program import ProgramOfStage
from auto3d.runtime.training import Training
from auto3d.runtime.waiting import waiting_for
from auto3d.runtime.weights.low_precision import with_copies
from auto3d.schedule import without_slices
from auto3d.schedule.check import check
from auto3d.schedule.forward_only import forward_only
from auto3d.schedule.lowering import lower
from auto3d.schedule.program import Message


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """The same on every rank."""

    loss: float | None  # mean over all targets, or over all samples where the loss counts no targets; None: no loss
    outputs: dict[str, torch.Tensor]  # on the CPU, [samples, …] in the order of the samples; floats are float32
    losses: tuple[float, ...] = ()
    """The mean over each micro-batch, in the order of the samples. It is NaN for one without targets, and for one that
    has targets for different fractions of the places of several terms."""
    targets: tuple[float, ...] = ()
    """What each of ``losses`` is a mean of: targets of the first term that counts them, with their class weights, or
    samples where none does."""
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)  # those asked for, as the stages have read them


def evaluate(
    training: Training,
    data: TrainingData,
    *,
    samples: int,
    outputs: Sequence[str] = (),
    inputs: Sequence[str] = (),
    loss: bool = True,
    at_once: int | None = None,
    alike: bool = False,
) -> EvaluationResult:
    """Run the first ``samples`` of ``data`` through the model of ``training`` as it is now, in evaluation mode.

    ``outputs`` names entries of the model's result, and ``inputs`` inputs of its stages, both to return. Without
    ``loss`` there is none, and ``data`` needs no inputs that only the loss uses. All ranks must call this with the same
    arguments, where the training is ``flushed``. The data are asked for whole global batches, of which those samples
    count that are among the first ``samples``. A forward runs ``at_once`` samples; None: as many as in the training.
    With ``alike``, each forward's loss is the model's own, and all count the same however many targets they have; not
    where replicas of a stage share a forward, of which none knows the targets of the others.

    Raises InputError for what cannot be evaluated: emulated devices, an output that the model lacks or that does not
    have one entry per sample, and a model whose evaluation needs state that its training does not have.
    """
    assert training.flushed, "an evaluation comes between two iterations"
    if samples < 1:
        raise InputError(f"evaluation: found {samples} samples; it takes 1 or more")
    training.rank.executor.use_weights(evaluation=True)
    with _random_states_kept(training.rank.device):
        return _evaluation(training.rank, outputs, loss, at_once, alike).run(data, samples, inputs)


def prepare_evaluation(
    training: Training,
    *,
    outputs: Sequence[str] = (),
    loss: bool = True,
    at_once: int | None = None,
    alike: bool = False,
) -> set[str]:
    """Make what ``evaluate`` with these arguments needs of the model, and raise its errors, without data.

    Returns the names of the inputs that some stage reads.
    """
    with _random_states_kept(training.rank.device):
        return _evaluation(training.rank, outputs, loss, at_once, alike).inputs


def _evaluation(rank: Rank, outputs: Sequence[str], loss: bool, at_once: int | None, alike: bool) -> "_Evaluation":
    if not (loss or outputs):
        raise InputError("evaluation: found neither a loss nor outputs to compute; it takes at least one")
    key = tuple(outputs), loss, at_once, alike
    if key not in rank.evaluations:
        rank.evaluations[key] = _Evaluation(rank, outputs, loss=loss, at_once=at_once, alike=alike)
    evaluation: _Evaluation = rank.evaluations[key]
    return evaluation


def evaluation_of(
    captured: CapturedModel,
    plan: Plan,
    outputs: Sequence[str] = (),
    *,
    loss: bool = True,
    at_once: int | None = None,
) -> Plan:
    """``plan`` as an evaluation runs it, with the stages of the model in evaluation mode, of ``at_once`` samples.

    Ranks that are forked after this inherit the capture.
    """
    before = captured.graph.micro_batch_size
    model = captured.in_evaluation(outputs, loss=loss).at(at_once or before)
    state = {*model.graph.parameters, *model.graph.buffers}
    return replace(
        without_slices(plan),
        micro_batch_size=plan.micro_batch_size * model.graph.micro_batch_size // before,
        global_batch=plan.global_batch * model.graph.micro_batch_size // before,
        graph=model.graph.fingerprint,
        stages=stages_in_evaluation(plan.stages, captured.graph, model.graph),
        split={name: split for name, split in plan.split.items() if name in state},
        tensor_overlap=NO_OVERLAP,
    )


class _Evaluation:
    """What one rank needs to evaluate, made once: the stages in evaluation mode, their program and its messages."""

    def __init__(self, rank: Rank, outputs: Sequence[str], *, loss: bool, at_once: int | None, alike: bool) -> None:
        common, settings = rank.common, replace(rank.common.settings, iterations=1)
        if settings.emulation is not None:
            raise InputError("evaluation: found emulated devices, which compute nothing; it takes real ones")
        self._rank = rank
        captured = common.captured
        plan = evaluation_of(captured, common.plan, outputs, loss=loss, at_once=at_once)
        model = captured.in_evaluation(outputs, loss=loss).at(at_once or captured.graph.micro_batch_size)
        schedule = forward_only(schedules_of(plan, 1)[0])
        check(schedule)
        common_layout = lay_out_plan(model, plan, settings, schedule, read_once=common.read_once)
        layout = lay_out_rank(common_layout, dist.get_rank())
        check_state(rank.layout, layout)
        check_same_plan(plan)
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
            groups=rank.exchange.groups,
        )
        graph = layout.captured.graph
        self._loss = EvaluationLoss(model.exported, layout) if loss else None
        self._outputs = [Output.of(name, value, model, layout) for name, value in graph.outputs.items()]
        randomness = Randomness(
            plan.seed,
            first_micro_batch=layout.first_micro_batch,
            micro_batches=layout.micro_batches,
            replica=layout.replica,
            replicas=layout.replicas,
            device=rank.device,
        )
        tensor = None
        if layout.derived is not None:
            assert rank.tensor_group is not None
            tensor = TensorParallelRank(model=layout.derived, group=rank.tensor_group)
        constants = layout.captured.exported.constants
        used = {name for stage in layout.stages.values() for name in stage.state}
        alike = alike and layout.replicas == 1
        terms = tuple(replace(term, is_alike=alike) for term in layout.target_terms) if loss else ()
        self._constants = {name: value.to(rank.device) for name, value in constants.items() if name in used}
        self._computations = {
            pipe_stage: computation_of(
                ProgramOfStage(stage, layout.captured, tensor),
                randomness=randomness,
                terms=terms,
            )
            for pipe_stage, stage in layout.stages.items()
        }

    @property
    def inputs(self) -> set[str]:
        return {name for stage in self._layout.model_stages for name in stage.inputs}

    def run(self, data: TrainingData, samples: int, returned: Sequence[str]) -> EvaluationResult:
        global_batch = self._layout.plan.global_batch
        if self._loss is not None:
            self._loss.check_samples(samples)
        inputs = inputs_of(self._layout, data, self._rank.device, trains=False)
        state = self._state()
        memory = {output.name: output.memory(self._layout.micro_batches, self._rank.device) for output in self._outputs}
        read = _ReadInputs(returned)
        batches, shares = [], []
        try:
            for number in range(-(-samples // global_batch)):
                present = samples - number * global_batch
                batches.append(self._global_batch(inputs, state, memory, number, present, read))
                shares.append(inputs.share(number))
            self._check_read(inputs, shares)
        finally:
            inputs.end()
        outputs = {
            output.name: torch.cat([tensors[output.name] for _, tensors in batches])[:samples].to(output.dtype)
            for output in self._outputs
        }
        inputs_read = read.of_all_ranks(samples)
        if self._loss is None:
            return EvaluationResult(loss=None, outputs=outputs, inputs=inputs_read)
        rows = torch.cat([rows for rows, _ in batches])
        loss, losses = self._loss.total(rows, samples)
        targets = self._loss.targets(rows, samples)
        return EvaluationResult(loss=loss, outputs=outputs, losses=losses, targets=targets, inputs=inputs_read)

    def _check_read(self, inputs: MicroBatchInputs, shares: Sequence[int]) -> None:
        """Raise InputError, on every rank, unless all stages have read the same samples of each global batch.

        ``shares`` is what this rank adds to the sums of the global batches.
        """
        totals = of_all_ranks(shares, torch.float64, what="what all ranks have read")
        for number, total in enumerate(totals.sum(dim=0).tolist()):
            where = f"evaluation, global batch {number + 1}"
            inputs.check(number, total, where=where, together=True)

    def _state(self) -> dict[str, torch.Tensor]:
        """The parameters and buffers that the stages use, with their copies in low precision; what a forward writes to
        is copied, the rest is not."""
        rank, written = self._rank, self._layout.captured.graph.written_buffers
        buffers = rank.buffers | first_pipelines_buffers(rank.buffers, rank.layout, self._layout)
        state = {**rank.parameters, **buffers, **self._constants}
        state = {name: tensor.clone() if name in written else tensor for name, tensor in state.items()}
        return with_copies(state, self._layout.captured)

    def _global_batch(
        self,
        inputs: MicroBatchInputs,
        state: dict[str, torch.Tensor],
        memory: dict[str, torch.Tensor],
        number: int,
        samples: int,
        read: "_ReadInputs",
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The losses of global batch ``number``, of which the first ``samples`` count, and its outputs, on every rank.

        The losses are rows of ``EvaluationLoss``. The outputs that this rank makes come to ``memory``, [micro-batches,
        …] each, the inputs that it reads to ``read``.
        """
        rank, layout = self._rank, self._layout
        own = number * layout.plan.global_batch + layout.replica * (layout.samples // layout.replicas)
        losses: dict[int, ForwardLoss] = {}
        made: dict[str, set[int]] = {output.name: set() for output in self._outputs}
        inputs.start(self._program, {pipe_stage: stage.inputs for pipe_stage, stage in layout.stages.items()}, number)
        self._exchange.start()
        for step in self._program.steps:
            operation = step.operation
            rank.run_ahead.begin(f"in the evaluation at {operation} of stage {operation.stage}")
            for message in step.begins:
                assert isinstance(message, Message)  # a forward-only program has no sums
                self._exchange.post(message)
            arrived = self._exchange.receive_for(step)
            pipe_stage = operation.stage, operation.pipe
            stage, computation = layout.stages[pipe_stage], self._computations[pipe_stage]
            for micro_batch in operation.micro_batches:
                received = {name: tensor for name, (tensor,) in arrived.get(micro_batch, {}).items()}
                loaded = inputs.of(micro_batch, stage)
                first = own + (layout.first_micro_batch + micro_batch) * layout.samples
                read.add(first, loaded)
                with torch.no_grad():  # a pass then keeps nothing for a backward
                    values = {**loaded, **computation.forward(micro_batch, state, {**loaded, **received})}
                sent = {transfer.value.name: values[transfer.value.name].contiguous() for transfer in stage.sent}
                self._exchange.send_from(step, micro_batch, sent)
                if self._loss is not None and stage.has_loss:
                    losses[micro_batch] = ForwardLoss(
                        loss=values[layout.captured.graph.loss],
                        counts=computation.targets.take(),
                        padding_counts=self._loss.padding_counts({**loaded, **received}, micro_batch, samples),
                    )
                for output in self._outputs:
                    if output.stage == stage.index:
                        memory[output.name][micro_batch].copy_(values[output.value], non_blocking=True)
                        made[output.name].add(micro_batch)
            rank.run_ahead.end()
        self._exchange.end()
        rank.run_ahead.catch_up()
        rows = torch.empty(0) if self._loss is None else self._loss.of_all_ranks(losses)
        return rows, {
            output.name: output.of_all_ranks(memory[output.name], made[output.name], layout) for output in self._outputs
        }


class _ReadInputs:
    """Inputs called ``names`` that the stages of this rank have read, by their first sample."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._read: dict[int, dict[str, torch.Tensor]] = {}

    def add(self, first: int, inputs: Mapping[str, torch.Tensor]) -> None:
        """Keep what was read of the samples from number ``first`` on."""
        kept = {name: inputs[name] for name in self._names if name in inputs}
        self._read.setdefault(first, {}).update(kept)  # on the device: the host need not wait for it here

    def of_all_ranks(self, samples: int) -> dict[str, torch.Tensor]:
        """The inputs of the first ``samples``, each [samples, …], on every rank; without what no stage reads."""
        if not self._names:
            return {}
        mine = {first: {name: value.cpu() for name, value in inputs.items()} for first, inputs in self._read.items()}
        gathered: list[dict[int, dict[str, torch.Tensor]]] = [{}] * dist.get_world_size()
        with waiting_for("the inputs that all ranks have read"):
            dist.all_gather_object(gathered, mine)
        parts: dict[str, dict[int, torch.Tensor]] = {name: {} for name in self._names}
        for of_rank in gathered:
            for first, inputs in of_rank.items():
                for name, tensor in inputs.items():
                    parts[name][first] = tensor
        return {
            name: torch.cat([rows for _, rows in sorted(slices.items())])[:samples]
            for name, slices in parts.items()
            if slices
        }


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
