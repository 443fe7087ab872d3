"""The search for an order of operations: seeded by given schedules, improved until its time is over."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, combinations, product
from time import thread_time

import numpy as np

from auto3d.errors import InputError
from auto3d.schedule.operation import Schedule
from auto3d.simulate.simulate import simulate
from auto3d.synthesis.anneal import anneal, seed_random
from auto3d.synthesis.bound import lower_bound
from auto3d.synthesis.modulo import ModuloPattern, better_pattern, first_pattern, order_by_pattern
from auto3d.synthesis.policy import Policy, changed_policy, list_schedule, usual_policies
from auto3d.synthesis.problem import Problem, exceeds
from auto3d.synthesis.tables import (
    NAME,
    TINY,
    BackwardChoices,
    Tables,
    bounds_of,
    order_of_schedule,
    orders_of_one_at_a_time,
    schedule_of_order,
    tables_of,
    with_choices,
)
from auto3d.synthesis.timing import Room, make_room, makespan
from auto3d.synthesis.unroll import resized

TOLERANCE = 1e-9  # relative error of sums of floats
ALL_CHOICES = 256  # numbers of choices up to which all are tried
SMALL = 64  # micro-batches times stages up to which the time is for two searches: one may end with the wrong choices
PERIODS = 3  # periods of D micro-batches that are searched; of more micro-batches, the steady state is repeated
LEAST = 12  # micro-batches that are searched if there are as many
ROUNDS = (32, 16, 8, 8, 8, 8)  # orders that each round of annealing takes further
LENGTHENED = 8  # orders of fewer micro-batches of which each round makes orders of all
POLICY_SHARE = 0.25  # share of the time for policies and choices
PATTERN_SHARE = 0.2  # share of the time for patterns, where memory is limited
PATTERN_CHOICES = 3  # choices of the best orders so far that patterns are sought with
PATTERN_RUNS = 2  # patterns that are sought with each choice
LAST_SHARE = 0.2  # share of the time for annealing all micro-batches at the end, if fewer were searched
HOT, COLD = 0.5, 0.005  # first and last temperature of annealing, in mean durations of an operation
PENALTY = 8.0  # price of holding the largest activation beyond the memory, in mean durations of an operation
REACH = 12  # farthest move of an operation
TIMED = 100  # tries by which the time of a try is measured, in annealing orders
PATTERN_TIMED = 500  # and patterns


@dataclass(frozen=True, kw_only=True)
class Synthesis:
    """The order that a search found for a Problem."""

    schedule: Schedule  # with its syncs and updates
    makespan: float  # simulated time, in the unit of the costs
    begun_from: str  # name of the schedule that it improves, or "policy" or "pattern"


def synthesize(problem: Problem, *, seconds: float, seeds: Sequence[Schedule] = (), seed: int = 0) -> Synthesis:
    """The shortest order found in ``seconds`` of processor time, never longer than a seed that fits ``problem``.

    Seeds have the stages and the devices of ``problem``. The search ends early at an order that a lower bound proves to
    be the best. It ends by the clock otherwise, so equal arguments may give other orders. Raises InputError if no order
    is found that fits the memory.
    """
    bound = lower_bound(problem).time * (1 + TOLERANCE)
    best = min(_fitting(problem, seeds), key=lambda synthesis: synthesis.makespan, default=None)
    searches = 2 if problem.micro_batches * problem.stages <= SMALL else 1
    orders = chain.from_iterable(
        _OrderSearch(problem, seconds / searches, seeds, 2 * seed + number).orders() for number in range(searches)
    )
    while (best is None or best.makespan > bound) and (order := next(orders, None)) is not None:
        if best is None or order.time < best.makespan * (1 - TOLERANCE):
            best = _synthesis(problem, order)
    if best is None:
        raise InputError(
            f"schedule synthesized: no order was found in {seconds:g} s that fits the memory of the devices"
        )
    return best


def _fitting(problem: Problem, seeds: Sequence[Schedule]) -> Iterator[Synthesis]:
    """The seeds that fit the memory."""
    for schedule in seeds:
        if not any(exceeds(problem, schedule)):
            time = simulate(schedule, problem.costs).makespan
            yield Synthesis(schedule=replace(schedule, name=NAME), makespan=time, begun_from=schedule.name)


@dataclass(frozen=True, kw_only=True)
class _Order:
    choices: BackwardChoices
    codes: np.ndarray
    time: float
    begun_from: str
    rule: Policy | ModuloPattern | None = None  # makes such an order of any number of micro-batches


def _synthesis(problem: Problem, order: _Order) -> Synthesis:
    bounds = bounds_of(tables_of(problem, order.choices))
    schedule = schedule_of_order(problem, order.choices, order.codes, bounds)
    time = simulate(schedule, problem.costs).makespan
    return Synthesis(schedule=schedule, makespan=time, begun_from=order.begun_from)


class _OrderSearch:
    """One search. If micro-batches are many, it searches orders of fewer, and repeats their steady state."""

    def __init__(self, problem: Problem, seconds: float, seeds: Sequence[Schedule], seed: int) -> None:
        self._all, self._seeds, self._seconds = problem, seeds, seconds
        self._random = np.random.default_rng(seed)
        seed_random(seed)
        period = problem.devices * problem.pipes
        searched = max(PERIODS * period, LEAST)
        self._skipped = period * max(0, (problem.micro_batches - searched) // period)
        self._few = replace(problem, micro_batches=problem.micro_batches - self._skipped)
        self._space = lru_cache(None)(_space)
        self._try_s: dict[Problem, float] = {}  # seconds of one try of annealing
        self._lengthened: dict[tuple[BackwardChoices, bytes], list[_Order]] = {}
        self._begin = 0.0
        self._compile()
        self._begin = thread_time()

    def orders(self) -> Iterator[_Order]:
        """Orders of all micro-batches, better and better, until the time is over; the first order needs least
        memory."""
        alone = [(choice, codes) for choice in self._choices() for codes in orders_of_one_at_a_time(self._all, choice)]
        yield from _best((self._order(self._all, choice, codes, "policy") for choice, codes in alone), 1)
        orders = self._with_changed_policies(_best([*self._by_policies(), *self._seeded()], ROUNDS[0]))
        yield from self._of_all(orders)
        if np.isfinite(self._all.free).any():
            orders = _best([*orders, *self._by_patterns(orders)], ROUNDS[0])
            yield from self._of_all(orders)
        ends = np.linspace(self._spent(), 1 - LAST_SHARE if self._skipped else 1, len(ROUNDS) + 1)[1:]
        for count, end in zip(ROUNDS, ends, strict=True):
            chosen, begin = orders[:count], self._spent()
            chosen += [other for order in chosen[: count // 2] if (other := self._with_changed_choices(order))]
            for number, order in enumerate(chosen, 1):
                orders.append(self._annealed(self._few, order, begin + (end - begin) * number / len(chosen)))
            orders = _best(orders, ROUNDS[0])
            whole = self._of_all(orders)
            yield from whole
        if self._skipped and whole:
            yield self._annealed(self._all, whole[0], 1.0)

    def _compile(self) -> None:
        """Load or compile what is compiled, so that it does not take a part of the search's time."""
        choices = BackwardChoices()
        tables, _, _ = self._space(self._few, choices)
        self._by_policy(self._few, choices, next(usual_policies(tables)))
        order = self._order(self._few, choices, next(orders_of_one_at_a_time(self._few, choices)), "policy")
        for _ in range(2):  # the first time includes compiling
            self._try_s.clear()
            self._annealed(self._few, order, 0.0)
        better_pattern(tables, first_pattern(tables), 1)

    def _spent(self) -> float:
        """The share of the time that is over."""
        return (thread_time() - self._begin) / self._seconds

    def _order(self, problem: Problem, choices: BackwardChoices, codes: np.ndarray, begun_from: str) -> _Order:
        tables, bounds, room = self._space(problem, choices)
        return _Order(choices=choices, codes=codes, time=makespan(tables, codes, bounds, room), begun_from=begun_from)

    def _choices(self) -> list[BackwardChoices]:
        """All choices, if they are few; otherwise the seeds' choices, and all or none of the stages."""
        split, recompute = sorted(self._all.may_split), sorted(self._all.may_recompute)
        if 2 ** (len(split) + len(recompute)) <= ALL_CHOICES:
            pairs = product(_subsets(split), _subsets(recompute))
        else:
            pairs = product(((), tuple(split)), ((), tuple(recompute)))
        choices = [BackwardChoices(split=frozenset(some), recompute=frozenset(others)) for some, others in pairs]
        read = [order_of_schedule(self._all, schedule) for schedule in self._seeds]
        return list(dict.fromkeys([*(parsed[0] for parsed in read if parsed is not None), *choices]))

    def _seeded(self) -> Iterator[_Order]:
        """The seeds as orders of few micro-batches."""
        for schedule in self._seeds:
            read = order_of_schedule(self._all, schedule)
            if read is None:
                continue
            choices, codes = read
            fewer: Iterable[np.ndarray] = [codes]
            if self._skipped:
                tables, bounds, _ = self._space(self._all, choices)
                fewer = resized(tables, codes, bounds, -self._skipped // self._all.pipes)
            for resized_codes in fewer:
                yield self._order(self._few, choices, resized_codes, schedule.name)

    def _by_policies(self) -> Iterator[_Order]:
        """Orders by the usual policies under all choices; under each choice, at least the leanest orders."""
        choices = self._choices()
        alone = [(choice, codes) for choice in choices for codes in orders_of_one_at_a_time(self._few, choice)]
        for number, (choice, codes) in enumerate(alone, 1):
            order = self._order(self._few, choice, codes, "policy")
            yield self._annealed(self._few, order, POLICY_SHARE / 4 * number / len(alone))
        pairs = [(choice, policy) for choice in choices for policy in usual_policies(self._space(self._few, choice)[0])]
        for number in self._random.permutation(len(pairs)):
            if self._spent() > POLICY_SHARE / 2:
                return
            listed = self._by_policy(self._few, *pairs[number])
            if listed is not None:
                yield listed

    def _by_policy(self, problem: Problem, choices: BackwardChoices, policy: Policy) -> _Order | None:
        tables, bounds, room = self._space(problem, choices)
        codes = np.zeros(bounds[-1], np.int32)
        if not list_schedule(tables, policy, bounds, room, codes):
            return None
        return replace(self._order(problem, choices, codes, "policy"), rule=policy)

    def _by_patterns(self, orders: list[_Order]) -> Iterator[_Order]:
        """Orders by patterns with the choices of ``orders``, and with all backwards split."""
        split = BackwardChoices(split=self._all.may_split)
        choices = list(dict.fromkeys([split, *(order.choices for order in orders)]))[: 1 + PATTERN_CHOICES]
        begin, runs = self._spent(), [choice for choice in choices for _ in range(PATTERN_RUNS)]
        for number, choice in enumerate(runs, 1):
            tables, _, _ = self._space(self._few, choice)
            started = thread_time()
            _, pattern = better_pattern(tables, first_pattern(tables), PATTERN_TIMED)
            try_s = (thread_time() - started) / PATTERN_TIMED
            left = (begin + PATTERN_SHARE * number / len(runs) - self._spent()) * self._seconds
            fits, pattern = better_pattern(tables, pattern, max(0, int(left / try_s)))
            if fits:
                yield self._by_pattern(self._few, choice, pattern)

    def _by_pattern(self, problem: Problem, choices: BackwardChoices, pattern: ModuloPattern) -> _Order:
        codes = order_by_pattern(self._space(problem, choices)[0], pattern)
        return replace(self._order(problem, choices, codes, "pattern"), rule=pattern)

    def _with_changed_policies(self, orders: list[_Order]) -> list[_Order]:
        """``orders`` and better orders, by random changes of their policies."""
        changing = [order for order in orders if isinstance(order.rule, Policy)]
        number = 0
        while changing and self._spent() < POLICY_SHARE:
            number = (number + 1) % len(changing)
            policy = changing[number].rule
            assert isinstance(policy, Policy)
            other = self._by_policy(self._few, changing[number].choices, changed_policy(policy, self._random))
            if other is not None and other.time <= changing[number].time:
                changing[number] = other
        return _best([*orders, *changing], ROUNDS[0])

    def _with_changed_choices(self, order: _Order) -> _Order | None:
        """``order`` with one stage that splits or recomputes, or no longer does; None if no stage may."""
        may = [(True, stage) for stage in sorted(self._all.may_split)]
        may += [(False, stage) for stage in sorted(self._all.may_recompute)]
        if not may:
            return None
        splits, stage = may[self._random.integers(len(may))]
        choices = order.choices
        if splits:
            choices = replace(choices, split=choices.split ^ {stage})
        else:
            choices = replace(choices, recompute=choices.recompute ^ {stage})
        tables, _, _ = self._space(self._few, order.choices)
        return self._order(self._few, choices, with_choices(tables, order.codes, choices), order.begun_from)

    def _of_all(self, orders: list[_Order]) -> list[_Order]:
        """The best of the first of ``orders`` with all micro-batches."""
        if not self._skipped:
            return orders[:1]
        return _best(chain.from_iterable(map(self._longer, orders[:LENGTHENED])), 1)

    def _longer(self, order: _Order) -> list[_Order]:
        """The best that ``order`` becomes with all micro-batches; nothing if it has no steady state that fits."""
        key = (order.choices, order.codes.tobytes())
        if key not in self._lengthened:
            tables, bounds, _ = self._space(self._few, order.choices)
            longer = [
                self._order(self._all, order.choices, codes, order.begun_from)
                for codes in resized(tables, order.codes, bounds, self._skipped // self._all.pipes)
            ]
            if isinstance(order.rule, ModuloPattern):
                longer.append(self._by_pattern(self._all, order.choices, order.rule))
            elif order.rule is not None and (whole := self._by_policy(self._all, order.choices, order.rule)):
                longer.append(whole)
            self._lengthened[key] = _best(longer, 1)
        return self._lengthened[key]

    def _annealed(self, problem: Problem, order: _Order, end: float) -> _Order:
        """``order`` annealed until the share ``end`` of the time is over."""
        tables, bounds, room = self._space(problem, order.choices)
        mean = max(float((tables.duration * tables.exists).sum() / tables.exists.sum()), TINY)
        penalty = PENALTY * mean / max(float(tables.during.max()), TINY)
        try_s = self._try_s.get(problem, 0.0)
        tries = int((end - self._spent()) * self._seconds / try_s) if try_s else TIMED
        if tries <= 0:
            return order
        best, begin = order.codes.copy(), thread_time()
        anneal(tables, order.codes.copy(), bounds, room, best, tries, HOT * mean, COLD * mean, penalty, REACH)
        if tries >= TIMED:
            self._try_s[problem] = (thread_time() - begin) / tries
        return self._order(problem, order.choices, best, order.begun_from)


def _space(problem: Problem, choices: BackwardChoices) -> tuple[Tables, np.ndarray, Room]:
    """The arrays of a problem and its choices, the bounds of devices in an order, and the room to time it."""
    tables = tables_of(problem, choices)
    bounds = bounds_of(tables)
    return tables, bounds, make_room(tables, int(bounds[-1]))


def _best(orders: Iterable[_Order], count: int) -> list[_Order]:
    """The ``count`` shortest of ``orders`` that fit the memory; at most a quarter of them make the same choices."""
    possible = {(order.choices, order.codes.tobytes()): order for order in orders if order.time < np.inf}
    chosen: list[_Order] = []
    taken: Counter[BackwardChoices] = Counter()
    for order in sorted(possible.values(), key=lambda order: order.time):
        taken[order.choices] += 1
        if len(chosen) < count and taken[order.choices] <= max(1, count // 4):
            chosen.append(order)
    return chosen


def _subsets(stages: Sequence[int]) -> list[tuple[int, ...]]:
    return list(chain.from_iterable(combinations(stages, size) for size in range(len(stages) + 1)))
