"""Claims of a paper, beside what our rows say about them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from auto3d.errors import InputError
from launch.papers.item import Cause, Claim, Part, Setting, against
from launch.papers.row import Row

TOLERANCE = 0.1  # relative difference beyond which a claim is not counted as reproduced
SMALLER_IS_BETTER = ("iteration_s", "peak_gib", "mean_gib", "least_gib", "bubble")

Cell = tuple[Setting, str]  # setting, system
RowOf = Callable[[Setting, str, Mapping[str, Any]], Row]  # the row with further overrides


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A claim with our figure for it.

    ``difference`` is relative, the largest of both ends of a range; None: there is none to calculate.
    """

    claim: Claim
    ours: str
    paper: str
    difference: float | None
    holds: bool | None  # None: the paper gives nothing to compare with, or our rows are missing
    causes: tuple[tuple[Cause, "Checked"], ...] = ()

    @property
    def verdict(self) -> str:
        if self.holds is None:
            return "not compared"
        if self.difference is None:
            return "reproduced" if self.holds else "not reproduced"
        words = "reproduced" if self.holds else "differs"
        return f"{words}, {self.difference:+.0%}" if abs(self.difference) >= 0.005 else words


def check(part: Part, claim: Claim, rows: Sequence[Row], row_of: RowOf) -> Checked:
    """``claim`` beside ``rows``; where it differs, it is made again under each of its causes, by ``row_of``.

    Raises InputError where the claim names what no row has.
    """
    _refuse_unknown(part, claim, rows)
    found = _checked(part, claim, {(row.setting, row.system): row for row in rows})
    if found.holds is not False:
        return found
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
    return Checked(**{**vars(found), "causes": tuple(causes)})


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
    values = _values(claim, mine, rows, quantity)
    if not values:
        return Checked(claim=claim, ours="no value", paper=_words(claim.paper, claim), difference=None, holds=None)
    return _compare_numbers(claim, values)


def _meant(claim: Claim, setting: Setting) -> bool:
    return set(claim.settings) <= set(setting)


def _values(claim: Claim, mine: Sequence[Row], rows: Mapping[Cell, Row], quantity: str) -> list[float]:
    """Our values of the claim; settings in which a row has none are left out."""
    if claim.form == "scaling":
        first, last = (row.values.get(quantity) for row in (mine[0], mine[-1]))
        return [] if first is None or last is None else [claim.factor * last / first]
    if claim.form == "largest":
        theirs = [row.values.get(quantity, 0.0) for (_, system), row in rows.items() if system in against(claim)]
        largest = max((row.values.get(quantity, 0.0) for row in mine), default=0.0)
        return [largest / max(theirs)] if max(theirs, default=0.0) else []
    found = []
    for row in mine:
        value = row.values.get(quantity)
        compared = [rows[key].values for system in against(claim) if (key := (row.setting, system)) in rows]
        others = [each[quantity] for each in compared if quantity in each]
        if value is None or (against(claim) and not others):
            continue
        if claim.form == "value":
            found.append(claim.factor * value)
            continue
        best = min(others) if quantity in SMALLER_IS_BETTER else max(others)
        ratio = value / best
        found.append(ratio if claim.form == "ratio" else 1 - ratio)
    return found


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
    if len(ours) == 1 and len(ends) == 2:  # one value lies in the range or beside it
        nearest = min(max(ours[0], ends[0]), ends[1])
        pairs = [(ours[0], nearest)]
    else:
        pairs = list(zip(ours * (len(ends) // len(ours) or 1), ends * (len(ours) // len(ends) or 1), strict=True))
    difference = max((mine / theirs - 1 for mine, theirs in pairs), key=abs)
    return Checked(
        claim=claim,
        ours=_words(ours, claim),
        paper=_words(ends, claim),
        difference=difference,
        holds=abs(difference) <= TOLERANCE,
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
        if quantity not in row.values or not others:
            continue
        counted += 1
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
