"""The engine of auto3d as a library: capture, partition, schedule, simulate, predict, search and run.

It knows nothing of YAML, SLURM or the command line. docs/python.md has an example that runs.

- A module on a cluster: ``Planner`` captures it, makes and predicts Plans, and searches for the fastest; ``InputSpec``,
  ``Cluster``, ``Node``, ``Accelerator``, ``Link`` and ``SearchSpace`` describe what it plans for.
- A model: ``capture_module`` gives a ``CapturedModel``, its Graph and its program; ``shard`` divides the Graph into
  Merak's subgraphs; ``partition_graph`` cuts it into stages by any method, as a ``PartitionRequest`` asks.
- A Plan: ``Plan``, ``StagePlan``; ``Plan.to_json`` and ``Plan.from_json``.
- A schedule: ``build_schedule`` by name, ``schedule_of`` a Plan; ``check_schedule`` proves it; ``simulate_schedule``
  gives a timeline, with ``uniform_costs`` where stages are equal.
- A transformers script: ``init``, ``TrainingArguments`` and ``Trainer`` run it in a pipeline (docs/trainer.md).
- A run: ``train`` runs one rank of a Plan; ``joined_world`` finds its ``World``, the rank's place among all ranks.
  ``TrainingSettings``, ``OptimizerSettings``, ``DataSettings`` and ``InputField`` say how and on what it trains.

What a caller did wrong is an ``InputError`` of one line. Names are imported at first use: planning needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from auto3d.garbage import garbage_collection_paused

if TYPE_CHECKING:
    from auto3d.capture.export import InputSpec as InputSpec
    from auto3d.capture.model import CapturedModel as CapturedModel
    from auto3d.capture.model import capture as capture_module
    from auto3d.cluster import Accelerator as Accelerator
    from auto3d.cluster import Cluster as Cluster
    from auto3d.cluster import Link as Link
    from auto3d.cluster import Node as Node
    from auto3d.data import DataSettings as DataSettings
    from auto3d.data import InputField as InputField
    from auto3d.errors import InputError as InputError
    from auto3d.partition import PartitionRequest as PartitionRequest
    from auto3d.partition import partition as partition_graph
    from auto3d.partition.merak import shard as shard
    from auto3d.plan import Plan as Plan
    from auto3d.plan import StagePlan as StagePlan
    from auto3d.planner import Planner as Planner
    from auto3d.runtime.process.joined import joined_world as joined_world
    from auto3d.runtime.process.world import World as World
    from auto3d.runtime.settings import OptimizerSettings as OptimizerSettings
    from auto3d.runtime.settings import TrainingSettings as TrainingSettings
    from auto3d.runtime.training import train as train
    from auto3d.schedule import build_schedule as build_schedule
    from auto3d.schedule import schedule_of as schedule_of
    from auto3d.schedule.check import check as check_schedule
    from auto3d.search.space import SearchSpace as SearchSpace
    from auto3d.simulate.costs import uniform as uniform_costs
    from auto3d.simulate.simulate import simulate as simulate_schedule
    from auto3d.trainer.arguments import TrainingArguments as TrainingArguments
    from auto3d.trainer.setup import init as init
    from auto3d.trainer.trainer import Trainer as Trainer

_PLACES = {  # public name -> the module that defines it, and its name there where that differs
    "Accelerator": "auto3d.cluster",
    "CapturedModel": "auto3d.capture.model",
    "Cluster": "auto3d.cluster",
    "DataSettings": "auto3d.data",
    "InputError": "auto3d.errors",
    "InputField": "auto3d.data",
    "InputSpec": "auto3d.capture.export",
    "Link": "auto3d.cluster",
    "Node": "auto3d.cluster",
    "OptimizerSettings": "auto3d.runtime.settings",
    "PartitionRequest": "auto3d.partition",
    "Plan": "auto3d.plan",
    "Planner": "auto3d.planner",
    "SearchSpace": "auto3d.search.space",
    "StagePlan": "auto3d.plan",
    "Trainer": "auto3d.trainer.trainer",
    "TrainingArguments": "auto3d.trainer.arguments",
    "TrainingSettings": "auto3d.runtime.settings",
    "World": "auto3d.runtime.process.world",
    "build_schedule": "auto3d.schedule",
    "capture_module": "auto3d.capture.model:capture",
    "check_schedule": "auto3d.schedule.check:check",
    "init": "auto3d.trainer.setup",
    "joined_world": "auto3d.runtime.process.joined",
    "partition_graph": "auto3d.partition:partition",
    "schedule_of": "auto3d.schedule",
    "shard": "auto3d.partition.merak",
    "simulate_schedule": "auto3d.simulate.simulate:simulate",
    "train": "auto3d.runtime.training",
    "uniform_costs": "auto3d.simulate.costs:uniform",
}
__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'auto3d' has no attribute {name!r}")
    module, _, inner = _PLACES[name].partition(":")
    with garbage_collection_paused():
        return getattr(import_module(module), inner or name)
