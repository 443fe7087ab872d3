"""A profile: what was measured on a real machine, with a JSON form, and the cost model's figures made of it."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from json import dumps

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError

from auto3d.cluster import Accelerator, AllReduceTimes, Cluster, Link
from auto3d.cost.model import TimesOf
from auto3d.cost.times import Times, before, times_of
from auto3d.cost.work import Work
from auto3d.errors import InputError

SCHEMA = 1


class ProfileError(InputError):
    """A profile that cannot be read, or that is of something else."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a profile is of. It says nothing about any other setting."""

    device: str  # "cpu" or "cuda"
    accelerator: str  # the recipe's kind of device
    devices_per_node: int
    threads: int  # of one process's arithmetic
    tf32: bool = False
    deterministic: bool = False


@dataclass(frozen=True, kw_only=True)
class SubgraphTimes:
    """One distinct subgraph, run by itself while no other rank computes: medians, of the fastest of several rounds."""

    name: str  # of the first module in it
    forward_s: float
    backward_s: float
    backward_weight_s: float  # of a split backward: the half that zero-bubble schedules put off
    saved_bytes: int  # of activations that wait for the backward
    repetitions: int  # in all rounds


@dataclass(frozen=True, kw_only=True)
class ModelTimes:
    """A model at one micro-batch size."""

    micro_batch_size: int
    graph: str  # the fingerprint of its Graph
    kinds: tuple[int, ...]  # of each subgraph, in the order of the model: which of ``subgraphs`` it equals
    subgraphs: tuple[SubgraphTimes, ...]

    @property
    def seconds(self) -> np.ndarray:
        """[3, subgraphs]: forward, backward and its weight half, in the order of the model."""
        rows = [(one.forward_s, one.backward_s, one.backward_weight_s) for one in self.subgraphs]
        return np.array(rows)[list(self.kinds)].T


@dataclass(frozen=True, kw_only=True)
class MessageTimes:
    """Point-to-point messages from one rank to another of its node: half of what there and back takes."""

    sizes: tuple[int, ...]  # bytes
    seconds: tuple[float, ...]
    processor_s: tuple[float, ...]  # of that, what either process computes

    @property
    def link(self) -> Link:
        latency, per_byte = _line(self.sizes, self.seconds)
        return Link(latency_s=latency, bandwidth=1 / per_byte)

    @property
    def handling(self) -> tuple[float, float]:
        """Seconds that either process computes for a message, and for each byte of it."""
        return _line(self.sizes, self.processor_s)


def _line(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Seconds of nothing, and of each byte, whose relative errors are least."""
    from scipy.optimize import nnls  # slow to import, and predictions alone do not need it

    rates = np.stack([1 / np.array(seconds), np.array(sizes) / np.array(seconds)], axis=1)
    (least, per_byte), _ = nnls(rates, np.ones(len(sizes)))
    return float(least), float(max(per_byte, 1e-15))


@dataclass(frozen=True, kw_only=True)
class Profile:
    __pydantic_config__ = ConfigDict(extra="forbid")

    setting: Setting
    host: str  # what the machine is, for a person; so the next three
    torch: str
    model: str
    made: str  # date and time, ISO 8601
    sizes: tuple[ModelTimes, ...]  # by micro-batch size
    slowdown: tuple[float, ...]  # of a rank while 1, 2, … of its node compute
    messages: MessageTimes | None  # None: a node has one device
    all_reduce: AllReduceTimes | None
    update_s: float  # of the optimizer's update, with the norm and the zeroing of gradients; of one parameter
    schema: int = SCHEMA

    def to_json(self) -> str:
        return dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str | bytes) -> "Profile":
        """Raises ProfileError that names what is wrong."""
        try:
            profile = _adapter.validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise ProfileError(f"{'.'.join(map(str, first['loc'])) or 'profile'}: {first['msg']}") from None
        if profile.schema != SCHEMA:
            raise ProfileError(f"schema: {profile.schema} is not a version this build reads; it reads {SCHEMA}")
        return profile

    def check(self, setting: Setting, fingerprint: Callable[[int], str]) -> None:
        """Raise ProfileError unless this is a profile of ``setting`` and of the model with these fingerprints."""
        for name, wanted in asdict(setting).items():
            found = getattr(self.setting, name)
            if found != wanted:
                raise ProfileError(f"it is of {name.replace('_', ' ')} {found}, and {wanted} is needed")
        least = min(self.sizes, key=lambda size: size.micro_batch_size)
        wanted = fingerprint(least.micro_batch_size)
        if least.graph != wanted:
            raise ProfileError(f"it is of {self.model} (graph {least.graph[:8]}), and graph {wanted[:8]} is needed")

    def measured(self, cluster: Cluster) -> Cluster:
        """``cluster`` with what was measured of its nodes in the place of what its recipe says."""
        accelerators = {
            kind: replace(kind, update_s=self.update_s, iteration_s=0.0, micro_batch_s=0.0)
            for kind in {node.accelerator for node in cluster.nodes}
        }
        on_processor = self.messages is not None and self.setting.device == "cpu"
        nodes = (
            replace(
                node,
                accelerator=accelerators[node.accelerator],
                inside=self.messages.link if self.messages else node.inside,
                handling=self.messages.handling if on_processor else (0.0, 0.0),
                slowdown=self.slowdown,
                all_reduce=self.all_reduce,
            )
            for node in cluster.nodes
        )
        return Cluster(nodes=tuple(nodes), device=cluster.device)

    def times_at(self, work_at: Callable[[int], Work], cuts_at: Callable[[int], Sequence[int]]) -> TimesOf:
        """Seconds of each operation: those of its subgraph, shared among its operations as the estimate has them.

        ``cuts_at`` gives the bounds of the subgraphs. Under tensor parallelism, which was not measured, a subgraph
        takes as much less as the estimate does.
        """

        def times(samples: int, accelerator: Accelerator, tp: int) -> Times:
            cuts = np.array(cuts_at(samples))
            estimates = [times_of(work_at(samples), accelerator, degree).table for degree in (1, tp)]
            whole, divided = (np.diff(table) for table in estimates)
            rows = []
            for row, seconds in zip((0, 2, 4), self.seconds(samples, len(cuts) - 1), strict=True):
                subgraph = np.repeat(np.arange(len(cuts) - 1), np.diff(cuts))
                total = np.add.reduceat(whole[row], cuts[:-1])
                even = 1 / np.diff(cuts)  # where the estimate is that nothing takes time
                share = np.divide(divided[row], total[subgraph], out=even[subgraph], where=total[subgraph] > 0)
                rows.append(before(share * seconds[subgraph]))
            none = np.zeros(len(rows[0]))
            return Times(
                forward=rows[0], forward_launch=none, backward=rows[1], backward_launch=none, backward_weight=rows[2]
            )

        return times

    def seconds(self, samples: int, subgraphs: int) -> np.ndarray:
        """[3, subgraphs], of a micro-batch of ``samples``: linear between the sizes that were measured and beyond."""
        sizes = sorted(self.sizes, key=lambda size: size.micro_batch_size)
        for size in sizes:
            if len(size.kinds) != subgraphs:
                raise ProfileError(
                    f"profile: at micro-batch size {size.micro_batch_size} the model had {len(size.kinds)} subgraphs, "
                    f"at {samples} it has {subgraphs}: measure it at {samples} too, as search.micro_batch_size"
                )
        known = [size.micro_batch_size for size in sizes]
        if len(sizes) == 1:
            return sizes[0].seconds * samples / known[0]
        upper = min(max(1, int(np.searchsorted(known, samples))), len(sizes) - 1)
        place = (samples - known[upper - 1]) / (known[upper] - known[upper - 1])
        low, high = sizes[upper - 1].seconds, sizes[upper].seconds
        return np.maximum(0.0, low + place * (high - low))


_adapter = TypeAdapter(Profile)
