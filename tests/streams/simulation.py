"""Runs one schedule by the real Exchange, Executor and GradientSync on simulated devices."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from random import Random
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import nn

from auto3d.capture.graph import Value
from auto3d.conversions import CONVERSIONS
from auto3d.cost.memory.device import NOTHING
from auto3d.data import Reading
from auto3d.mesh import REPLICA, TENSOR, Mesh
from auto3d.partition.stage import Transfer
from auto3d.runtime import run_ahead, waiting
from auto3d.runtime.executor import Executor, IterationResult, Peers
from auto3d.runtime.messages import exchange, gradient_sync, slice_collectives, totals
from auto3d.runtime.messages.exchange import Exchange
from auto3d.runtime.messages.gradient_sync import GradientSync, Holders, holders
from auto3d.runtime.messages.totals import Totals
from auto3d.runtime.out_of_memory import MemoryWatch
from auto3d.runtime.process import world
from auto3d.runtime.process.world import connect
from auto3d.runtime.run_ahead import OPERATIONS_AHEAD, RunAhead
from auto3d.runtime.samples.inputs import MicroBatchInputs
from auto3d.runtime.settings import OptimizerSettings
from auto3d.schedule.lowering import lower
from auto3d.schedule.operation import Operation, Schedule
from auto3d.schedule.program import Program
from tests.streams.fake_distributed import FakeDistributed
from tests.streams.fake_stage import ELEMENTS, FakeOptimizer, FakeStage, Numbers
from tests.streams.machine import Machine, Record, current
from tests.streams.torch_on_device import fake_cuda, on_device

BLOCKS_OF_MESSAGES = 2  # blocks of a communication kernel; a compute kernel takes 1
SYNCHRONISE = ("never", "once", "steps", "sometimes", "calls")
PROGRAMS = 2  # programs that run one after the other
SAMPLES = 12  # samples in a micro-batch
NO_LIMIT = 1e9  # seconds
NO_CLIPPING = 1e30  # larger than any norm


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run to simulate.

    ``synchronise`` selects when hosts wait for all work of their device: one rank before one step (once), all ranks
    before all steps (steps), or before a tenth (sometimes) or all (calls) of the calls that enqueue communication or
    allocate memory. ``replicas`` has the number of replicas of each device's stages; empty means 1 each. With
    ``sharded`` optimizers each rank updates a slice of the weights that it shares.
    """

    schedule: Schedule
    skips: tuple[tuple[int, int], ...] = ()
    dp: int = 1
    replicas: tuple[int, ...] = ()
    sharded: bool = False
    tied: bool = False  # whether the first and the last stage share a parameter
    clip: bool = False
    queues: int = 8
    synchronise: str = "never"
    seed: int = 0

    def __str__(self) -> str:
        schedule = self.schedule
        sizes = f"{schedule.stages} stages, {schedule.devices} devices, {schedule.micro_batches} micro-batches"
        others = {name: value for name, value in vars(self).items() if name != "schedule"}
        return f"{schedule.name} ({sizes}) " + " ".join(f"{name}={value}" for name, value in others.items())

    @cached_property
    def counts(self) -> tuple[int, ...]:
        return self.replicas or (1,) * self.schedule.devices

    @cached_property
    def placement(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each device; the ranks of one pipeline are next to each other."""
        ends = list(accumulate(self.dp * count for count in self.counts))
        return tuple(tuple(range(end - self.dp * n, end)) for n, end in zip(self.counts, ends, strict=True))

    @cached_property
    def states(self) -> list[tuple[str, ...]]:
        """The parameters of each stage."""
        last = self.schedule.stages - 1
        return [
            (f"w{stage}", "tied") if self.tied and stage in (0, last) else (f"w{stage}",) for stage in range(last + 1)
        ]

    def transfers(self, count: int) -> list[Transfer]:
        """Transfers from each stage to the next, where one of two values has no gradient, and others that skip stages.

        Their shapes are those of a rank that is one of ``count`` replicas.
        """
        last = self.schedule.stages - 1
        passed = [Value(f"v{stage}", (SAMPLES // count,), "float64", 8, True) for stage in range(last)]
        indices = [Value(f"i{stage}", (SAMPLES // count,), "int64", 8, False) for stage in range(last)]
        pairs = [(stage, stage + 1) for stage in range(last)]
        return [
            *(Transfer(value=passed[a], source=a, target=b) for a, b in [*pairs, *self.skips]),
            *(Transfer(value=indices[a], source=a, target=b) for a, b in pairs),
        ]


def simulate(case: Case, change: Callable[[Program], Program] = lambda program: program) -> list[int]:
    """Run ``case`` with programs that ``change`` may alter first; raises whatever goes wrong.

    Returns, for each rank, the peak bytes of its messages.
    """
    schedule = case.schedule
    users: dict[str, list[int]] = {}
    for stage, state in enumerate(case.states):
        for name in state:
            users.setdefault(name, []).append(stage)
    all_holders = holders(
        SimpleNamespace(
            meshes=[Mesh(((REPLICA, len(ranks)), (TENSOR, 1)), ranks) for ranks in case.placement],
            gradient_sum=CONVERSIONS["reduce_scatter" if case.sharded else "reduce"],
        ),
        schedule,
        [SimpleNamespace(state=state) for state in case.states],
        set(users),
    )
    shared = {each.stages for each in all_holders.values() if len(each.ranks) > 1}
    programs = [change(program) for program in lower(schedule, case.transfers(1), shared)]
    replicas = {stage: case.counts[device] for (stage, _), device in schedule.device_of.items()}
    numbers = Numbers(schedule=schedule, pipelines=case.dp, users=users, replicas=replicas)
    ranks = sum(map(len, case.placement))
    machine = Machine(ranks, queues=case.queues, blocks=1, seed=case.seed)
    network = FakeDistributed(machine, blocks=BLOCKS_OF_MESSAGES, before_call=lambda: _before_call(case))

    def body(rank: int) -> list[list[IterationResult]]:
        with on_device(current(), lambda: _before_call(case)):
            return _run_rank(case, rank, programs, all_holders, numbers, network)

    with _patched(machine, network), fake_cuda():
        results = machine.run(body)
    for own in results:
        for number, program in enumerate(own):
            assert len(program) == schedule.iterations
            for iteration, result in enumerate(program):
                _check(result, numbers, number, iteration)
    for device, program in enumerate(programs):
        bound = bytes_of_messages(program, case, device)
        for rank in case.placement[device]:
            assert network.held_bytes[rank] <= bound, f"rank {rank} holds more messages than its program says"
    return network.held_bytes


def _run_rank(
    case: Case,
    rank: int,
    programs: Sequence[Program],
    holders: Mapping[str, Holders],
    numbers: Numbers,
    network: FakeDistributed,
) -> list[list[IterationResult]]:
    """Build the rank as ``build_rank`` does, with fake stages, and run its programs."""
    schedule, device = case.schedule, torch.device("cuda", rank)
    position = next(position for position, ranks in enumerate(case.placement) if rank in ranks)
    count, program = case.counts[position], programs[position]
    pipeline = case.placement[position].index(rank) // count
    transfers = case.transfers(count)
    own = [key for key, home in schedule.device_of.items() if home == position]

    ahead = RunAhead(device)
    everyone = network.new_group(range(network.get_world_size()))
    connect(everyone, device=device, what="all ranks")
    messages = Exchange(
        program,
        transfers,
        ranks_of=[
            ranks[pipeline * n : (pipeline + 1) * n] for ranks, n in zip(case.placement, case.counts, strict=True)
        ],
        device_of=schedule.device_of,
        sample_dimensions={transfer.value.name: 0 for transfer in transfers},
        device=device,
        run_ahead=ahead,
    )
    uses = Counter(name for stage, _ in own for name in case.states[stage])
    parameters = {name: nn.Parameter(torch.zeros(ELEMENTS, dtype=torch.float64)) for name in uses}
    private = [name for name in uses if uses[name] == 1 and len(holders[name].ranks) == 1]
    sync = GradientSync(
        parameters,
        holders,
        private=[] if schedule.weight_version else private,
        rules=dict.fromkeys(parameters, OptimizerSettings()),
        device=device,
        run_ahead=ahead,
    )
    sums = Totals(everyone, device=device, run_ahead=ahead)
    stages = {
        (stage, pipe): FakeStage(
            stage,
            pipe,
            pipeline,
            transfers=transfers,
            parameters={name: parameters[name] for name in case.states[stage]},
            numbers=numbers,
        )
        for stage, pipe in own
    }
    left = dict(parameters)
    optimizers = {}
    for key, stage in stages.items():
        mine = {name: left.pop(name) for name in case.states[key[0]] if name in left}
        shards = [shard for shard in sync.shards.values() if not shard.parameters.keys().isdisjoint(mine)]
        whole = {name: one for name, one in mine.items() if not any(name in shard.parameters for shard in shards)}
        optimizer = FakeOptimizer(stage, whole, shards, numbers)
        optimizers[key] = {OptimizerSettings(): (optimizer, SimpleNamespace(step=lambda: None))} if mine else {}
    network.connected[rank] = True
    micro_batches = schedule.micro_batches * schedule.parts
    runner = Executor(
        stages,
        optimizers,
        MicroBatchInputs(
            SimpleNamespace(read=lambda *_: Reading()),
            first_micro_batch=pipeline * micro_batches,
            micro_batches=micro_batches,
            device=device,
        ),
        Peers(exchange=messages, sync=sync, totals=sums, run_ahead=ahead),
        randomness=SimpleNamespace(iteration=0),
        memory=MemoryWatch(position, NOTHING),
        clip_norm=NO_CLIPPING if case.clip else 0.0,
        learning_rate=lambda iteration: 1.0,
    )
    runner.observe(_Steps(case, rank))
    return [list(runner.run(program, number * schedule.iterations)) for number in range(PROGRAMS)]


def _check(result: IterationResult, numbers: Numbers, program: int, iteration: int) -> None:
    assert result.loss == pytest.approx(numbers.mean_loss(program, iteration), rel=1e-12)
    if not numbers.schedule.weight_version:
        squares = [numbers.gradient(name, program, None) ** 2 for name in numbers.users]
        assert result.grad_norm == pytest.approx((ELEMENTS * sum(squares)) ** 0.5, rel=1e-12)


def bytes_of_messages(program: Program, case: Case, device: int) -> int:
    """Peak bytes of messages that a rank of ``device`` may hold.

    These are messages posted and not received, messages sent and not released, and received tensors that stages keep
    until their backward.
    """
    device_of = case.schedule.device_of
    made: dict[tuple[str, int, bool], int] = {}  # (value, its stage, has a gradient) -> bytes
    for transfer in case.transfers(case.counts[device]):
        size = transfer.value.shape[0] * 8
        made[transfer.value.name, transfer.source, transfer.value.differentiable] = size
    split = any(step.operation.kind == "W" for step in program.steps)

    def tensors(message) -> dict[tuple, int]:
        """Bytes of each tensor of the message. A value is one tensor on its maker; each receiving stage has its own."""
        forward, here = message.kind == "F", device_of[message.source, message.pipe] == device
        maker = message.source if forward else message.target
        other = message.target if forward else message.source
        pairs = {(transfer.value.name, transfer.source, transfer.target) for transfer in case.transfers(1)}
        return {
            (message.kind, name, message.micro_batch, message.pipe, None if forward and here else other): size
            for (name, stage, differentiable), size in made.items()
            if stage == maker and (name, maker, other) in pairs and (forward or differentiable)
        }

    held: dict[object, dict[tuple, int]] = {}  # owner -> tensors
    most = 0

    def grown() -> int:
        return max(most, sum({key: size for each in held.values() for key, size in each.items()}.values()))

    for step in program.steps:
        operation = step.operation
        for message in step.posts:
            held[message] = tensors(message)
        most = grown()
        for message in step.receives:
            held["kept", operation.stage, operation.pipe, message] = held.pop(message, {}) or tensors(message)
        for message in step.releases:
            del held["sent", message]
        for message in step.sends:
            held["sent", message] = tensors(message)
        most = grown()
        if operation.kind == "W" or (operation.kind == "B" and not split):
            for key in [key for key in held if isinstance(key, tuple) and key[0] == "kept"]:
                if key[1:3] == (operation.stage, operation.pipe) and key[3].micro_batch in operation.micro_batches:
                    del held[key]
        for message in step.sends:  # a message to a stage of this device is kept, not released
            if device_of[message.target, message.pipe] == device:
                held["kept", message.target, message.pipe, message] = held.pop(("sent", message))
    return most


class _Steps:
    """A StepObserver that sees when steps begin, and counts those that the device has not completed."""

    def __init__(self, case: Case, rank: int) -> None:
        self._case = case
        draw = Random(case.seed)
        chosen = draw.randrange(sum(map(len, case.placement)))
        lengths = [len(operations) for operations in case.schedule.operations]
        self._chosen = draw.randrange(max(lengths)) if chosen == rank else None
        self._count = 0
        self._ends: list[Record] = []
        self._operation: Operation | None = None

    def begin(self, operation: Operation) -> None:
        host = current()
        host.spend()
        synchronise = self._case.synchronise
        if synchronise == "steps" or (synchronise == "once" and self._count == self._chosen):
            host.synchronize()
        self._ends = [end for end in self._ends if not end.done]
        assert len(self._ends) <= OPERATIONS_AHEAD, f"{len(self._ends)} operations ahead"
        self._operation = operation

    def end(self) -> None:
        self._ends.append(current().device.current.record(f"the end of {self._operation}"))
        self._count += 1

    def begin_wait(self) -> None:
        """Waits are seen by the simulation itself."""

    end_wait = begin_read = end_read = begin_wait


def _before_call(case: Case) -> None:
    host = current()
    if case.synchronise == "calls" or (case.synchronise == "sometimes" and host.machine.random.random() < 0.1):
        host.synchronize()


class _ThisRank:
    """Stands in for THIS_RANK: there is one for each host instead of one for each process."""

    hosts: Sequence[str] = ()
    timeout_s = NO_LIMIT

    def set_phase(self, phase: str) -> None:
        current().doing = phase

    def set_waiting_for(self, what: str) -> None:
        current().waiting_for = what

    def set_computing(self) -> None:
        current().waiting_for = ""

    def name(self, rank: int) -> str:
        return f"rank {rank}"

    def __str__(self) -> str:
        return f"rank {current().rank}, {current().doing},"


@contextmanager
def _patched(machine: Machine, network: FakeDistributed) -> Iterator[None]:
    with ExitStack() as stack:
        for module in (exchange, gradient_sync, run_ahead, slice_collectives, totals, waiting, world):
            for name, fake in (("dist", network), ("THIS_RANK", _ThisRank())):
                if hasattr(module, name):
                    stack.enter_context(patch.object(module, name, fake))
        for module in (exchange, gradient_sync):
            stack.enter_context(patch.object(module, "new_group", network.new_group))
        stack.enter_context(patch.object(waiting, "monotonic", lambda: machine.now))
        stack.enter_context(patch.object(waiting, "sleep", lambda seconds: current().sleep()))
        yield
