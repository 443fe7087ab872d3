"""Claims of a paper, beside what our rows say about them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from auto3d.errors import InputError
from launch.papers.item import Cause, Claim, Part, Setting, against
from launch.papers.row import Row

TOLERANCE = 0.1  # relative difference beyond which a claim is not counted as reproduced
STEADY = 0.005  # relative change from one setting to the next that a trend does not count
SMALLER_IS_BETTER = ("iteration_s", "peak_gib", "mean_gib", "least_gib", "bubble")

Cell = tuple[Setting, str]  # setting, system
RowOf = Callable[[Setting, str, Mapping[str, Any]], Row]  # the row with further overrides


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A claim with our figure for it.

    ``difference`` is relative to the paper's figure or, of a ratio, to its gain: what it has beyond 1. It is the
    largest of all settings; None: there is none to calculate.
    """

    claim: Claim
    ours: str
    paper: str
    difference: float | None
    holds: bool | None  # None: the paper gives nothing to compare with
    causes: tuple[tuple[Cause, "Checked"], ...] = ()

    @property
    def verdict(self) -> str:
        if self.holds is None:
            return "not compared"
        if self.difference is None:
            return "reproduced" if self.holds else "not reproduced"
        words = "reproduced" if self.holds else "differs"
        gain = " of the gain" if _by_gain(self.claim) else ""
        return f"{words}, {self.difference:+.0%}{gain}" if abs(self.difference) >= 0.005 else words


def check(part: Part, claim: Claim, rows: Sequence[Row], row_of: RowOf | None) -> Checked:
    """``claim`` beside ``rows``; where it differs, it is made again under each of its causes, by ``row_of`` if given.

    Raises InputError where the claim names what no row has.
    """
    _refuse_unknown(part, claim, rows)
    checked = _checked(part, claim, {(row.setting, row.system): row for row in rows})
    if checked.holds is not False or row_of is None:
        return checked
    causes = []
    for cause in claim.because:
        if not cause.changed:
            continue
        again = {
            (row.setting, row.system): row_of(row.setting, row.system, cause.changed)
            if cause.system in (None, row.system)
            else row
            for row in rows
            if row.system in (claim.system, *against(claim)) and _meant(claim, row.setting)
        }
        causes.append((cause, _checked(part, claim, again)))
    return Checked(**{**vars(checked), "causes": tuple(causes)})


def _refuse_unknown(part: Part, claim: Claim, rows: Sequence[Row]) -> None:
    """Refuse a claim about what no row has. Only the rows of an experiment say which systems and settings there are."""
    where = f"{part.title!r}, claim {claim.says!r}"
    systems = list(dict.fromkeys(row.system for row in rows))
    for system in (claim.system, *against(claim)):
        if system not in systems:
            raise InputError(f"{where}: there is no system {system!r}; it takes {', '.join(systems)}")
    mine = [row for row in rows if row.system == claim.system and _meant(claim, row.setting)]
    if not mine:
        settings = list(dict.fromkeys(", ".join(row.setting) for row in rows))
        raise InputError(f"{where}: found settings {claim.settings}; it takes words of {'; '.join(settings)}")
    quantity = claim.quantity or part.quantity
    known = list(dict.fromkeys(name for row in mine for name in row.values))
    if part.how == "experiment" and claim.form not in ("fails", "plan") and known and quantity not in known:
        raise InputError(f"{where}: found quantity {quantity!r}; it takes {', '.join(known)}")


def _checked(part: Part, claim: Claim, rows: Mapping[Cell, Row]) -> Checked:
    settings = [setting for setting, system in rows if system == claim.system and _meant(claim, setting)]
    mine = [rows[setting, claim.system] for setting in settings]
    if claim.form == "fails":
        return _compare_words(claim, [", ".join(row.setting) for row in mine if row.kind == "memory"])
    if claim.form == "plan":
        return _compare_plans(claim, [row.plan for row in mine])
    quantity = claim.quantity or part.quantity
    if claim.form in ("most", "least"):
        return _compare_order(claim, mine, rows, quantity)
    if claim.form == "levels-off":
        return _compare_levels(claim, [row for row in mine if quantity in row.values], quantity)
    values, missing = _values(claim, mine, rows, quantity), _missing(claim, mine, rows, quantity)
    if not values:
        holds = False if claim.paper is not None and missing else None
        return Checked(claim=claim, ours="no value", paper=_words(claim.paper, claim), difference=None, holds=holds)
    checked = _compare_trend(claim, values) if claim.form == "trend" else _compare_numbers(claim, values)
    if not missing:
        return checked
    ours = f"{checked.ours}; no value in {missing} of {missing + len(values)} settings"
    return replace(checked, ours=ours, holds=checked.holds and False)


def _meant(claim: Claim, setting: Setting) -> bool:
    return set(claim.settings) <= set(setting)


def _missing(claim: Claim, mine: Sequence[Row], rows: Mapping[Cell, Row], quantity: str) -> int:
    """The number of settings in which the claim's system has no value; of a ratio, though others have."""
    if claim.form == "scaling":
        return sum(quantity not in row.values for row in _ends(claim, mine))
    if claim.form not in ("value", "ratio", "reduction", "trend"):
        return 0
    compared = against(claim)
    without = [row.setting for row in mine if quantity not in row.values]
    return sum(
        not compared
        or any(quantity in rows[setting, system].values for system in compared if (setting, system) in rows)
        for setting in without
    )


def _values(claim: Claim, mine: Sequence[Row], rows: Mapping[Cell, Row], quantity: str) -> list[float]:
    """Our values of the claim; settings in which a row has none are left out."""
    if claim.form == "scaling":
        first, last = (row.values.get(quantity) for row in _ends(claim, mine))
        return [] if first is None or last is None else [claim.factor * last / first]
    if claim.form == "largest":
        theirs = [row.values.get(quantity, 0.0) for (_, system), row in rows.items() if system in against(claim)]
        largest = max((row.values.get(quantity, 0.0) for row in mine), default=0.0)
        return [largest / max(theirs)] if max(theirs, default=0.0) else []
    values = []
    for row in mine:
        value = row.values.get(quantity)
        compared = [rows[key].values for system in against(claim) if (key := (row.setting, system)) in rows]
        others = [their_values[quantity] for their_values in compared if quantity in their_values]
        if value is None or (against(claim) and not others):
            continue
        if claim.form == "value" or not others:
            values.append(claim.factor * value)
            continue
        best = min(others) if quantity in SMALLER_IS_BETTER else max(others)
        ratio = value / best
        values.append(1 - ratio if claim.form == "reduction" else ratio)
    return values


def _compare_numbers(claim: Claim, values: Sequence[float]) -> Checked:
    ours = {
        "range": [min(values), max(values)],
        "mean": [sum(values) / len(values)],
        "largest": [max(values)],
        "smallest": [min(values)],
    }[claim.over]
    if len(ours) == 2 and _words(ours[:1], claim) == _words(ours[1:], claim):
        ours = ours[:1]
    paper = claim.paper
    if paper is None or isinstance(paper, (str, list)):
        return Checked(claim=claim, ours=_words(ours, claim), paper="", difference=None, holds=None)
    ends = list(paper) if isinstance(paper, tuple) else [paper]
    nearest = [min(max(mine, ends[0]), ends[-1]) for mine in ours]  # each lies in the paper's range or beside it
    difference = max((_difference(claim, *pair) for pair in zip(ours, nearest, strict=True)), key=abs)
    return Checked(
        claim=claim,
        ours=_words(ours, claim),
        paper=_words(ends, claim),
        difference=difference,
        holds=abs(difference) <= TOLERANCE,
    )


def _ends(claim: Claim, mine: Sequence[Row]) -> list[Row]:
    """The two rows that a claim of the form scaling compares."""
    if claim.between is None:
        return [mine[0], mine[-1]]
    return [next(row for row in mine if label in row.setting) for label in claim.between]


def _difference(claim: Claim, ours: float, paper: float) -> float:
    """The relative difference; for a ratio, the difference of the gains: 1.02 has a fifth of the gain of 1.10, so
    -0.8."""
    return (ours - 1) / (paper - 1) - 1 if _by_gain(claim) else ours / paper - 1


def _by_gain(claim: Claim) -> bool:
    """Whether the claim is a gain: a ratio that the paper has above 1, or below it, and not about 1."""
    paper = claim.paper
    if claim.form != "ratio" or not isinstance(paper, int | float | tuple):
        return False
    ends = paper if isinstance(paper, tuple) else (paper,)
    return min(ends) > 1 or max(ends) < 1


def _compare_trend(claim: Claim, values: Sequence[float]) -> Checked:
    pairs = list(pairwise(values))
    ours = "neither falls nor rises"
    if all(after <= before * (1 + STEADY) for before, after in pairs) and values[-1] < values[0] * (1 - STEADY):
        ours = "falls"
    if all(after >= before * (1 - STEADY) for before, after in pairs) and values[-1] > values[0] * (1 + STEADY):
        ours = "rises"
    shown = f"{ours}: {', '.join(f'{value:.3g}' for value in values)}"
    paper = str(claim.paper)
    return Checked(claim=claim, ours=shown, paper=paper, difference=None, holds=ours == paper if pairs else None)


def _compare_levels(claim: Claim, mine: Sequence[Row], quantity: str) -> Checked:
    values = [row.values[quantity] for row in mine]
    level = len(values)
    while level and all(abs(value / values[level - 1] - 1) < STEADY for value in values[level:]):
        level -= 1
    ours = ", ".join(mine[level].setting) if level < len(values) - 1 else "nowhere"
    return Checked(
        claim=claim, ours=ours, paper=str(claim.paper), difference=None, holds=ours == claim.paper if values else None
    )


def _compare_order(claim: Claim, mine: Sequence[Row], rows: Mapping[Cell, Row], quantity: str) -> Checked:
    holds, counted = 0, 0
    for row in mine:
        others = [
            other.values[quantity]
            for (setting, system), other in rows.items()
            if setting == row.setting
            and system != claim.system
            and (not against(claim) or system in against(claim))
            and quantity in other.values
        ]
        if not others:
            continue
        counted += 1
        if quantity not in row.values:  # the others run where this system does not
            continue
        value = row.values[quantity]
        holds += value >= max(others) if claim.form == "most" else value <= min(others)
    ours = f"in {holds} of {counted}" if counted else "no value"
    paper = "always" if claim.paper is None else str(claim.paper)
    return Checked(claim=claim, ours=ours, paper=paper, difference=None, holds=holds == counted if counted else None)


def _compare_words(claim: Claim, ours: Sequence[str]) -> Checked:
    paper = [claim.paper] if isinstance(claim.paper, str) else claim.paper
    assert paper is None or isinstance(paper, list)
    holds = None if paper is None else list(ours) == paper
    return Checked(
        claim=claim,
        ours="; ".join(ours) or "none",
        paper="; ".join(paper or []) or "none",
        difference=None,
        holds=holds,
    )


def _compare_plans(claim: Claim, ours: Sequence[str]) -> Checked:
    wanted = str(claim.paper)
    holds = bool(ours) and all(set(wanted.split()) <= set(plan.split()) for plan in ours)
    return Checked(claim=claim, ours="; ".join(dict.fromkeys(ours)), paper=wanted, difference=None, holds=holds)


def _words(numbers: object, claim: Claim) -> str:
    """Numbers as the claim's form writes them: a reduction in per cent, others with three digits."""
    if numbers is None:
        return ""
    listed = list(numbers) if isinstance(numbers, (list, tuple)) else [numbers]
    form = "{:.1%}" if claim.form == "reduction" else "{:.3g}"
    return " to ".join(form.format(number) for number in listed)
