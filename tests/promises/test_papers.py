"""Quick items of every paper are made again, and keep every claim that results/papers/ says they keep.

Of two of them, a part is left out that no verdict depends on; `make papers` makes them whole.
"""

import csv
from pathlib import Path

import pytest

from launch.papers.item import FOLDER, names, read_item
from tests.promises.running import ROOT, run

QUICK = (
    "amp-placement",
    "chimera-table2",
    "chimera-table3",
    "merak-fig3",
    "merak-table2",
    "rannc-coarsening",
    "rannc-fig5",
)
LEFT_OUT = {  # item -> text of its file, and what stands for it here
    "merak-table2": {
        "\n        GPT-2.5B: [model=gpt-2.5b, data.sequence_length=1024]": "",
        "\n        GPT-175B: []": "",
    },
    "rannc-coarsening": {"layers: [12, 24, 48]": "layers: [12, 48]", "uncoarsened: 24": "uncoarsened: 12"},
}
TIMES = ("ms", "ms_of_loading_ranks", "minutes", "seconds")  # they depend on the machine, which may be busy


def test_every_paper_has_two_but_amp_of_which_only_one_is_quick():
    papers = {name.partition("-")[0] for name in names()}
    quick = {paper: sum(item.startswith(f"{paper}-") for item in QUICK) for paper in papers}
    assert quick == dict.fromkeys(papers, 2) | {"amp": 1}


@pytest.mark.parametrize("item", QUICK)
def test_an_item_keeps_its_claims(item: str, tmp_path: Path):
    text = (FOLDER / f"{item}.yaml").read_text()
    for whole, part in LEFT_OUT.get(item, {}).items():
        assert text.count(whole) == 1
        text = text.replace(whole, part)
    (tmp_path / f"{item}.yaml").write_text(text)
    run(f"auto3d paper {item}.yaml --output made", tmp_path)
    committed, made = ROOT / "results/papers" / f"{item}-claims.csv", tmp_path / "made" / f"{item}-claims.csv"
    assert made.is_file() == committed.is_file()
    if committed.is_file():
        ours, known = verdicts(made), verdicts(committed)
        assert ours.keys() == known.keys()
        timed = timed_claims(item)
        assert {claim: ours[claim] for claim in ours if claim not in timed} == {
            claim: known[claim] for claim in known if claim not in timed
        }


def verdicts(file: Path) -> dict[str, str]:
    with file.open() as rows:
        return {row["claim"]: row["verdict"].partition(",")[0] for row in csv.DictReader(rows)}


def timed_claims(item: str) -> set[str]:
    """The claims of ``item`` about times of this machine: no commit decides their verdict alone."""
    return {
        claim.says
        for part in read_item(FOLDER / f"{item}.yaml").parts
        for claim in part.claims
        if (claim.quantity or part.quantity) in TIMES
    }
