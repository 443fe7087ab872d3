"""Problems for measuring the search: equal stages, stages of real models by the cost model, caps, links and devices."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf

from auto3d.capture.graph import GraphNode
from auto3d.plan import stages_between
from auto3d.schedule import build_schedule
from auto3d.search.make import PlanMaker
from auto3d.search.order_problem import problem_of
from auto3d.simulate.costs import MessageCost
from auto3d.synthesis.problem import peaks
from auto3d.synthesis.structures import BareProblem, merged, weights_on
from launch.model.candidates import candidate_of, task
from launch.model.costs import cost_model, planning_subject
from launch.model.graphs import PlanningModel
from launch.recipe.load import load

ONE_COPY = frozenset({"straight", "interleaved", "v", "wave"})  # placements with one copy of the weights
_LAYER = re.compile(r"(?:^|\.)(?:layers|block|h)\.\d+(?=\.|$)")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A problem and its group: ``equal`` (equal stages without cap), or what makes it hard for schedules by rule."""

    name: str
    group: str
    bare: BareProblem


def equal(devices: int, micro_batches: int) -> BareProblem:
    """Two equal fine stages per device with F = I = W = 1, an activation of 1 and weights of 2. No cap.

    The gradients of two copies add up in the time of F.
    """
    stages = 2 * devices
    one, none = (1.0,) * stages, (0.0,) * stages
    return BareProblem(
        devices=devices,
        micro_batches=micro_batches,
        forward=one,
        backward_input=one,
        backward_weight=one,
        recompute=one,
        sync=none,
        sync_copies=one,
        update=none,
        messages=(MessageCost(),) * (stages - 1),
        overlap=True,
        speed=(1.0,) * devices,
        activation=one,
        kept=(0.1,) * stages,
        deferred=(0.5,) * stages,
        weights=(2.0,) * stages,
        memory=(inf,) * devices,
    )


@cache
def of_model(recipe_name: str, devices: int, *, fine: int, tp: int, samples: int) -> BareProblem:
    """Fine stages of equally many layers of a recipe's model, in seconds and bytes of the project's cost model.

    Each fine stage is on ``tp`` devices of a node of the recipe's cluster; messages cross the link between nodes.
    Weights are all bytes that the memory model counts beside activations. No cap. The gradients of two copies add up in
    the time that Chimera's do between two nodes. There is one micro-batch.
    """
    overrides = [f"cluster.nodes={fine}", f"cluster.devices_per_node={tp}", f"training.global_batch={samples}"]
    plan_keys = {"dp": 1, "tp": tp, "pp": fine, "micro_batch_size": samples, "schedule": "1f1b", "recompute": "none"}
    recipe = load(recipe_name, [*overrides, *(f"plan.{key}={value}" for key, value in plan_keys.items())])
    subject = planning_subject(recipe, only_predicted=True)
    model = cost_model(recipe, subject)
    candidate = replace(candidate_of(recipe.values.plan), partition="autopipe")
    plan = PlanMaker(subject, model, task(recipe)).unlimited(candidate)
    graph = PlanningModel(recipe, predicted=True).graph(2)
    plan = replace(plan, stages=stages_between(_layer_bounds(graph.nodes, subject.cuts(samples), fine)))
    problem = problem_of(plan, model, may_recompute=frozenset(range(fine)))
    costs = problem.costs
    copied = replace(plan, schedule="chimera", global_batch=fine * samples)  # micro-batches for each of its pipes
    return BareProblem(
        devices=devices,
        micro_batches=1,
        forward=costs.forward,
        backward_input=costs.backward_input,
        backward_weight=costs.backward_weight,
        recompute=costs.recompute,
        sync=(0.0,) * fine,
        sync_copies=model.costs(copied).sync,
        update=(0.0,) * fine,
        messages=costs.messages,
        overlap=costs.overlap,
        speed=(1.0,) * devices,
        activation=problem.activation,
        kept=problem.kept,
        deferred=problem.deferred,
        weights=model.memory.beside_activations(plan),
        memory=(inf,) * devices,
    )


def _layer_bounds(nodes: Sequence[GraphNode], cuts: Sequence[int], stages: int) -> list[int]:
    """Where stages of equally many layers begin, at the nearest possible cut before each layer; then the end."""
    first: dict[str, int] = {}
    for position, node in enumerate(nodes):
        if found := _LAYER.search(node.module):
            first.setdefault(node.module[: found.end()], position)
    layers = sorted(first.values())
    starts = [layers[len(layers) * stage // stages] for stage in range(1, stages)]
    return [0, *(max(cut for cut in cuts if cut <= start) for start in starts), cuts[-1]]


def capped(bare: BareProblem, fraction: float, *, recompute: bool = False) -> BareProblem:
    """``bare`` with a ``fraction`` of 1F1B's activations on its fullest device.

    Every device has the memory for its weights on the fullest device, and that fraction.
    """
    schedule = build_schedule("1f1b", devices=bare.devices, micro_batches=bare.micro_batches)
    problem = merged(bare, schedule)
    assert problem is not None
    memory = max(weights_on(bare, schedule)) + fraction * max(peaks(problem, schedule))
    return replace(bare, memory=(memory,) * bare.devices, may_recompute=recompute)


def slow_links(bare: BareProblem, ratio: float) -> BareProblem:
    """``bare`` with messages that take ``ratio`` of the mean forward of a device; sums of copies slow down likewise."""
    time = ratio * sum(bare.forward) / bare.devices
    before = max(cost.latency + cost.forward for cost in bare.messages)
    slower = time / before if before else 1.0
    return replace(
        bare,
        messages=(MessageCost(forward=time, backward=time),) * (bare.stages - 1),
        sync_copies=tuple(slower * each for each in bare.sync_copies),
    )


def mixed(bare: BareProblem) -> BareProblem:
    """``bare`` with speed 0.6 on the second half of its devices, and 0.6 of the memory beside weights under a cap."""
    half, rest = bare.devices // 2, bare.devices - bare.devices // 2
    straight = weights_on(bare, build_schedule("1f1b", devices=bare.devices, micro_batches=bare.micro_batches))
    slower = max(straight) + 0.6 * (bare.memory[0] - max(straight))
    memory = (*bare.memory[:half], *[min(slower, bare.memory[0])] * rest)
    return replace(bare, speed=(*[1.0] * half, *[0.6] * rest), memory=memory)


def cases() -> Iterator[Case]:
    """All cases, those of equal stages without cap first; each hard case with N = 4D and N = 2D micro-batches."""
    for devices in (4, 8, 16):
        for each in (2, 4, 8):
            bare = replace(equal(devices, each * devices), placements=ONE_COPY)
            yield Case(name=f"equal, N = {each}D", group="equal", bare=bare)
    yield Case(name="equal, any copies", group="equal", bare=equal(8, 32))
    for each in (4, 2):
        yield from _hard_cases(each)


def _hard_cases(each: int) -> Iterator[Case]:
    """Stages that differ, caps, slow links and mixed devices, with ``each`` micro-batches per device."""

    def many(bare: BareProblem) -> BareProblem:
        return replace(bare, micro_batches=each * bare.devices)

    few = equal(8, 8 * each)
    gpt = many(of_model("gpt1.4b", 8, fine=16, tp=1, samples=2))
    llama = many(of_model("llama3-8b", 8, fine=16, tp=8, samples=1))
    deep = many(of_model("llama3-8b", 16, fine=32, tp=8, samples=1))
    t5 = many(of_model("t5-11b", 8, fine=16, tp=8, samples=4))
    deep_t5 = many(of_model("t5-11b", 16, fine=48, tp=8, samples=4))
    for name, bare in (("GPT-1.4B", gpt), ("LLaMA-3 8B", llama), ("LLaMA-3 8B", deep)):
        yield Case(name=name, group="head", bare=bare)
    for bare in (t5, deep_t5):
        yield Case(name="T5-11B", group="encoder-decoder", bare=bare)
    for fraction in (1.0, 0.75, 0.5):
        for name, bare in (("equal", few), ("GPT-1.4B", gpt), ("T5-11B", t5), ("LLaMA-3 8B", deep)):
            yield Case(name=f"{name}, {fraction:.0%}", group="cap", bare=capped(bare, fraction))
    for fraction in (0.75, 0.5):
        for name, bare in (("equal", few), ("GPT-1.4B", gpt), ("T5-11B", t5)):
            yield Case(
                name=f"{name}, {fraction:.0%}", group="cap, recompute", bare=capped(bare, fraction, recompute=True)
            )
    for ratio in (0.2, 0.5):
        for name, bare in (("equal", few), ("GPT-1.4B", gpt), ("equal", equal(16, 16 * each))):
            yield Case(name=f"{name}, {ratio:g} F", group="slow links", bare=slow_links(bare, ratio))
    yield Case(name="GPT-1.4B, 0.2 F, 75%", group="slow links, cap", bare=slow_links(capped(gpt, 0.75), 0.2))
    yield Case(name="equal", group="mixed devices", bare=mixed(few))
    yield Case(name="GPT-1.4B", group="mixed devices", bare=mixed(gpt))
    yield Case(name="GPT-1.4B, 100%", group="mixed devices, cap", bare=mixed(capped(gpt, 1.0)))
