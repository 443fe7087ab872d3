"""The program of two halves: what runs per half, what runs once, and what is refused."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from auto3d.capture.export import InputSpec
from auto3d.capture.model import CapturedModel, capture
from auto3d.derived.dropout_mask import DROPOUT_MASK
from auto3d.derived.halves import sub_pipelined
from auto3d.derived.model import Derived
from auto3d.derived.shards import tensor_parallel
from auto3d.partition.segment import segments
from auto3d.partition.stage import cut
from auto3d.partition.turns import Handover, Turn, turns, values_with_gradient
from auto3d.plan import PlanError, StagePlan, stages_between
from auto3d.share import Share
from tests.models import captured
from tests.soak import soak


def halved(model: CapturedModel, **options) -> Derived:
    return sub_pipelined(tensor_parallel(model, Share(tp=2, **options)))


@pytest.fixture(scope="module")
def gpt2() -> Derived:
    return halved(captured("gpt2-dropout", 4))


def once(model: Derived) -> list[str]:
    """Operators of operations that run once for a micro-batch, and are neither cheap nor a dropout's mask."""
    operators = {node.name: node.target for node in model.program.exported.program.nodes}
    return [
        node.operator.split(".")[1]
        for node in model.program.graph.nodes
        if node.name not in model.half_of and not node.from_inputs and operators[node.name] is not DROPOUT_MASK
    ]


@pytest.mark.parametrize(
    ("name", "sequence_parallel"),
    [
        ("bert", False),
        ("llama", True),
        ("t5", True),
        *soak(
            ("vit", True),
            ("swin", False),
            ("bert", True),
            ("llama", False),
            ("vit", False),
            ("swin", True),
            ("t5", False),
        ),
    ],
)
def test_products_run_on_halves_and_the_loss_once(name, sequence_parallel):
    model = halved(captured(name, 2), sequence_parallel=sequence_parallel)
    ran = Counter(once(model))
    assert not ran.keys() & {"linear", "addmm", "conv2d", "scaled_dot_product_attention"}
    assert ran["cross_entropy_loss"] + ran["vocabulary_cross_entropy"] == 1
    plain = tensor_parallel(captured(name, 2), Share(tp=2, sequence_parallel=sequence_parallel)).program.graph
    products = {node.name: node.flops for node in plain.nodes if node.flops > 10_000 and node.saves}
    nodes = {node.name: node for node in model.program.graph.nodes}
    for product, flops in products.items():
        if f"{product}_half0" in nodes:
            assert [nodes[f"{product}_half{half}"].flops for half in (0, 1)] == [flops / 2] * 2


def test_attention_with_dropout_in_its_kernel_runs_once(gpt2):
    """Its kernel draws one mask for all samples; everything around it runs on halves."""
    assert Counter(once(gpt2))["scaled_dot_product_attention"] == 4
    assert Counter(once(gpt2))["addmm"] == 0


def test_stages_and_kept_ranges_of_the_whole_graph_have_their_place(gpt2):
    count, local = len(gpt2.whole.graph.nodes), gpt2.program.graph
    assert list(gpt2.positions[0]) == sorted(gpt2.positions[0])
    of_name = {node.name: position for position, node in enumerate(gpt2.whole.graph.nodes)}
    for node, position in zip(local.nodes, gpt2.positions[0], strict=True):
        name = node.name.rsplit("_half", 1)[0]
        assert of_name.get(name, position) <= position  # a joined or sliced value belongs to its first user
    plans = [replace(each, kept=each.operations) for each in stages_between([0, count // 2, count])]
    first, second = gpt2.stages(plans)
    assert first.kept == first.operations == ((0, first.operations[0][1]),)
    stages = cut(local, (first, second))
    assert {gpt2.half_of.get(transfer.value.name) for transfer in stages[1].received} >= {0, 1}


def all_turns(model: Derived, kept: tuple = ()) -> list[Turn]:
    count = len(model.program.graph.nodes)
    (stage,) = cut(model.program.graph, [StagePlan(operations=((0, count),))])
    divided = segments(model.program.graph, stage, kept or [(0, count)])
    return list(turns(model.program, divided, model.half_of))


def exposed(order: tuple[Turn, ...], backward: bool) -> int:
    """Collectives of halves that begin while none of the other half's pieces can run before they are needed."""
    count = 0
    for number, turn in enumerate(order):
        if not isinstance(turn, Handover) or turn.half is None or not (turn.backward if backward else turn.forward):
            continue
        result = turn.takes if backward else turn.node
        between = []
        for later in order[number + 1 :]:
            if isinstance(later, Handover):
                if (later.node if backward else later.takes) == result:
                    break
                continue
            if result in (later.segment.gives if backward else later.segment.takes):
                break
            between.append(later)
        count += not any(each.half == 1 - turn.half for each in between)
    return count


def test_every_collective_runs_under_the_other_half():
    """Except for one at each end of a direction, where the other half has nothing left or nothing yet."""
    model = halved(captured("llama", 2))
    (only,) = all_turns(model)
    forward = [t for t in only.forward if isinstance(t, Handover) and t.forward and t.half is not None]
    backward = [t for t in only.backward if isinstance(t, Handover) and t.backward and t.half is not None]
    assert len(forward) >= 2 * 2 * 4  # two per layer and half
    assert len(backward) >= 2 * 2 * 4
    assert exposed(only.forward, backward=False) <= 2
    assert exposed(only.backward, backward=True) <= 2


def test_a_turn_has_what_it_needs(gpt2):
    """Replays both orders: nothing runs before what it takes, and everything runs once."""
    with_gradient = values_with_gradient(gpt2.program.exported.program)
    for each in all_turns(gpt2, kept=((0, len(gpt2.program.graph.nodes) // 2),)):
        present = set(each.segment.takes)
        for turn in each.forward:
            takes, gives = (
                ([turn.takes], [turn.node]) if isinstance(turn, Handover) else (turn.segment.takes, turn.segment.gives)
            )
            assert present.issuperset(takes)
            assert present.isdisjoint(gives)
            present.update(gives)
        assert present.issuperset(each.segment.gives)
        position = {id(turn): number for number, turn in enumerate(each.backward)}
        maker = {}
        for turn in each.forward:
            for name in [turn.node] if isinstance(turn, Handover) else turn.segment.gives:
                maker[name] = turn
        for turn in each.backward:
            for name in [turn.takes] if isinstance(turn, Handover) else turn.segment.takes:
                if name in with_gradient and name in maker and id(maker[name]) in position:
                    assert position[id(maker[name])] > position[id(turn)]


class Blocks(nn.Module):
    """Two blocks per layer, each with one collective in the forward and one in the backward."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        sizes = ((32, 256), (256, 32))
        self.scale = nn.Parameter(torch.ones(32))
        self.blocks = nn.ModuleList(nn.ModuleList(nn.Linear(*size) for size in sizes) for _ in range(2 * layers))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = value * self.scale
        for first, second in self.blocks:
            value = value + second(torch.tanh(first(torch.tanh(value))))
        return value.square().mean()


def seconds(order: tuple[Turn, ...], block_s: float, exchange_s: float, *, backward: bool) -> float:
    """The end of ``order`` if half a block computes for ``block_s``, and half a collective takes ``exchange_s``."""
    now = link = 0.0
    ready: dict[str, float] = {}
    for turn in order:
        collective, computes = None, 0.0
        if isinstance(turn, Handover):
            takes, gives, collective = [turn.takes], [turn.node], turn.backward if backward else turn.forward
        else:
            takes, gives = list(turn.segment.takes), list(turn.segment.gives)
            computes = block_s * sum("_0_linear" in name for name in turn.segment.nodes)
        needs, makes = (gives, takes) if backward else (takes, gives)
        now = max([now, *(ready.get(name, 0.0) for name in needs)]) + computes
        end = now
        if collective is not None:
            end = link = max(link, now) + exchange_s
        for name in makes:
            ready[name] = max(end, ready.get(name, 0.0))
    return max(now, *ready.values())


@pytest.mark.parametrize("exchange_s", [0.25, 0.5, 1.0, 1.5, 2.0, 3.0])
def test_the_order_takes_as_long_as_the_paper_says(exchange_s):
    """Merak, TPDS 2023, section 5.3: K layers, each with a forward of Tm, a backward of 2 Tm and collectives of Ta."""
    layers, compute_s = 3, 1.0
    inputs = {"value": InputSpec(shape=(8, 32), dtype=torch.float32)}
    (only,) = all_turns(halved(capture(lambda: Blocks(layers), inputs, 4)))
    forward = seconds(only.forward, compute_s / 4, exchange_s / 4, backward=False)
    backward = seconds(only.backward, 2 * compute_s / 4, exchange_s / 4, backward=True)
    ends = compute_s * 3 / 4 + exchange_s / 2
    each = max(compute_s, exchange_s) + max(2 * compute_s, exchange_s)
    assert forward + backward == pytest.approx(ends + (layers - 1 / 4) * each)


class WithBatchNorm(nn.Module):
    def __init__(self, statistics: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 256), nn.Linear(256, 32)
        self.norm = nn.BatchNorm1d(32, track_running_stats=statistics)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(self.second(torch.tanh(self.first(value))))).square().mean()


class Mixing(nn.Module):
    """Attention between the samples of a micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 256), nn.Linear(256, 32)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        mixed = torch.softmax(value @ value.transpose(0, 1), 0) @ value
        return torch.tanh(self.second(torch.tanh(self.first(mixed)))).square().mean()


@pytest.mark.parametrize(
    ("build", "samples", "message"),
    [
        (lambda: WithBatchNorm(True), 4, "of norm, which writes to the buffer norm.* use tensor_overlap: none"),
        (lambda: WithBatchNorm(False), 4, "batch_norm.* statistics of all samples"),
        (Mixing, 4, "combines the samples"),
        (Mixing, 3, "two halves, and a rank has 3; choose an even number"),
    ],
)
def test_refusals(build, samples, message):
    model = capture(build, {"value": InputSpec(shape=(32,), dtype=torch.float32)}, samples)
    with pytest.raises(PlanError, match=message):
        halved(model)
