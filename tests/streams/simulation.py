"""One run of a schedule by the real Exchange, Executor and GradientSync on simulated devices."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import nn

from auto3d.capture.graph import Value
from auto3d.partition.stage import Transfer
from auto3d.runtime import exchange, executor, gradient_sync, run_ahead, waiting, world
from auto3d.runtime.exchange import Exchange
from auto3d.runtime.executor import Executor
from auto3d.runtime.gradient_sync import GradientSync, holders
from auto3d.runtime.lowering import lower
from auto3d.runtime.program import Program
from auto3d.runtime.run_ahead import RunAhead
from auto3d.runtime.world import connect
from auto3d.schedule.operation import Schedule
from tests.streams.fake_distributed import FakeDistributed
from tests.streams.fake_stage import FakeOptimizer, FakeStage, Numbers
from tests.streams.machine import Machine, current
from tests.streams.torch_on_device import fake_cuda, on_device

BLOCKS_OF_MESSAGES = 2  # that a kernel of communication takes; one that computes takes 1
SYNCHRONISE = ("never", "steps", "calls", "once")


@dataclass(frozen=True, kw_only=True)
class Case:
    """``synchronise``: when hosts wait for all that is on their device.

    Before all steps, before all calls that enqueue communication or take memory, or one rank before one step.
    """

    schedule: Schedule
    skips: tuple[tuple[int, int], ...] = ()
    dp: int = 1
    tied: bool = False
    queues: int = 8
    synchronise: str = "never"
    seed: int = 0
    programs: int = 2
    clip: bool = False

    @property
    def transfers(self) -> list[Transfer]:
        """From each stage to the next, and over some; one of two values of neighbours has no gradient."""
        last = self.schedule.stages - 1
        passed = [Value(f"v{stage}", (2,), "float64", 8, True) for stage in range(last)]
        indices = [Value(f"i{stage}", (3,), "int64", 8, False) for stage in range(last)]
        pairs = [(stage, stage + 1) for stage in range(last)]
        return [
            *(Transfer(value=passed[a], source=a, target=b) for a, b in [*pairs, *self.skips]),
            *(Transfer(value=indices[a], source=a, target=b) for a, b in pairs),
        ]


@dataclass(frozen=True)
class Outcome:
    held_bytes: list[int]  # per rank, the most that its messages took
    results: list  # per rank


def simulate(case: Case, change: Callable[[Program], Program] = lambda program: program) -> Outcome:
    """Run ``case``, whose programs are first given to ``change``; raises what goes wrong."""
    schedule, transfers = case.schedule, case.transfers
    ranks = schedule.devices * case.dp
    machine = Machine(ranks, queues=case.queues, blocks=1, seed=case.seed)
    network = FakeDistributed(machine, blocks=BLOCKS_OF_MESSAGES, before_call=lambda: _before_call(case))
    draw = Random(case.seed)
    chosen = draw.randrange(ranks), draw.randrange(sum(map(len, schedule.operations)) // schedule.devices)

    last = schedule.stages - 1
    states = [
        (f"w{stage}", "tied") if case.tied and stage in (0, last) else (f"w{stage}",) for stage in range(last + 1)
    ]
    users: dict[str, list[int]] = {}
    for stage, state in enumerate(states):
        for name in state:
            users.setdefault(name, []).append(stage)
    numbers = Numbers(schedule=schedule, replicas=case.dp, users=users)
    placement = tuple(
        tuple(d + replica * schedule.devices for replica in range(case.dp)) for d in range(schedule.devices)
    )

    all_holders = holders(
        SimpleNamespace(placement=placement), schedule, [SimpleNamespace(state=s) for s in states], set(users)
    )
    shared = {each.stages for each in all_holders.values() if len(each.ranks) > 1}
    programs = [change(program) for program in lower(schedule, transfers, shared)]

    def body(rank: int) -> list:
        replica, position = divmod(rank, schedule.devices)
        device = torch.device("cuda", rank)
        with on_device(current(), lambda: _before_call(case)):
            own = [key for key, home in schedule.device_of.items() if home == position]
            ahead = RunAhead(device, timeout_s=1e9)
            everyone = network.new_group(range(ranks))
            connect(everyone, device=device, what="all ranks", timeout_s=1e9)
            messages = Exchange(
                programs[position],
                transfers,
                ranks_of=[[ranks[replica]] for ranks in placement],
                device_of=schedule.device_of,
                sample_dimensions={},
                device=device,
                run_ahead=ahead,
                timeout_s=1e9,
            )
            names = dict.fromkeys(name for stage, _ in own for name in states[stage])
            parameters = {name: nn.Parameter(torch.zeros(3, dtype=torch.float64)) for name in names}
            uses = Counter(name for stage, _ in own for name in states[stage])
            alone = [name for name in names if uses[name] == 1 and len(all_holders[name].ranks) == 1]
            sync = GradientSync(
                parameters,
                all_holders,
                alone=[] if schedule.weight_version else alone,
                device=device,
                run_ahead=ahead,
                timeout_s=1e9,
            )
            stages = {
                (number, pipe): FakeStage(
                    number,
                    pipe,
                    replica,
                    transfers=transfers,
                    parameters={name: parameters[name] for name in states[number]},
                    numbers=numbers,
                )
                for number, pipe in own
            }
            left = dict(parameters)
            optimizers = {}
            for key, stage in stages.items():
                mine = {name: left.pop(name) for name in states[key[0]] if name in left}
                optimizers[key] = (
                    (FakeOptimizer(stage, mine, numbers), SimpleNamespace(step=lambda: None)) if mine else None
                )
            network.connected[rank] = True
            runner = Executor(
                stages,
                optimizers,
                exchange=messages,
                sync=sync,
                everyone=everyone,
                run_ahead=ahead,
                batches=SimpleNamespace(micro_batch=lambda *_: {}),
                randomness=SimpleNamespace(iteration=0),
                first_micro_batch=replica * schedule.micro_batches * schedule.parts,
                micro_batches=schedule.micro_batches * schedule.parts,
                clip_norm=1e30 if case.clip else 0.0,
                device=device,
                memory=SimpleNamespace(during=_Steps(case, rank, chosen).during),
                asked_to_end=lambda: False,
                timeout_s=1e9,
            )
            return [
                list(runner.run(programs[position], number * schedule.iterations)) for number in range(case.programs)
            ]

    with _patched(machine, network), fake_cuda():
        results = machine.run(body)
    for own in results:
        for program, found in enumerate(own):
            assert len(found) == schedule.iterations
            for iteration, result in enumerate(found):
                assert result.loss == pytest.approx(numbers.mean_loss(program, iteration), rel=1e-12)
                if not schedule.weight_version:
                    gradients = [numbers.gradient(name, program, None) for name in users]
                    norm = sum(3 * gradient**2 for gradient in gradients) ** 0.5  # 3 elements each
                    assert result.grad_norm == pytest.approx(norm, rel=1e-12)
    return Outcome(network.held_bytes, results)


class _Steps:
    """In the place of a MemoryWatch: it knows when a step begins."""

    def __init__(self, case: Case, rank: int, chosen: tuple[int, int]) -> None:
        self._case, self._rank, self._chosen = case, rank, chosen
        self._count = 0

    @contextmanager
    def during(self, what: object) -> Iterator[None]:
        host = current()
        host.spend()
        if self._case.synchronise == "steps" or (
            self._case.synchronise == "once" and self._chosen == (self._rank, self._count)
        ):
            host.synchronize()
        self._count += 1
        yield


def _before_call(case: Case) -> None:
    if case.synchronise == "calls":
        current().synchronize()


class _Here:
    """In the place of HERE, which is one for each process: one for each host."""

    hosts: Sequence[str] = ()

    def is_at(self, at: str) -> None:
        current().doing = at

    def waits_for(self, what: str) -> None:
        current().waiting_for = what

    def computes(self) -> None:
        current().waiting_for = ""

    def name(self, rank: int) -> str:
        return f"rank {rank}"

    def __str__(self) -> str:
        return f"rank {current().rank}, {current().doing},"


@contextmanager
def _patched(machine: Machine, network: FakeDistributed) -> Iterator[None]:
    with ExitStack() as stack:
        for module in (exchange, executor, gradient_sync, run_ahead, waiting, world):
            for name, fake in (("dist", network), ("HERE", _Here())):
                if hasattr(module, name):
                    stack.enter_context(patch.object(module, name, fake))
        for module in (exchange, gradient_sync):
            stack.enter_context(patch.object(module, "new_group", network.new_group))
        stack.enter_context(patch.object(waiting, "monotonic", lambda: machine.now))
        stack.enter_context(patch.object(waiting, "sleep", lambda seconds: current().sleep()))
        yield
