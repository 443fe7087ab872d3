"""A profile: measured times of a model on a real machine, its JSON form, and the cost model's inputs made from it."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from json import dumps
from json import loads as from_json

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError

from auto3d.cluster import Accelerator, Cluster, Link, NodeCollectives
from auto3d.cost.times import Times, TimesOf, before, times_of
from auto3d.cost.work import Work, WorkAt
from auto3d.errors import InputError
from auto3d.share import WHOLE, Share

SCHEMA = 2
OUTLIER = 0.1  # error of a delay, as a fraction of the time of its sum
MOST_LOST = 0.9  # largest part of a sum's time that compute may lose by its slowdown; a start explains the rest


class ProfileError(InputError):
    """A profile that cannot be read, or that was made of another model or in another setting."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The conditions under which a profile was made. It is valid only under the same conditions."""

    device: str  # "cpu" or "cuda"
    accelerator: str  # name of the kind of device in the recipe
    devices_per_node: int
    threads: int  # arithmetic threads of one process
    tf32: bool = False
    precision: str = "float32"
    deterministic: bool = False
    tensor_parallel: tuple[tuple[str, str], ...] = ()  # the recipe's rules for splitting weights: (pattern, rule)


@dataclass(frozen=True, kw_only=True)
class SubgraphTimes:
    """Median times of one distinct subgraph in the fastest of several rounds, run while no other rank computes."""

    name: str  # name of its first module
    forward_s: float
    backward_s: float
    backward_weight_s: float  # the weight half of a split backward, which zero-bubble schedules put off
    saved_bytes: int  # activations kept for the backward
    repetitions: int  # runs in all rounds together


@dataclass(frozen=True, kw_only=True)
class ModelTimes:
    """The measured subgraphs of a model at one micro-batch size, as one tensor-parallel rank computes them.

    The times are without collectives.
    """

    micro_batch_size: int
    graph: str  # fingerprint of the Graph that a rank runs
    kinds: tuple[int, ...]  # for each subgraph in the order of the model, the index of its equal in ``subgraphs``
    subgraphs: tuple[SubgraphTimes, ...]
    tp: int = 1
    sequence_parallel: bool = False

    @property
    def share(self) -> Share:
        """The share of the model that was measured."""
        return Share(tp=self.tp, sequence_parallel=self.sequence_parallel)

    @property
    def seconds(self) -> np.ndarray:
        """[3, subgraphs]: seconds of forward, backward and the backward's weight half, in the order of the model."""
        rows = [(times.forward_s, times.backward_s, times.backward_weight_s) for times in self.subgraphs]
        return np.array(rows)[list(self.kinds)].T


@dataclass(frozen=True, kw_only=True)
class CandidateTimes:
    """Candidate stages of RaNNC at one micro-batch size, each distinct stage run whole.

    The tuples have one entry for each distinct stage: median times in the fastest of several rounds.
    """

    micro_batch_size: int
    kinds: dict[str, int]  # name of a candidate (auto3d.partition.methods.rannc.candidates) -> number of its equal
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    repetitions: tuple[int, ...]  # runs in all rounds together


@dataclass(frozen=True, kw_only=True)
class MessageTimes:
    """Point-to-point messages between two ranks of a node. One message takes half of a measured round trip."""

    sizes: tuple[int, ...]  # bytes
    seconds: tuple[float, ...]
    processor_s: tuple[float, ...]  # the part in which the sending or the receiving process computes

    @property
    def link(self) -> Link:
        latency, per_byte = _line(self.sizes, self.seconds)
        return Link(latency_s=latency, bandwidth=1 / per_byte)

    @property
    def handling(self) -> tuple[float, float]:
        """Seconds of compute that a message costs its sender, and as many its receiver: (per message, per byte)."""
        return _line(self.sizes, self.processor_s)


@dataclass(frozen=True, kw_only=True)
class SumTimes:
    """Sums of gradients among all ranks of a node, each beside compute of every rank that outlasts it."""

    sizes: tuple[int, ...]  # bytes
    seconds: tuple[float, ...]  # time of the sum without compute beside it
    lost_s: tuple[float, ...]  # delay of the compute by the sum

    @property
    def start_and_slowdown(self) -> tuple[float, float]:
        """``sync_start_s`` and ``sync_slowdown`` of an Accelerator, with the least errors relative to the sums' times.

        Errors above OUTLIER count less than their squares, since other work on the machine delays single measurements.

        A sum of t seconds delays compute that it slows by the fraction s by t s / (1 + s), and by its start.
        """
        from scipy.optimize import least_squares  # slow to import, and plans on figures of recipes do not need it

        rates = 1 / np.array(self.seconds)
        columns = np.stack([rates, np.ones(len(rates))], axis=1)
        lost = np.array(self.lost_s) * rates
        bounds = ([0.0, 0.0], [np.inf, MOST_LOST])
        fit = least_squares(
            lambda values: columns @ values - lost,
            (min(self.seconds) / 2, MOST_LOST / 2),
            bounds=bounds,
            loss="soft_l1",
            f_scale=OUTLIER,
            x_scale="jac",
            xtol=1e-12,
            ftol=1e-12,
            gtol=1e-12,
        )
        start, share = fit.x
        return float(start), float(share / (1 - share))


def _line(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """(seconds of an empty message, seconds per byte): the non-negative line with the least relative errors."""
    from scipy.optimize import nnls  # slow to import, and predictions do not need it

    rates = np.stack([1 / np.array(seconds), np.array(sizes) / np.array(seconds)], axis=1)
    (least, per_byte), _ = nnls(rates, np.ones(len(sizes)))
    return float(least), float(max(per_byte, 1e-15))


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measured times of one model on one host. ``host``, ``torch``, ``model`` and ``made`` are for the reader."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    setting: Setting
    host: str  # description of the machine
    torch: str
    model: str
    made: str  # date and time in ISO 8601
    sizes: tuple[ModelTimes, ...]  # one entry per micro-batch size and way of tensor parallelism; tp = 1 has all sizes
    slowdown: tuple[float, ...]  # slowdown of a rank while 1, 2, … ranks of its node compute
    messages: MessageTimes | None  # None where a node has one device
    collectives: NodeCollectives | None  # None where a node has one device
    update_s: float  # seconds per parameter of the optimizer's update, the gradient norm and the zeroing of gradients
    candidates: tuple[CandidateTimes, ...] = ()  # one entry per micro-batch size, if RaNNC's candidate stages were run
    sums: SumTimes | None = None  # None where a node has one device, or in a profile of an earlier version
    schema: int = SCHEMA

    def to_json(self) -> str:
        return dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str | bytes) -> "Profile":
        """The profile in ``text``; raises ProfileError that names the wrong key."""
        try:
            document = from_json(text)
        except ValueError:
            document = {}
        if isinstance(document, dict) and (schema := document.get("schema", SCHEMA)) != SCHEMA:
            raise ProfileError(
                f"schema: {schema} is not a version this build reads; it reads {SCHEMA}: measure the machine again"
            )
        try:
            return _adapter.validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise ProfileError(f"{'.'.join(map(str, first['loc'])) or 'profile'}: {first['msg']}") from None

    def check(self, setting: Setting, fingerprint: Callable[[int], str]) -> None:
        """Raise ProfileError unless the profile was made in ``setting`` and of the same model.

        ``fingerprint`` gives the fingerprint of the model's Graph at a micro-batch size.
        """
        for name, wanted in asdict(setting).items():
            present = getattr(self.setting, name)
            if present != wanted:
                words = name.replace("_", " ")
                raise ProfileError(f"it was measured with {words} {present}, but {wanted} is needed; measure it again")
        least = min(self._sizes(WHOLE), key=lambda size: size.micro_batch_size)
        wanted = fingerprint(least.micro_batch_size)
        if least.graph != wanted:
            raise ProfileError(
                f"it was measured on {self.model} (graph {least.graph[:8]}), but this model has graph {wanted[:8]}; "
                "measure it again"
            )

    def measured(self, cluster: Cluster) -> Cluster:
        """``cluster`` with the measured figures of its nodes in place of its recipe's."""
        sums = None if self.sums is None else self.sums.start_and_slowdown

        def measured(kind: Accelerator) -> Accelerator:
            start_s, slowdown = sums or (kind.sync_start_s, kind.sync_slowdown)
            kind = replace(kind, update_s=self.update_s, iteration_s=0.0, micro_batch_s=0.0)
            return replace(kind, sync_start_s=start_s, sync_slowdown=slowdown)

        accelerators = {kind: measured(kind) for kind in {node.accelerator for node in cluster.nodes}}
        handling = (0.0, 0.0)
        if self.messages is not None and self.setting.device == "cpu":
            handling = self.messages.handling
        nodes = (
            replace(
                node,
                accelerator=accelerators[node.accelerator],
                inside=self.messages.link if self.messages else node.inside,
                handling=handling,
                slowdown=self.slowdown,
                collectives=self.collectives,
            )
            for node in cluster.nodes
        )
        return replace(cluster, nodes=tuple(nodes))

    def times_at(self, work_at: WorkAt, cuts_at: Callable[[int], Sequence[int]]) -> TimesOf:
        """A function that gives the seconds of each operation: its estimated fraction of its subgraph's measured time.

        ``cuts_at`` gives the bounds of the subgraphs at a micro-batch size. A share that was not measured, such as a
        slice of the sequence, changes the time of a subgraph by the same ratio as it changes the estimate.
        """

        def times(samples: int, accelerator: Accelerator, share: Share) -> Times:
            cuts = cuts_at(samples)
            measured = self._nearest(share)
            base, wanted = (times_of(work_at(samples, of_share), accelerator) for of_share in (measured, share))
            return _shared_out(self.seconds(samples, len(cuts) - 1, measured), cuts, base, wanted)

        return times

    def times_of_work(self, work: Work, cuts: Sequence[int], samples: int, accelerator: Accelerator) -> Times:
        """The seconds of each operation of ``work``, the whole model's at ``samples``, as ``times_at`` has them.

        ``cuts`` bounds its subgraphs. A caller that plans with interpolated Graphs has works that no other knows.
        """
        estimate = times_of(work, accelerator)
        return _shared_out(self.seconds(samples, len(cuts) - 1), cuts, estimate, estimate)

    def seconds(self, samples: int, subgraphs: int, share: Share = WHOLE) -> np.ndarray:
        """[3, subgraphs]: seconds for a micro-batch of ``samples``, linear between and beyond the measured sizes."""
        sizes = sorted(self._sizes(share), key=lambda size: size.micro_batch_size)
        for size in sizes:
            if len(size.kinds) != subgraphs:
                raise ProfileError(
                    f"profile: the model has {len(size.kinds)} subgraphs at micro-batch size {size.micro_batch_size}, "
                    f"but {subgraphs} at {samples}; add {samples} to search.micro_batch_size and measure again"
                )
        return _along({size.micro_batch_size: size.seconds for size in sizes}, samples)

    def stage_seconds(self, name: str, samples: int) -> tuple[float, float] | None:
        """Seconds of the forward and the backward of a candidate stage, linear in samples; None if it was not run."""
        known = {}
        for size in sorted(self.candidates, key=lambda size: size.micro_batch_size):
            if (kind := size.kinds.get(name)) is not None:
                known[size.micro_batch_size] = np.array([size.forward_s[kind], size.backward_s[kind]])
        if not known:
            return None
        forward_s, backward_s = map(float, _along(known, samples))
        return forward_s, backward_s

    def _nearest(self, share: Share) -> Share:
        """The measured share from whose times the times of ``share`` follow."""
        return next(measured for measured in (share, Share(tp=share.tp), WHOLE) if self._sizes(measured))

    def _sizes(self, share: Share) -> list[ModelTimes]:
        return [size for size in self.sizes if size.share == share]


def _along(known: dict[int, np.ndarray], samples: int) -> np.ndarray:
    """The times at ``samples``, from ``known`` times at some micro-batch sizes, in order: linear between and beyond
    them.

    With 4 s at 2 samples and 6 s at 4 samples, 8 samples take 10 s.
    """
    sizes = list(known)
    if len(sizes) == 1:
        return known[sizes[0]] * samples / sizes[0]
    upper = min(max(1, int(np.searchsorted(sizes, samples))), len(sizes) - 1)
    along = (samples - sizes[upper - 1]) / (sizes[upper] - sizes[upper - 1])
    low, high = known[sizes[upper - 1]], known[sizes[upper]]
    return np.maximum(0.0, low + along * (high - low))


def _shared_out(seconds: np.ndarray, cuts: Sequence[int], base: Times, wanted: Times) -> Times:
    """Measured ``seconds`` [3, subgraphs] shared out among the operations, by the estimates ``wanted`` over ``base``.

    ``base`` estimates what was measured, and ``wanted`` what is asked for; ``cuts`` bounds the subgraphs of both.
    """
    sizes = np.diff(cuts)
    subgraph = np.repeat(np.arange(len(sizes)), sizes)
    rows = []
    for row, measured in zip((0, 2, 4), seconds, strict=True):
        total = np.add.reduceat(np.diff(base.table[row]), list(cuts[:-1]))
        even = 1 / sizes  # used where the estimate of the whole subgraph is zero
        estimates = np.diff(wanted.table[row])
        fraction = np.divide(estimates, total[subgraph], out=even[subgraph], where=total[subgraph] > 0)
        rows.append(before(fraction * measured[subgraph]))
    none = np.zeros(len(rows[0]))
    return Times(forward=rows[0], forward_launch=none, backward=rows[1], backward_launch=none, backward_weight=rows[2])


_adapter = TypeAdapter(Profile)
