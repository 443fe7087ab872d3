"""The table of what does not go together is what is refused, and what docs/runtime.md shows."""

import re
from pathlib import Path

import pytest

from auto3d.plan import SUB_PIPELINED, PlanError
from auto3d.schedule.combinations import EXCLUDED, check_together, divisions
from auto3d.share import Share

PAGE = (Path(__file__).parents[2] / "docs/runtime.md").read_text()
SECTION = PAGE.partition("## What does not go together")[2].partition("\n## ")[0]


def test_the_page_has_the_table():
    shown = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", SECTION, re.MULTILINE)[2:]
    assert shown == [(one.name, other.name, reason) for one, other, reason in EXCLUDED]


@pytest.mark.parametrize(("one", "other", "reason"), EXCLUDED, ids=lambda each: getattr(each, "name", None))
def test_both_features_of_a_row_are_refused_and_either_alone_is_not(one, other, reason):
    for alone in (one, other):
        check_together({alone})
    words = f"{one.name} and {other.name} do not go together: {reason}; use {one.without}, or {other.without}"
    with pytest.raises(PlanError, match=f"^{re.escape(words)}$"):
        check_together({other, one})


def test_the_features_of_a_plan():
    def names(share: Share, overlap: str = SUB_PIPELINED) -> set[str]:
        return {feature.name for feature in divisions(share, overlap=overlap)}

    assert names(Share()) == set()
    assert names(Share(tp=2)) == {"tensor parallelism", "sub-pipelining"}
    assert names(Share(tp=2, slices=2), overlap="none") == {
        "tensor parallelism",
        "slices of the sequence",
        "tensor parallelism of slices of the sequence",
    }
    assert names(Share(tp=2, sequence_parallel=True), overlap="none") == {"tensor parallelism", "sequence parallelism"}
