"""auto3d in 300 lines: plan the training of a small model, and train it on two processes as if it were one.

    python docs/auto3d_in_300_lines.py

The program goes the road of the project and imports nothing of it. Each part names the room that does it in full.

    model ─► capture ─► Graph ─► partition ─► search ─► Plan ─► operations ─► runtime ─► parity
                                                 ▲                   │
                                                 └──── simulator ◄───┘
"""

import tempfile
import zlib
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from itertools import count
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, fx, nn
from torch.nn import functional

VOCABULARY, LENGTH, WIDTH, LAYERS = 64, 32, 64, 4
GLOBAL_BATCH, ITERATIONS, LEARNING_RATE = 16, 5, 0.3
STAGES = 2  # and so the number of processes


# 1. The user's model: torch's own layers, which know nothing of pipelines. The project builds any class of transformers
#    or of a user's own, as a recipe says: launch/model/build.py.
class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layers = (nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True) for _ in range(LAYERS))
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        scores = self.head(self.layers(self.embedding(tokens)))
        return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def initial_value(name: str, shape: torch.Size) -> nn.Parameter:
    """A parameter's first values, which follow from its name. In full: auto3d/runtime/weights/materialize.py."""
    if len(shape) == 1:
        return nn.Parameter(torch.full(shape, float(name.endswith("weight"))))  # weights of norms are 1, biases 0
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return nn.Parameter(torch.randn(shape, generator=generator) * WIDTH**-0.5)


# 2. Capture: the operators of one micro-batch through the model and its loss, as a list. They are traced on the meta
#    device, which has shapes and no values, so that a model of any size fits. In full: auto3d/capture/export.py.
@dataclass(frozen=True)
class Graph:
    operators: list[fx.Node]  # in the order in which they run
    parameters: dict[str, str]  # placeholder -> name in the model
    inputs: tuple[str, ...]  # placeholders of tokens and targets
    shapes: dict[str, torch.Size]  # of parameters and of the operators' results


@cache
def capture(micro_batch_size: int) -> Graph:
    with torch.device("meta"):
        model, tokens = LanguageModel(), torch.empty(micro_batch_size, LENGTH, dtype=torch.int64)
    exported = torch.export.export(model, (tokens, tokens.clone()), strict=False)
    values = {node.name: node.meta.get("val") for node in exported.graph.nodes}
    return Graph(
        operators=[node for node in exported.graph.nodes if node.op == "call_function"],
        parameters=dict(exported.graph_signature.inputs_to_parameters),
        inputs=tuple(exported.graph_signature.user_inputs),
        shapes={name: value.shape for name, value in values.items() if isinstance(value, Tensor)},
    )


# 3. Partition: cut the list where one value passes, so that the slowest stage is as fast as possible. In full:
#    auto3d/partition/contiguous.py, and the papers' methods in auto3d/partition/methods/.
def passing(graph: Graph, position: int) -> list[str]:
    """The values that operators before ``position`` make and operators from there on use: what a cut there sends."""
    after = set(graph.operators[position:])
    return [node.name for node in graph.operators[:position] if after & node.users.keys()]


def flops(graph: Graph, stage: range) -> int:
    """FLOPs of the forward of one micro-batch, in products with weights. In full: auto3d/capture/operation_cost.py."""
    nodes = [graph.operators[position] for position in stage]
    products = [node for node in nodes if node.target is torch.ops.aten.linear.default]
    return sum(2 * graph.shapes[node.name].numel() * graph.shapes[node.args[0].name][-1] for node in products)


def partition(graph: Graph) -> tuple[range, range]:
    """The positions of each of two stages in the list of operators."""
    end = len(graph.operators)
    cuts = [position for position in range(1, end) if len(passing(graph, position)) == 1]
    possible = [(range(cut), range(cut, end)) for cut in cuts]
    return min(possible, key=lambda stages: max(flops(graph, stage) for stage in stages))


# 4. Plan and schedule. A Plan is complete: what runs it decides nothing. Its schedule is one list of operations per
#    device, without messages; they follow from the operations. In full: auto3d/plan.py, auto3d/schedule/families/,
#    auto3d/schedule/check.py and auto3d/schedule/lowering.py.
class Operation(NamedTuple):
    kind: str  # F: forward; B: backward
    stage: int
    micro_batch: int


def numbered(stage: int, kinds: str) -> list[Operation]:
    """The operations of ``stage``: numbered(1, "FFBB") is F0@1 F1@1 B0@1 B1@1."""
    numbers = {"F": count(), "B": count()}
    return [Operation(kind, stage, next(numbers[kind])) for kind in kinds]


@dataclass(frozen=True)
class Plan:
    micro_batch_size: int
    schedule: str
    stages: tuple[range, ...]  # of operators; device 0 runs stage 0

    @property
    def micro_batches(self) -> int:
        return GLOBAL_BATCH // self.micro_batch_size

    @property
    def orders(self) -> list[list[Operation]]:
        """The operations of each device. gpipe: all forwards, then all backwards. 1f1b: forwards until a gradient
        can arrive, then a forward and a backward in turn, so that few micro-batches are held."""
        n = self.micro_batches
        early = {"gpipe": [n] * STAGES, "1f1b": [min(STAGES - 1 - stage, n) for stage in range(STAGES)]}[self.schedule]
        return [numbered(stage, "F" * e + "FB" * (n - e) + "B" * e) for stage, e in enumerate(early)]

    def inputs(self, iteration: int, micro_batch: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets [samples, LENGTH] of texts that count up. In full: auto3d/data/batches.py."""
        first = iteration * GLOBAL_BATCH + micro_batch * self.micro_batch_size
        starts = 7 * torch.arange(first, first + self.micro_batch_size)
        text = (starts[:, None] + torch.arange(LENGTH + 1)) % VOCABULARY
        return text[:, :-1], text[:, 1:]


def neighbours(operation: Operation) -> tuple[int | None, ...]:
    """The stages that ``operation`` receives from and sends to: forwards go up the stages, backwards come down."""
    step = 1 if operation.kind == "F" else -1
    return tuple(at if 0 <= at < STAGES else None for at in (operation.stage - step, operation.stage + step))


def check(plan: Plan) -> None:
    """Raise ValueError unless each device runs every forward once and, after it, its backward once."""
    for stage, order in enumerate(plan.orders):
        late = [operation for operation in order if order.index(operation._replace(kind="F")) > order.index(operation)]
        if late or sorted(order) != sorted(numbered(stage, "FB" * plan.micro_batches)):
            raise ValueError(f"stage {stage} does not run each forward once and, after it, its backward")


# 5. The simulator goes through the lists as the runtime does, with a time for each operation instead of its work.
#    In full: auto3d/simulate/simulate.py; predicted seconds and bytes: auto3d/cost/model.py.
def microseconds(plan: Plan, operation: Operation) -> int:
    """Time on a core of 20 GFLOP/s that takes 10 µs to begin an operator; a backward is two forwards."""
    stage = plan.stages[operation.stage]
    forward = flops(capture(plan.micro_batch_size), stage) // 20_000 + 10 * len(stage)
    return forward if operation.kind == "F" else 2 * forward


def simulate(plan: Plan) -> tuple[int, int]:
    """µs until the last device ends, and the most samples that a device holds. Raises ValueError at a deadlock."""
    ends: dict[Operation, int] = {}
    clocks, held, most = [0] * STAGES, [0] * STAGES, 0
    waiting = [list(reversed(order)) for order in plan.orders]
    while any(waiting):
        before = len(ends)
        for device, rest in enumerate(waiting):
            if rest and ((source := neighbours(rest[-1])[0]) is None or rest[-1]._replace(stage=source) in ends):
                operation = rest.pop()
                arrival = 0 if source is None else ends[operation._replace(stage=source)]
                clocks[device] = ends[operation] = max(clocks[device], arrival) + microseconds(plan, operation)
                held[device] += 1 if operation.kind == "F" else -1
                most = max(most, held[device])
        if len(ends) == before:
            raise ValueError("deadlock: each device waits for a message")
    return max(clocks), most * plan.micro_batch_size


# 6. Search: all Plans that the choices allow, by predicted time, then by memory. In full, and without
#    simulating every plan: auto3d/search/search.py.
def search() -> list[tuple[int, int, Plan]]:
    """Predicted µs of an iteration, the most samples that a device holds, and Plan; the best first."""
    plans = [Plan(size, name, partition(capture(size))) for size in (1, 2, 4) for name in ("gpipe", "1f1b")]
    for plan in plans:
        check(plan)
    return sorted(((*simulate(plan), plan) for plan in plans), key=lambda row: row[:2])


# 7. Runtime: one process per stage. It interprets its operators, and torch's autograd does their backward.
#    In full: auto3d/runtime/rank.py builds a rank, auto3d/runtime/executor.py runs its operations.
class Stage:
    """The operators of one stage, with their parameters and no others."""

    def __init__(self, graph: Graph, stage: range) -> None:
        self.inputs, self.operators = graph.inputs, [graph.operators[position] for position in stage]
        self.incoming = next(iter(passing(graph, stage.start)), "")  # the value from the stage before
        self.shapes = {"F": graph.shapes.get(self.incoming), "B": graph.shapes[self.operators[-1].name]}  # of messages
        used = {operand.name for node in self.operators for operand in node.all_input_nodes}
        self.names = {placeholder: name for placeholder, name in graph.parameters.items() if placeholder in used}
        self.parameters = {at: initial_value(name, graph.shapes[at]) for at, name in self.names.items()}
        self.held: dict[int, tuple[Tensor | None, Tensor]] = {}  # micro-batch in flight -> value received, result

    def forward(self, micro_batch: int, inputs: tuple[Tensor, ...], received: Tensor | None) -> Tensor:
        values = {**self.parameters, **dict(zip(self.inputs, inputs, strict=True))}
        if received is not None:
            values[self.incoming] = received.requires_grad_()
        for node in self.operators:
            arguments, keywords = fx.node.map_arg((node.args, node.kwargs), lambda operand: values[operand.name])
            result = values[node.name] = node.target(*arguments, **keywords)
        self.held[micro_batch] = received, result
        return result.detach()

    def backward(self, micro_batch: int, gradient: Tensor) -> Tensor | None:
        received, result = self.held.pop(micro_batch)
        result.backward(gradient)
        return None if received is None else received.grad


def train_rank(rank: int, plan: Plan, folder: str) -> None:
    """Train stage ``rank`` of ``plan``. Writes losses, seconds, gradients and parameters to ``folder``."""
    dist.init_process_group("gloo", f"file://{folder}/meeting", timedelta(seconds=60), STAGES, rank)
    stage = Stage(capture(plan.micro_batch_size), plan.stages[rank])
    optimizer = torch.optim.SGD(stage.parameters.values(), LEARNING_RATE)
    losses, seconds = [], []
    for iteration in range(ITERATIONS):
        optimizer.zero_grad()
        begin, loss, sent = perf_counter(), 0.0, []
        for operation in plan.orders[rank]:
            kind, _, number = operation
            source, target = neighbours(operation)
            message = torch.tensor(1 / plan.micro_batches)  # the loss is a mean: the last stage's gradient
            if source is not None:
                message = torch.empty(stage.shapes[kind])
                dist.recv(message, source, tag=number)
            if kind == "F":
                result = stage.forward(number, plan.inputs(iteration, number), None if source is None else message)
            else:
                result = stage.backward(number, message)
            if target is not None:
                sent.append((dist.isend(result, target, tag=number), result))
            elif kind == "F":
                loss += result.item() / plan.micro_batches
        for work, _ in sent:
            work.wait()
        optimizer.step()
        losses.append(loss)
        seconds.append(perf_counter() - begin)
    named = {stage.names[at]: (parameter.grad, parameter.detach()) for at, parameter in stage.parameters.items()}
    torch.save((losses, sorted(seconds)[ITERATIONS // 2], named), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


# 8. Parity: losses, every gradient and every parameter are those of plain PyTorch on one process.
#    In full: tests/distributed/parity.py, for every schedule and many models.
def train_on_one(plan: Plan) -> tuple[list[float], dict[str, tuple[Tensor | None, Tensor]]]:
    """Losses, and gradient and parameter by name, of one process that accumulates the same micro-batches."""
    model = LanguageModel()
    for name, parameter in model.named_parameters():
        parameter.data = initial_value(name, parameter.shape).data
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    losses = []
    for iteration in range(ITERATIONS):
        optimizer.zero_grad()
        loss = sum(model(*plan.inputs(iteration, n)) for n in range(plan.micro_batches)) / plan.micro_batches
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: (parameter.grad, parameter.detach()) for name, parameter in model.named_parameters()}


def main() -> None:
    torch.set_num_threads(1)  # a process with more threads cannot be forked safely
    print("µs predicted   samples held   micro-batch   schedule")
    rows = search()
    for time, held, plan in rows:
        print(f"{time:12,} {held:14} {plan.micro_batch_size:13}   {plan.schedule}")
    plan = rows[0][2]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(train_rank, (plan, folder), STAGES, start_method="fork")
        results = [torch.load(f"{folder}/{rank}.pt") for rank in range(STAGES)]
    for rank, (_, seconds, tensors) in enumerate(results):
        order = " ".join(f"{operation.kind}{operation.micro_batch}" for operation in plan.orders[rank])
        print(f"rank {rank}: {order}; {1e6 * seconds:,.0f} µs measured, {len(tensors)} parameters")
    losses, tensors = train_on_one(plan)
    found = {name: pair for _, _, part in results for name, pair in part.items()}
    torch.testing.assert_close((results[-1][0], found), (losses, tensors), rtol=1e-5, atol=1e-6)
    print(f"parity: losses {losses[0]:.3f} to {losses[-1]:.3f}, {len(tensors)} gradients and parameters")


if __name__ == "__main__":
    main()
