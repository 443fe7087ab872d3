"""Time a subgraph of a model: its forward, its backward, and the weight half of a split backward."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from statistics import median
from time import perf_counter

import torch

from auto3d.capture.graph import Value
from auto3d.cost.profile import SubgraphTimes
from auto3d.data import Batches
from auto3d.partition.stage import Stage
from auto3d.runtime.clock import Clock, Mark
from auto3d.runtime.messages.tensor_group import Pending, TensorParallelRank
from auto3d.runtime.profile.distinct_subgraphs import ModelSubgraphs
from auto3d.runtime.randomness import Randomness
from auto3d.runtime.stage.build import build_stage
from auto3d.runtime.stage.program import ProgramOfStage

MIN_REPETITIONS = 3  # least number of repetitions of a subgraph in each round
ROUND_S = 0.06  # about how long the repetitions of one subgraph take in each round

Load = Callable[[], dict[str, torch.Tensor]]
Seconds = tuple[float, float, float]  # one repetition's forward, backward and weight half of a split backward


def time_subgraph(whole: "SubgraphRun", split: "SubgraphRun", clock: Clock) -> list[Seconds]:
    """Times of one round of repetitions, after an unmeasured round; ``split`` is the same subgraph with split backward.

    On a GPU many repetitions are queued, with events between their parts, and then waited for together. All run on one
    stream, so each repetition reuses the memory that the previous repetition freed.
    """
    parts = (whole.forward,), (whole.backward,), (split.forward, split.backward_input), (split.backward_weight,)
    return [(forward, backward, weight) for forward, backward, _, weight in _times(parts, clock)]


def time_passes(whole: "SubgraphRun", clock: Clock) -> list[tuple[float, float]]:
    """As ``time_subgraph``, without a split backward: seconds of each repetition's forward and backward."""
    return [(forward, backward) for forward, backward in _times(((whole.forward,), (whole.backward,)), clock)]


def _times(parts: Sequence[Sequence[Callable[[], None]]], clock: Clock) -> list[list[float]]:
    """The seconds of every part in ``parts``, run in turn, in each repetition."""
    _marked(parts, clock)
    deadline = perf_counter() + ROUND_S
    times: list[list[float]] = []
    while len(times) < MIN_REPETITIONS or perf_counter() <= deadline:
        repetitions = [_marked(parts, clock) for _ in range(clock.queued)]
        clock.settle()
        times += [[clock.seconds(begin, end) for begin, end in pairwise(marks)] for marks in repetitions]
    return times


def _marked(parts: Sequence[Sequence[Callable[[], None]]], clock: Clock) -> list[Mark]:
    """Marks before, between and after ``parts``."""
    marks = [clock.mark()]
    for calls in parts:
        for call in calls:
            call()
        marks.append(clock.mark())
    return marks


class SilentGroup:
    """The tensor-parallel group of rank 0 of ``shards`` ranks, none of which is there: its collectives do nothing.

    What they give has the right shape and harmless values, and takes no time.
    """

    shard = 0

    def __init__(self, shards: int) -> None:
        self.shards = shards
        self._gathered: dict[tuple, torch.Tensor] = {}

    def all_reduce(self, tensor: torch.Tensor, what: str, *, maximum: bool = False) -> Pending:
        return lambda: tensor

    def all_gather(self, tensor: torch.Tensor, what: str) -> Pending:
        key = tensor.shape, tensor.dtype, tensor.device
        if key not in self._gathered:
            self._gathered[key] = tensor.detach().expand(self.shards, *tensor.shape).contiguous()
        return lambda: self._gathered[key]

    def reduce_scatter(self, stacked: torch.Tensor, what: str) -> Pending:
        return lambda: stacked[self.shard]


class SubgraphRun:
    """A subgraph as a stage runs it, on made-up activations, which can be run any number of times.

    That of a tensor-parallel rank runs without its collectives; their copies of tensors are part of it.
    """

    def __init__(
        self,
        stage: Stage,
        model: ModelSubgraphs,
        state: dict[str, torch.Tensor],
        batches: Batches,
        device: torch.device,
        *,
        split: bool,
    ) -> None:
        captured, graph = model.captured, model.captured.graph
        tensor = None
        if model.derived is not None:
            tensor = TensorParallelRank(model=model.derived, group=SilentGroup(model.share.tp))
        inside = set(stage.nodes)
        modules = [node.module for node in graph.nodes if node.name in inside and not node.from_inputs and node.module]
        self.name, self.samples = modules[0] if modules else stage.nodes[0], graph.micro_batch_size
        self._module = build_stage(
            [ProgramOfStage(stage, captured, tensor)],
            state,
            loss_weight=1.0,
            randomness=Randomness(0, first_micro_batch=0, micro_batches=1, device=device),
            split_backward=split,
        )
        self._state = {state[name].untyped_storage().data_ptr() for name in stage.state}
        self._device = device
        self._load: Load = partial(batches.micro_batch, 0, 0, self._module.stage.inputs)
        if device.type == "cuda":  # queued repetitions must not wait for the host
            pinned = {name: value.pin_memory() for name, value in self._load().items()}
            self._load = lambda: pinned
        self._received = {transfer.value.name: _made_up(transfer.value, device) for transfer in stage.received}
        sent = [graph.value(name) for name in self._module.sent]
        self._gradients = {value.name: [_made_up(value, device)] for value in sent if value.differentiable}

    def forward(self) -> None:
        """Run forward, including the device's share of loading the inputs: all of it on a CPU, the copy on a GPU."""
        inputs = {name: value.to(self._device, non_blocking=True) for name, value in self._load().items()}
        self._module.forward(0, self._received, inputs)
        self._module.losses.clear()

    def backward(self) -> None:
        self._module.backward(0, self._gradients)

    def backward_input(self) -> None:
        self._module.backward(0, self._gradients, defer_weights=True)

    def backward_weight(self) -> None:
        self._module.backward_weight(0)

    def saved_bytes(self) -> int:
        """Bytes that autograd saves in a forward: each storage once, weights excluded."""
        saved: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._state:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            self.forward()
        self.backward()
        return sum(saved.values())


def subgraph_times(run: SubgraphRun, rounds: Sequence[Sequence[Seconds]]) -> SubgraphTimes:
    """The times of ``run``: each the median of the round in which that median is smallest; 0 if there are no rounds."""
    medians = [[median(seconds) for seconds in zip(*times, strict=True)] for times in rounds]
    forward, backward, weight = map(min, zip(*medians, strict=True)) if medians else (0.0, 0.0, 0.0)
    return SubgraphTimes(
        name=run.name,
        forward_s=forward,
        backward_s=backward,
        backward_weight_s=weight,
        saved_bytes=run.saved_bytes(),
        repetitions=sum(map(len, rounds)),
    )


def fastest_round(rounds: Sequence[Sequence[tuple[float, float]]]) -> tuple[float, float]:
    """Seconds of forward and backward, as in ``subgraph_times``; 0 if there are no rounds."""
    medians = [[median(seconds) for seconds in zip(*times, strict=True)] for times in rounds]
    forward, backward = map(min, zip(*medians, strict=True)) if medians else (0.0, 0.0)
    return forward, backward


def _made_up(value: Value, device: torch.device) -> torch.Tensor:
    dtype = getattr(torch, value.dtype)
    if not dtype.is_floating_point:
        return torch.zeros(value.shape, dtype=dtype, device=device)
    return torch.randn(value.shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
