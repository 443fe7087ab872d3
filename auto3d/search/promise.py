"""What a candidate promises before its Plan is made: a lower bound of its time, and the memory that it needs.

A search looks first at the candidates that promise most, so it makes the Plans of few of them. A promise takes a few
look-ups: it takes the whole model as one stage, and divides it evenly among the pipeline devices.
"""

from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import inf

from auto3d.cost.collectives import GroupLink
from auto3d.errors import InputError
from auto3d.plan import SUB_PIPELINED
from auto3d.schedule import SCHEDULES, parse_schedule
from auto3d.schedule.shape import shape
from auto3d.search.axes import AXES, CHOICES, EQUAL, Candidate
from auto3d.search.make import PlanMaker
from auto3d.search.placement import Degrees, place
from auto3d.search.recompute import FULL, NONE, schedule_options
from auto3d.search.space import Domain
from auto3d.share import Share, share_of

_ROUNDING = 1 - 1e-9  # a plan adds the same times in a different order
_OF_TIME = tuple(name for name in CHOICES if AXES[name].bounds_time)
_AT_LEAST_THE_MEAN = ("simulated", "amp")  # methods that take no less than the mean work of a device


class Promises:
    """The promises of candidates whose Plans ``maker`` makes."""

    def __init__(self, maker: PlanMaker) -> None:
        self._model, self._global_batch = maker.model, maker.workload.global_batch
        kinds = dict.fromkeys(node.accelerator for node in self._model.cluster.nodes)
        self._kinds = tuple(
            dict.fromkeys(kind for accelerator in kinds for kind in (accelerator, accelerator.crossing()))
        )
        self._links = lru_cache(None)(self._make_links)
        self._pass_s = lru_cache(None)(self._make_pass_s)
        self._bytes = lru_cache(None)(self._model.whole_bytes)

    def least_s(self, candidate: Candidate) -> float:
        """A lower bound of the seconds of an iteration of ``candidate``, whatever its stages; zero if none is known.

        The busiest device has at least the mean work of all devices. Tensor-parallel collectives count on the links of
        the placement; messages, bubbles and gradient syncs do not count.
        """
        if candidate.tp == 1:
            return self._least_s(candidate, (None,))
        try:
            links = self._links(candidate.placement, Degrees.of(candidate))
        except InputError:  # there is no such placement: the maker says so
            return 0.0
        return self._least_s(candidate, links)

    def least_of_degrees_s(self, domain: Domain, degrees: Candidate) -> float:
        """A lower bound of ``least_s`` of all candidates of ``domain`` with these degrees."""
        choices = domain.choices_of(degrees)
        alike = {value == FULL: value for value in choices["recompute"]}  # all that the promise tells apart
        choices = {**choices, "recompute": list(alike.values())}
        kinds = product(*(choices[name] for name in _OF_TIME))
        variants = (replace(degrees, **dict(zip(_OF_TIME, kind, strict=True))) for kind in kinds)
        return min(self._least_s(candidate, (None,)) for candidate in variants)

    def least_bytes(self, candidate: Candidate) -> float:
        """A lower bound of the bytes on the fullest device.

        It is the model's state, divided evenly among the devices, or the activations of a model that recomputes
        nothing, divided such that all stages hold equally much for the micro-batches that they have in flight.
        """
        try:
            whole = self._bytes(candidate.micro_batch_size, share_of(candidate))
            stages = self._least_stages(candidate) if candidate.recompute == NONE else inf
        except InputError:
            return 0.0
        # A schedule with several pipes holds a stage on several pipeline devices, which shard its optimizer too.
        shards = self._model.cluster.devices if candidate.shard_optimizer else 1
        state = (whole.weights + whole.optimizer / shards) / candidate.pp
        return _ROUNDING * max(state, whole.activations / stages)

    def _least_stages(self, candidate: Candidate) -> float:
        """The number by which to divide the activations of one micro-batch; infinite where it is not known."""
        name, given = parse_schedule(candidate.schedule)
        if name not in SCHEDULES or SCHEDULES[name].explicit or candidate.replicas != EQUAL:
            return inf
        sizes = {"devices": candidate.pp, "micro_batches": self._micro_batches(candidate)}
        options = schedule_options(name, given, candidate.recompute, candidate.sync, **sizes)
        form = shape(name, **sizes, options=options)
        return inf if form.recompute or form.parts > 1 else sum(1 / number for number in form.in_flight)

    def expected_bytes(self, candidate: Candidate) -> float:
        """An estimate of the bytes on the fullest device, for the order in which candidates are tried."""
        try:
            whole = self._bytes(candidate.micro_batch_size, share_of(candidate))
        except InputError:
            return inf
        in_flight = min(self._micro_batches(candidate), candidate.pp)
        held = in_flight * whole.activations / candidate.pp
        if candidate.recompute != NONE:
            held = min(held, in_flight * whole.message + whole.activations / candidate.pp)
        shards = candidate.dp if candidate.shard_optimizer else 1
        return (whole.weights + whole.optimizer / shards) / candidate.pp + held

    def _micro_batches(self, candidate: Candidate) -> int:
        return self._global_batch // (candidate.dp * candidate.micro_batch_size)

    def _least_s(self, candidate: Candidate, links: tuple[GroupLink | None, ...]) -> float:
        name, options = parse_schedule(candidate.schedule)
        family = SCHEDULES.get(name)
        in_parts = family is not None and (family.sliced or "scale" in options)  # a part takes a time of its own
        if family is None or in_parts or self._model.method not in _AT_LEAST_THE_MEAN or candidate.replicas != EQUAL:
            return 0.0
        share = share_of(candidate)
        halved = candidate.tp > 1 and candidate.tensor_overlap == SUB_PIPELINED
        try:
            times = [self._pass_s(candidate.micro_batch_size, share, link, halved) for link in links]
        except InputError:  # the model cannot be captured or divided so: the maker says so
            return 0.0
        once = min(forward + backward for forward, backward, _ in times) / candidate.pp
        if candidate.recompute == FULL:
            # Stage by stage, recomputation is at most a forward. If the last stage of pp leaves it out, the others
            # have all the work but at most twice the work of the last stage, which takes no longer than the busiest.
            every = "recompute" in family.options
            again = min(map(sum, times)) / (candidate.pp if every else candidate.pp + 1)
            once = max(once, again)
        return _ROUNDING * self._micro_batches(candidate) * once

    def _make_links(self, placement: str, degrees: Degrees) -> tuple[GroupLink, ...]:
        """The different links of the tensor-parallel groups."""
        placed, tp = place(placement, self._model.cluster, degrees), degrees.tp
        return self._model.group_links(
            [ranks[first : first + tp] for ranks in placed for first in range(0, len(ranks), tp)]
        )

    def _make_pass_s(
        self, samples: int, share: Share, link: GroupLink | None, halved: bool
    ) -> tuple[float, float, float]:
        """Seconds of a forward, a backward and a recomputation of the whole model on the fastest kind of device."""
        times = [self._model.whole_pass_s(samples, share, kind, link, halved=halved) for kind in self._kinds]
        return min(t[0] for t in times), min(t[1] for t in times), min(t[2] for t in times)
