"""Plans for one module on one cluster, for those who use the engine as a library."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from torch import nn

from auto3d.capture.export import InputSpec
from auto3d.capture.graph import Graph
from auto3d.capture.model import CapturedModel, capture
from auto3d.cluster import Cluster
from auto3d.cost.estimate import Estimate
from auto3d.cost.model import CostModel
from auto3d.cost.training_options import TrainingOptions
from auto3d.cost.work import Work, work_of, work_of_local
from auto3d.derived.local_graph import LocalGraph, local_graphs
from auto3d.derived.of_share import derived
from auto3d.derived.planned_split import planned_split
from auto3d.errors import InputError
from auto3d.partition.merak import Sharding, shard
from auto3d.plan import Plan
from auto3d.search.algorithms import run_algorithm
from auto3d.search.axes import Candidate
from auto3d.search.make import PlanMaker
from auto3d.search.planned_model import PlannedGraphs
from auto3d.search.search import Budget, Ranked, Search
from auto3d.search.space import Domain, SearchSpace, Workload
from auto3d.share import Share
from auto3d.tensor_placement import Split


class Planner:
    """Makes, predicts and searches Plans that train the module of ``build`` on ``cluster``.

    ``build`` makes the module; ``inputs`` names the keyword arguments of its forward, which must return the loss (or an
    output that has it). Every Plan trains on ``global_batch`` samples per iteration with this ``seed``.
    ``tensor_rules`` say how tensor parallelism splits weights, as the key model.tensor_parallel of a recipe does.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        inputs: Mapping[str, InputSpec],
        cluster: Cluster,
        *,
        global_batch: int,
        seed: int = 0,
        training: TrainingOptions | None = None,
        tensor_rules: Mapping[str, str] | None = None,
    ) -> None:
        self.cluster = cluster
        options = training or TrainingOptions()
        precision = options.precision
        captured_in = precision if options.autocast else "float32"
        self._capture = cache(
            lambda samples: capture(build, inputs, samples, device=cluster.device, precision=captured_in)
        )
        self._sharding = cache(lambda samples: shard(self._capture(samples).graph))
        self._workload = Workload(global_batch=global_batch, seed=seed)

        def cuts(graph: Graph) -> tuple[int, ...]:
            return self._sharding(graph.micro_batch_size).bounds

        def work(graph: Graph) -> Work:
            return work_of(graph, cuts(graph), precision=precision)

        def split(samples: int, share: Share) -> dict[str, Split]:
            return planned_split(self._capture(samples), share, rules=tensor_rules or {})

        @cache
        def graphs_of(samples: int, share: Share) -> tuple[LocalGraph, ...]:
            chosen = model.split(samples, share.of_all_tokens) if share.tp > 1 else {}
            return local_graphs(derived(self._capture(samples), share, split=chosen))

        def share_work(samples: int, share: Share) -> Work:
            local = graphs_of(samples, share.of_any_slice)[share.slice_number]
            return work_of_local(model.work(samples), local, precision=precision)

        model = PlannedGraphs(lambda samples: self._capture(samples).graph, work, cuts, split, share_work)
        self._model = CostModel(cluster, options, model.work)
        self._maker = PlanMaker(model, self._model, self._workload)

    def captured(self, micro_batch_size: int) -> CapturedModel:
        """The module captured for micro-batches of this many samples; raises CaptureError where it cannot be."""
        return self._capture(micro_batch_size)

    def sharding(self, micro_batch_size: int) -> Sharding:
        """Merak's subgraphs: stages are cut between them."""
        return self._sharding(micro_batch_size)

    def plan(self, **choices: Any) -> Plan:
        """The Plan of these choices, the fields of a Candidate, such as dp=2, tp=2, pp=4, micro_batch_size=2.

        ``partition`` names the method that cuts the stages; the others are as in a Plan. Raises InputError where no
        Plan is possible, or a device of the cluster lacks the memory for it.
        """
        return self._maker.plan(Candidate(**choices))

    def predict(self, plan: Plan) -> Estimate:
        """Seconds of an iteration with their components, and peak bytes of each pipeline device."""
        return self._model.estimate(plan)

    def search(
        self, space: SearchSpace, *, algorithm: str = "exhaustive", candidates: int = 1000, best: int = 10
    ) -> list[Ranked]:
        """Candidates of ``space`` with their Plans and predicted seconds, fastest first.

        Looks at no more than ``candidates``; an exhaustive search keeps at least the ``best`` fastest. Raises
        InputError, with the commonest reason, where none can be.
        """
        search = Search(
            Domain(space, self.cluster, self._workload), self._maker, Budget(candidates=candidates, best=best)
        )
        run_algorithm(algorithm, search, self._workload.seed)
        ranked = search.ranked()
        if not ranked:
            refusal = search.refused().foremost
            problem = f"no candidate can run; {refusal.count} of them: {refusal.example}: {refusal.reason}"
            raise InputError(f"search: {problem}", kind=refusal.kind)
        return ranked
