"""Stage-level partitioning (RaNNC, section III-C): algorithm 1, stages and replicas; algorithm 2, the rest."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, inf, lcm

import numpy as np

from auto3d.partition.methods.rannc.atomic import Subcomponent
from auto3d.partition.methods.rannc.profile import Profiles
from auto3d.partition.methods.rannc.runs import RunCosts, Runs


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What each run of blocks would take as a stage: arrays of [replicas - 1, first block, last block].

    Infinite where there is no such run, or it cannot have so many replicas.
    """

    forward_s: np.ndarray
    backward_s: np.ndarray
    memory_bytes: np.ndarray

    def fitting(self, memory_bytes: float) -> "Choices":
        """Those that fit a device; the others become infinite."""
        fits = self.memory_bytes <= memory_bytes
        return Choices(
            forward_s=np.where(fits, self.forward_s, inf),
            backward_s=np.where(fits, self.backward_s, inf),
            memory_bytes=np.where(fits, self.memory_bytes, inf),
        )


@dataclass(frozen=True, slots=True)
class Run:
    """One stage: blocks ``first`` to ``last``, both included, on ``replicas`` devices that share the samples."""

    first: int
    last: int
    replicas: int


def form_stages(choices: Choices, stages: int, devices: int) -> tuple[Run, ...] | None:
    """Algorithm 1: the stages and replicas with the least (longest forward + longest backward); None if none fit.

    Where the published algorithm is wrong, this is not what it says:

    - It keeps for each (stages, blocks, devices) only the best sum of longest forward and longest backward. The best
      whole need not have the best parts in it: with parts of (1, 5) and (4, 1) and a next stage of (1, 5), the first
      one gives 6 and the second, the better part, 9. Here the longest backward alone is minimised, exactly, with a cap
      on forward times, and the cap is lowered until nothing can become better. (Of 400 random cases with 6 to 9 blocks
      the published one is worse in 44, by up to 7 %.)
    - It begins with V = 0 for no stages whatever the blocks and devices, so blocks could be left out; only no blocks on
      no devices is right.
    - d_min takes for granted that what d devices cannot do fewer cannot either, for this and all later numbers of
      blocks. More devices than samples cannot, though fewer can.
    """
    least = longest(choices.forward_s, stages, devices)[stages][-1, devices]
    best, found, cap = inf, None, inf
    while least < inf:
        backward_s = np.where(choices.forward_s <= cap, choices.backward_s, inf)
        slowest_backward = longest(backward_s, stages, devices)[stages][-1, devices]
        if least + slowest_backward >= best:  # infinite where no stages keep to the cap
            break
        forward_s = np.where(backward_s <= slowest_backward, choices.forward_s, inf)
        reached = longest(forward_s, stages, devices)
        slowest_forward = reached[stages][-1, devices]
        if slowest_forward + slowest_backward < best:
            best, found = slowest_forward + slowest_backward, _trace(forward_s, reached, stages, devices)
        cap = np.nextafter(slowest_forward, -inf)
    return found


def longest(cost: np.ndarray, stages: int, devices: int) -> list[np.ndarray]:
    """Entry s is, by [blocks, devices], the least possible longest cost of s stages of the first blocks on so many.

    The recurrence of section III-C, for all (b', b, d') of one number of replicas in one step.
    """
    blocks = cost.shape[-1]
    start = np.full((blocks + 1, devices + 1), inf)
    start[0, 0] = -inf
    reached = [start]
    for _ in range(stages):
        before, after = reached[-1], np.full_like(start, inf)
        for replicas in range(1, devices + 1):
            worst = np.maximum(before[:-1, None, : devices + 1 - replicas], cost[replicas - 1][:, :, None])
            after[1:, replicas:] = np.minimum(after[1:, replicas:], worst.min(axis=0))
        reached.append(after)
    return reached


def _trace(cost: np.ndarray, reached: list[np.ndarray], stages: int, devices: int) -> tuple[Run, ...]:
    """Stages that have the longest cost that ``reached`` promises."""
    runs: list[Run] = []
    last, left = cost.shape[-1] - 1, devices
    for stage in range(stages, 0, -1):
        allowed = reached[stage][last + 1, left]
        replicas, first = next(
            (replicas, first)
            for replicas in range(1, left + 1)
            for first in range(last + 1)
            if max(reached[stage - 1][first, left - replicas], cost[replicas - 1, first, last]) <= allowed
        )
        runs.append(Run(first, last, replicas))
        last, left = first - 1, left - replicas
    return tuple(reversed(runs))


@dataclass(frozen=True, kw_only=True)
class StageForm:
    """What algorithm 2 finds: the stages of one pipeline, of which ``pipelines`` work side by side."""

    runs: tuple[Run, ...]
    pipelines: int
    micro_batches: int
    samples: tuple[int, ...]  # of a micro-batch, in each replica of each stage
    forward_s: tuple[float, ...]  # of each stage, one micro-batch, message included
    backward_s: tuple[float, ...]  # recomputation included
    memory_bytes: tuple[float, ...]  # of each device of each stage

    @property
    def iteration_s(self) -> float:
        """All forwards flow through the pipeline, then all backwards (the paper's figure 1).

        Synchronising the gradients of replicas and the optimizer are left out, as in the paper.
        """
        more = self.micro_batches - 1
        return sum(sum(times) + more * max(times) for times in (self.forward_s, self.backward_s))


class StageSearch:
    """Algorithm 2: the fewest nodes per pipeline, then the fewest stages, then the best number of micro-batches.

    ``best`` is decided by the time of an iteration: the paper's objective is the time of one micro-batch, by which more
    of them would always win.

    Published, a pipeline has 1, 2, 4 ... nodes, and with n of them more than D(n - 1) stages, D the devices of a node:
    of 4 nodes with 8 devices, 17 to 24 stages are never tried, and 4 of 6 nodes leave two idle. Here n is every divisor
    of the number of nodes, and stages begin where the divisor before left off; for 1 and 2 nodes that is the same.
    """

    def __init__(
        self,
        blocks: Sequence[Sequence[Subcomponent]],
        profiles: Profiles,
        *,
        nodes: int,
        devices_per_node: int,
        global_batch: int,
        equal_slices: bool = False,
    ) -> None:
        self.runs, self.profiles = Runs(profiles.graph, blocks, profiles.costs), profiles
        self.nodes, self.devices_per_node, self.global_batch = nodes, devices_per_node, global_batch
        self.equal_slices = equal_slices
        self._costs: dict[int, RunCosts] = {}

    def search(self) -> StageForm | None:
        """None if nothing fits."""
        limit = self.profiles.costs.memory_bytes
        fewest = 1
        for devices, pipelines in self._pipelines():
            most = min(devices, self.runs.blocks)
            options = {}
            for micro_batches in self._micro_batches(pipelines):
                choices = self._choices(devices, pipelines, micro_batches, checkpointing=True).fitting(limit)
                options[micro_batches] = choices, longest(choices.forward_s, most, devices)
            for stages in range(fewest, most + 1):
                found = []
                for micro_batches, (choices, reached) in options.items():
                    if stages == 1:
                        choices = self._choices(devices, pipelines, micro_batches, checkpointing=False).fitting(limit)
                    elif reached[stages][-1, devices] == inf:
                        continue
                    runs = form_stages(choices, stages, devices)
                    if runs is not None:
                        places = [(run.replicas - 1, run.first, run.last) for run in runs]
                        found.append(
                            StageForm(
                                runs=runs,
                                pipelines=pipelines,
                                micro_batches=micro_batches,
                                samples=tuple(self._samples(pipelines * micro_batches, run.replicas) for run in runs),
                                forward_s=tuple(float(choices.forward_s[place]) for place in places),
                                backward_s=tuple(float(choices.backward_s[place]) for place in places),
                                memory_bytes=tuple(float(choices.memory_bytes[place]) for place in places),
                            )
                        )
                if found:
                    return min(found, key=lambda form: form.iteration_s)
            fewest = most + 1
        return None

    def _pipelines(self) -> Iterator[tuple[int, int]]:
        """(devices of one pipeline, pipelines)."""
        for nodes in range(1, self.nodes + 1):
            if self.nodes % nodes == 0:
                yield nodes * self.devices_per_node, self.nodes // nodes

    def _micro_batches(self, pipelines: int) -> Iterator[int]:
        micro_batches = 1
        while micro_batches * pipelines * self.profiles.smallest <= self.global_batch:
            yield micro_batches
            micro_batches *= 2

    def _choices(self, devices: int, pipelines: int, micro_batches: int, *, checkpointing: bool) -> Choices:
        """With gradient checkpointing, but where there is one stage (section IV-A).

        Replicas share the samples of a micro-batch. Where these do not divide, the paper rounds down; but some replica
        has one sample more, in some micro-batch, and all wait for it, so times and memory are those of the number
        rounded up. The number rounded down must be one that the model can run with. With ``equal_slices``, they must
        divide.

        A device holds its weights with gradients and optimizer state, what autograd keeps of one micro-batch, and the
        stage's inputs of all of them: every forward comes before the first backward. The last is not in the paper,
        whose profile is of one micro-batch. A single stage does one micro-batch after the other.
        """
        shares = pipelines * micro_batches
        shape = (devices, self.runs.blocks, self.runs.blocks)
        forward_s, backward_s, memory_bytes = np.full(shape, inf), np.full(shape, inf), np.full(shape, inf)
        run = np.triu_indices(self.runs.blocks)
        for replicas in range(1, min(devices, self.global_batch // (shares * self.profiles.smallest)) + 1):
            if self.equal_slices and self.global_batch % (shares * replicas):
                continue
            costs = self._costs_of(self._samples(shares, replicas))
            again = costs.forward_s if checkpointing else 0.0
            held = micro_batches if checkpointing else 1
            forward_s[replicas - 1][run] = (costs.forward_s + costs.send_s)[run]
            backward_s[replicas - 1][run] = (again + costs.backward_s + costs.send_back_s)[run]
            memory_bytes[replicas - 1][run] = (costs.state_bytes + costs.saved_bytes + held * costs.received_bytes)[run]
        return Choices(forward_s=forward_s, backward_s=backward_s, memory_bytes=memory_bytes)

    def _samples(self, shares: int, replicas: int) -> int:
        """Of the largest share of a micro-batch that a replica gets."""
        return -(-self.global_batch // (shares * replicas))

    def _costs_of(self, samples: int) -> RunCosts:
        if samples not in self._costs:
            self._costs[samples] = self.runs.at(self.profiles.at(samples))
        return self._costs[samples]

    def needed(self) -> str:
        """Why nothing fits, and what would."""
        total = self.nodes * self.devices_per_node
        least = (inf, 0, 0)  # bytes, stages, micro-batches
        for devices, pipelines in self._pipelines():
            most = min(devices, self.runs.blocks)
            for micro_batches in self._micro_batches(pipelines):
                for stages, checkpointing in ((range(1, 2), False), (range(2, most + 1), True)):
                    choices = self._choices(devices, pipelines, micro_batches, checkpointing=checkpointing)
                    reached = longest(choices.memory_bytes, stages[-1], devices) if stages else []
                    least = min(least, *((reached[s][-1, devices], s, micro_batches) for s in stages), least)
        if least[0] == inf:
            most = min(total, self.runs.blocks)
            few, many = total // most, -(-total // most)
            if self.equal_slices:
                problem, enough = (
                    "cannot be shared equally by",
                    f"a multiple of {lcm(few, many) * self.profiles.smallest}",
                )
            else:
                problem, enough = "are too few for", f"{many * self.profiles.smallest}"
            return (
                f"global_batch: {self.global_batch} samples {problem} {total} devices and {self.runs.blocks} "
                f"blocks; {enough} would do"
            )
        have, need = self.profiles.costs.memory_bytes / 2**20, ceil(10 * least[0] / 2**20) / 10
        return (
            f"no stages fit {total} devices of {have:,.1f} MiB with a batch of {self.global_batch}; the least that "
            f"would do is {need:,} MiB, with stages = {least[1]}, micro-batches = {least[2]}"
        )
