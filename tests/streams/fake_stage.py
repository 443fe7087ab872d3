"""Stages whose kernels write numbers that identify each tensor, and check the numbers of what they read."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from zlib import crc32

import torch
from torch import nn

from auto3d.partition.stage import Transfer
from auto3d.runtime.weights.shard import WeightShard
from auto3d.runtime.weights.versions import WeightVersions
from auto3d.schedule.operation import Kind, Schedule
from tests.streams.machine import current

ELEMENTS = 3  # elements of a parameter
ENDING = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)  # kinds that add to the gradients of weights


def number_of(*identity: object) -> float:
    """A number for ``identity``, so small that sums of a few thousand of them are exact."""
    return float(crc32(repr(identity).encode()) % 2**20 + 1)


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """The numbers that the tensors of a case must contain."""

    schedule: Schedule
    pipelines: int
    users: Mapping[str, Collection[int]]  # parameter -> its stages
    replicas: Mapping[int, int]  # stage -> among how many replicas each of its micro-batches is split

    def loss(self, program: int, micro_batch: int, pipeline: int) -> float:
        return number_of("loss", program, micro_batch, pipeline)

    def mean_loss(self, program: int, iteration: int) -> float:
        """The loss that the ranks report; the losses of a stage are already weighted for the mean."""
        count = self.schedule.micro_batches * self.schedule.parts
        numbers = range(iteration * count, (iteration + 1) * count)
        losses = [self.loss(program, m, pipeline) for m in numbers for pipeline in range(self.pipelines)]
        return sum(losses) * self.replicas[self.schedule.stages - 1] / self.schedule.updates

    def addition(self, parameter: str, stage: int, program: int, micro_batch: int, pipeline: int) -> float:
        """The number that the backward of one micro-batch adds to the gradient of ``parameter``."""
        return number_of("gradient", parameter, stage, program, micro_batch, pipeline)

    def gradient(self, parameter: str, program: int, micro_batches: Collection[int] | None) -> float:
        """Sum over all ranks of the gradients of ``micro_batches``; None stands for all of the program."""
        ended = {
            (operation.stage, m)
            for operations in self.schedule.operations
            for operation in operations
            if operation.kind in ENDING and operation.stage in self.users[parameter]
            for m in operation.micro_batches
            if micro_batches is None or m in micro_batches
        }
        return sum(
            self.addition(parameter, stage, program, m, pipeline) * self.replicas[stage]
            for stage, m in ended
            for pipeline in range(self.pipelines)
        )


def expect(tensor: torch.Tensor, number: float, what: str) -> None:
    assert (tensor == number).all(), f"{what}: {tensor.tolist()} instead of {number}"


class FakeStage:
    """Stands in for a StageModule on a rank of pipeline ``pipeline``."""

    def __init__(
        self,
        number: int,
        pipe: int,
        pipeline: int,
        *,
        transfers: Sequence[Transfer],
        parameters: Mapping[str, nn.Parameter],
        numbers: Numbers,
    ) -> None:
        self.stage = SimpleNamespace(index=number, state=tuple(parameters), inputs=())
        self.losses: dict[int, torch.Tensor] = {}
        self.counts: dict[int, dict[int, torch.Tensor]] = {}
        self.weights = _Versions(parameters, several=bool(numbers.schedule.weight_version))
        self.ended: list[int] = []  # micro-batches whose gradients the next update will use
        self._number, self._pipe, self._pipeline = number, pipe, pipeline
        self._received = [transfer for transfer in transfers if transfer.target == number]
        self._sent = [transfer for transfer in transfers if transfer.source == number]
        self._numbers = numbers
        self._kept: dict[int, list[tuple[torch.Tensor, float, str]]] = {}  # micro-batch -> tensors for its backward

    def forward(
        self, micro_batch: int, received: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        what = self._name("F", micro_batch)
        assert sorted(received) == sorted(t.value.name for t in self._received), what
        used = [self._activation(received[t.value.name], t, micro_batch) for t in self._received]
        self._kept[micro_batch] = used
        versions = [
            (tensor, self.weights.seen(micro_batch), f"version of {name}")
            for name, tensor in self.weights.of(micro_batch).items()
        ]
        outputs = {t.value.name: torch.empty(t.value.shape, dtype=getattr(torch, t.value.dtype)) for t in self._sent}
        made = [self._activation(tensor, name, micro_batch) for name, tensor in outputs.items()]
        if self._number == self._numbers.schedule.stages - 1:
            self.losses[micro_batch] = torch.empty((), dtype=torch.float64)
            loss = self._numbers.loss(self.weights.program, micro_batch, self._pipeline)
            made.append((self.losses[micro_batch], loss, "loss"))
        self._run(what, [*used, *versions], made)
        return outputs

    def recompute(self, micro_batch: int) -> None:
        self._run(self._name("R", micro_batch), self._kept[micro_batch], [])

    def backward(
        self, micro_batch: int, gradients: Mapping[str, Sequence[torch.Tensor]], *, defer_weights: bool = False
    ) -> dict[str, torch.Tensor]:
        sent_back = self._backward_input(micro_batch, gradients)
        if not defer_weights:
            self.backward_weight(micro_batch)
        return sent_back

    def _backward_input(
        self, micro_batch: int, gradients: Mapping[str, Sequence[torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        what = self._name("B", micro_batch)
        used = []
        for name in dict.fromkeys(t.value.name for t in self._sent if t.value.differentiable):
            expected = [self._gradient(name, t.target, micro_batch) for t in self._sent if t.value.name == name]
            assert len(gradients[name]) == len(expected), f"{what}: gradients of {name}"
            used += [(tensor, expected, f"gradient of {name}") for tensor in gradients[name]]
        outputs, made = {}, []
        for transfer in self._received:
            if transfer.value.differentiable:
                name = transfer.value.name
                outputs[name] = torch.empty(transfer.value.shape, dtype=getattr(torch, transfer.value.dtype))
                made.append((outputs[name], self._gradient(name, self._number, micro_batch), name))
        self._run(what, [*self._kept[micro_batch], *used], made)
        self._kept[micro_batch] = [*self._kept[micro_batch], *used]
        return outputs

    def backward_weight(self, micro_batch: int) -> None:
        what = self._name("W", micro_batch)
        kept = self._kept.pop(micro_batch)
        for name, tensor in self.weights.of(micro_batch).items():
            amount = self._numbers.addition(name, self._number, self.weights.program, micro_batch, self._pipeline)
            begun = tensor.grad is not None
            if not begun:
                tensor.grad = torch.empty_like(tensor)
            gradient = tensor.grad

            def add(gradient=gradient, amount=amount, begun=begun) -> None:
                gradient.add_(amount) if begun else gradient.fill_(amount)

            current().device.launch(f"{what}: gradient of {name}", reads=[gradient], writes=[gradient], effect=add)
        self._run(what, kept, [])
        self.ended.append(micro_batch)
        self.weights.end(micro_batch)

    def _name(self, kind: str, micro_batch: int) -> str:
        return f"{kind}{micro_batch}@{self._number}:{self._pipe}"

    def _activation(
        self, tensor: torch.Tensor, transfer: Transfer | str, micro_batch: int
    ) -> tuple[torch.Tensor, float, str]:
        name = transfer if isinstance(transfer, str) else transfer.value.name
        number = number_of("activation", name, self.weights.program, micro_batch, self._pipe, self._pipeline)
        return tensor, number, f"activation {name}"

    def _gradient(self, name: str, user: int, micro_batch: int) -> float:
        return number_of("gradient", name, user, self.weights.program, micro_batch, self._pipe, self._pipeline)

    def _run(self, what: str, used: Sequence[tuple], made: Sequence[tuple[torch.Tensor, float, str]]) -> None:
        """Enqueue one kernel that checks the tensors that it reads and writes its results."""
        current().device.launch(
            what,
            reads=[tensor for tensor, *_ in used],
            writes=[tensor for tensor, *_ in made],
            effect=_work(what, used, made),
        )


def _work(
    what: str,
    used: Sequence[tuple[torch.Tensor, float | list[float], str]],
    made: Sequence[tuple[torch.Tensor, float, str]],
) -> Callable[[], None]:
    used = [(tensor.detach(), number, name) for tensor, number, name in used]
    made = [(tensor.detach(), number, name) for tensor, number, name in made]

    def work() -> None:
        for tensor, number, name in used:
            if isinstance(number, list):  # gradients of one value from several stages, in any order
                assert tensor.flatten()[0].item() in number, f"{what}: {name}"
                number = tensor.flatten()[0].item()
            expect(tensor, number, f"{what}: {name}")
        for tensor, number, _ in made:
            tensor.fill_(number)

    return work


class _Versions(WeightVersions):
    """WeightVersions that also count programs and updates."""

    def __init__(self, state: Mapping[str, torch.Tensor], *, several: bool) -> None:
        super().__init__(state, several=several)
        self.program = -1
        self.updates = 0
        self._before_program = 0

    def start(self, version_of: Mapping[int, int]) -> None:
        super().start(version_of)
        self.program += 1
        self._before_program = self.updates

    def seen(self, micro_batch: int) -> float:
        """The number of updates that ``micro_batch`` must see."""
        return float(self._before_program + self._version_of.get(micro_batch, 0))

    def next(self) -> None:
        super().next()
        self.updates += 1


class FakeOptimizer:
    """Checks the gradients of ``parameters`` and of the slices in ``shards``, and adds 1 to each parameter of them."""

    def __init__(
        self,
        stage: FakeStage,
        parameters: Mapping[str, nn.Parameter],
        shards: Sequence[WeightShard],
        numbers: Numbers,
    ) -> None:
        self._stage, self._parameters, self._shards, self._numbers = stage, parameters, shards, numbers

    def step(self) -> None:
        stage, asynchronous = self._stage, bool(self._numbers.schedule.weight_version)
        ended, stage.ended = stage.ended, []
        updated = [(name, parameter.data, parameter.grad) for name, parameter in self._parameters.items()]
        for shard in self._shards:
            shard.follow()
            for piece in shard.pieces:
                for name, start in shard.starts.items():
                    elements = slice(max(start - piece.first, 0), max(start + ELEMENTS - piece.first, 0))
                    updated.append((name, piece.tensor.data[elements], piece.tensor.grad[elements]))
        for name, parameter, gradient in updated:
            expected = self._numbers.gradient(name, stage.weights.program, ended if asynchronous else None)
            what = f"update {stage.weights.updates} of {name}"
            current().device.launch(
                what,
                reads=[gradient],
                writes=[parameter],
                effect=_updating(parameter, gradient, expected, what),
            )


def _updating(parameter: torch.Tensor, gradient: torch.Tensor, expected: float, what: str) -> Callable[[], None]:
    def work() -> None:
        expect(gradient, expected, what)
        parameter.add_(1.0)

    return work
