"""Random models of layers on random clusters with little memory, to search on."""

from random import Random

from auto3d.cluster import Accelerator, Cluster, Link, Node
from auto3d.cost.layers import Layer, work_of_layers
from auto3d.cost.model import CostModel
from auto3d.cost.training_options import TrainingOptions
from auto3d.search.make import PlanMaker
from auto3d.search.planned_model import PlannedLayers
from auto3d.search.search import Budget, Search
from auto3d.search.space import Domain, SearchSpace, Workload

SCHEDULES = ("1f1b", "gpipe", "interleaved-1f1b", "chimera", "zb-h1")


def random_case(seed: int, **axes) -> tuple[Domain, PlanMaker]:
    """A transformer of random size on up to 16 devices; in half of the cases some devices are slower."""
    random = Random(seed)
    hidden, sequence = random.choice([512, 1024, 2048]), random.choice([256, 1024])
    vocabulary, depth = random.choice([8_000, 50_000]), random.randrange(8, 25)
    block = Layer(
        parameters=12 * hidden**2,
        flops=24 * sequence * hidden**2 + 4 * sequence**2 * hidden,
        products=6,
        traffic=sequence * hidden * random.uniform(20, 60),
        saved=sequence * hidden * random.uniform(10, 40),
        output=sequence * hidden,
        reductions=2,
    )
    head = Layer(parameters=vocabulary * hidden, flops=2 * sequence * hidden * vocabulary, saved=sequence * vocabulary)
    table = Layer(parameters=vocabulary * hidden, traffic=2 * sequence * hidden, output=sequence * hidden, reductions=1)
    layers = (table, *[block] * depth, head)
    training = TrainingOptions(precision=random.choice(["float32", "float16"]))
    devices, nodes = random.choice([2, 4]), random.choice([1, 2, 4])
    state = sum(layer.parameters for layer in layers) * 16
    memory = state * random.uniform(0.3, 2.0) / random.choice([1, 2, 4]) + 2**30
    kinds = [
        Accelerator(name=name, peak_flops=peak, memory_bytes=memory, memory_bandwidth=bandwidth)
        for name, peak, bandwidth in (("fast", 60e12, 900e9), ("slow", 20e12, 300e9))
    ]
    inside = Link(latency_s=1e-5, bandwidth=random.choice([10e9, 100e9]))
    outside = Link(latency_s=3e-5, bandwidth=random.choice([1e9, 10e9]), lanes=1)
    mixed = random.random() < 0.5
    cluster = Cluster(
        nodes=tuple(
            Node(devices=devices, accelerator=kinds[mixed and random.random() < 0.5], inside=inside, outside=outside)
            for _ in range(nodes)
        ),
        device="cuda",
    )
    every = [degree for degree in range(1, devices * nodes + 1) if devices * nodes % degree == 0]
    axes = {
        "tp": every, "schedule": SCHEDULES, "recompute": ["none", "full"], "partition": "auto", "placement": "auto",
    } | axes  # fmt: skip
    workload = Workload(global_batch=random.choice([16, 32]), seed=1)
    planned = PlannedLayers(
        layers=layers,
        layer_work=lambda samples, tp: work_of_layers(layers, samples, tp, precision=training.precision),
        times=None,
    )
    model = CostModel(cluster, training, planned.work)
    return Domain(SearchSpace(**axes), cluster, workload), PlanMaker(planned, model, workload)


def searched(
    algorithm, case: tuple[Domain, PlanMaker], *, candidates: int = 10**6, seed: int = 1, **settings
) -> Search:
    search = Search(*case, Budget(candidates=candidates, **settings.pop("budget", {})), **settings)
    algorithm(search, seed)
    return search
