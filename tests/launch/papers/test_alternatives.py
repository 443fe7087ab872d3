"""Alternatives of a paper: other assumptions, tried on all claims of its items."""

import csv
from pathlib import Path

import pytest

from launch.commands.consoles import err
from launch.console.progress import sweep_progress
from launch.papers import alternatives
from launch.papers.alternatives import altered, items_of, papers, read_alternatives
from launch.papers.item import file_of, names, read_item
from launch.papers.make import make_item
from launch.papers.predict import predict_items
from launch.papers.rows import RowMaker
from launch.papers.tried import explained, try_alternatives
from launch.papers.write import CLAIMS, claims_in, write_index, write_item
from launch.recipe.error import RecipeError
from launch.recipe.settings import cluster
from tests.launch.papers.two_schedules import TWO_SCHEDULES

RESULTS = Path(__file__).parents[3] / "results" / "papers"
ITEM = (
    TWO_SCHEDULES
    + """\
    claims:
      - {says: no figure, system: merak, against: gpipe, form: reduction}
      - {says: as fast, system: merak, against: gpipe, form: ratio, paper: 1.0,
         because: [{text: a cause., changed: {search.schedule: [gpipe]}}]}
      - {says: fits, system: merak, form: fails, paper: []}
"""
)
ALTERNATIVES = """
papers: [a test]
alternatives:
  same: {text: One schedule., labels: {merak: {search.schedule: [gpipe]}}, fitted: [one]}
  no-memory: {text: No memory., changed: {cluster.memory_gib: 0.001, cluster.nodes: 7}, without: [two]}
"""


@pytest.fixture
def shipped(tmp_path, monkeypatch) -> Path:
    """A folder with two items of one paper and their alternatives."""
    for name in ("one", "two"):
        (tmp_path / f"{name}.yaml").write_text(ITEM)
    (tmp_path / "test.yaml").write_text(ALTERNATIVES)
    monkeypatch.setattr(alternatives, "_FOLDER", tmp_path)
    monkeypatch.setattr(alternatives, "names", lambda: ["one", "two"])
    monkeypatch.chdir(tmp_path)
    for module in ("launch.papers.alternatives", "launch.papers.tried"):
        monkeypatch.setattr(f"{module}.file_of", lambda name: tmp_path / f"{name}.yaml")
    return tmp_path


def made(file: Path, into: Path) -> dict[str, bytes]:
    item = read_item(file)
    with sweep_progress(err) as watcher:
        files = write_item(file.stem, item, make_item(file.stem, item, file, watcher), into)
    return {one.name: one.read_bytes() for one in files}


def test_an_alternative_gives_way_to_an_item_but_not_to_its_labels(shipped):
    found = read_alternatives("test")
    item = items_of(found)["one"]
    (part,) = altered(item, found.alternatives["no-memory"]).parts
    assert part.overrides(("two",), "gpipe")["cluster.nodes"] == 1
    assert part.overrides(("two",), "gpipe")["cluster.memory_gib"] == 0.001
    (part,) = altered(item, found.alternatives["same"]).parts
    assert part.overrides(("two",), "merak")["search.schedule"] == ["gpipe"]
    assert not any(claim.because for claim in part.claims)


def test_each_claim_with_a_figure_is_made_again_under_each_alternative(shipped):
    for name in ("one", "two"):
        made(shipped / f"{name}.yaml", shipped / "out")
    heard: list[str] = []
    table, page = try_alternatives("test", shipped / "out", heard.append)
    with table.open(newline="") as lines:
        rows = [
            (one["item"], one["claim"], one["alternative"], one["verdict"].partition(",")[0])
            for one in csv.DictReader(lines)
        ]
    assert rows == [
        ("one", "as fast", "as in the items", "differs"),
        ("one", "as fast", "same", "reproduced"),
        ("one", "as fast", "no-memory", "not compared"),  # nothing runs
        ("one", "fits", "as in the items", "reproduced"),
        ("one", "fits", "same", "reproduced"),
        ("one", "fits", "no-memory", "not reproduced"),
        ("two", "as fast", "as in the items", "differs"),
        ("two", "as fast", "same", "reproduced"),
        ("two", "fits", "as in the items", "reproduced"),
        ("two", "fits", "same", "reproduced"),
    ]
    assert sorted(heard) == ["no-memory: one: predicted", "same: one: predicted", "same: two: predicted"]
    text = page.read_text()
    assert "Of 4 claims, 1 are reproduced under every assumption, 3 under some, and 0 under none." in text
    totals = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in text.splitlines()
              if line.startswith("|")}  # fmt: skip
    assert totals["as in the items"] == ["–", "–", "2 of 4", "2 of 4"]
    assert totals["same"] == ["one", "2 of 2", "2 of 2", "4 of 4"]
    assert totals["no-memory"] == ["–", "–", "0 of 2", "0 of 2"]


def test_the_searches_of_an_experiment_are_altered_like_rows():
    found = read_alternatives("amp")
    item = items_of(found)["amp-table2"]
    (first, second) = altered(item, found.alternatives["no-tensor-parallelism"]).parts  # the third is emulated
    assert first.arguments["variants"]["as in the paper"]["all"] == {"search.tp": [1]}
    assert first.arguments["variants"]["as in the paper"]["known"] == {"cluster.more[0].accelerator": "V100-16GB-amp"}
    assert first.arguments["changes"] == item.parts[0].arguments["changes"]
    (first, second) = altered(item, found.alternatives["k80"]).parts
    assert first.arguments["changes"]["cluster.memory_gib"] == second.changes["cluster.memory_gib"] == 12


def test_the_page_of_all_claims_says_which_alternatives_reproduce_a_claim(shipped):
    for name in ("one", "two"):
        made(shipped / f"{name}.yaml", shipped / "out")
    try_alternatives("test", shipped / "out", lambda line: None)
    items = {name: read_item(shipped / f"{name}.yaml") for name in ("one", "two")}
    text = write_index(items, shipped / "out", (), explained(shipped / "out")).read_text()
    verdicts = [line.split("|")[-2].strip() for line in text.splitlines() if "as fast" in line]
    assert [words.partition("; ")[2] for words in verdicts] == ["reproduced under same"] * 2
    assert "reproduced;" not in text


def test_each_claim_that_differs_has_a_cause_or_says_that_none_was_found():
    """On the shipped pages: words of the item's own, or a line of the paper's alternatives."""
    tried, silent = explained(RESULTS), []
    for name in names():
        claims = [claim for part in read_item(file_of(name)).parts for claim in part.claims]
        lines = claims_in(RESULTS / f"{name}{CLAIMS}")
        assert lines is not None, name
        for number, (claim, line) in enumerate(zip(claims, lines, strict=True), 1):
            differs = line["verdict"].startswith(("differs", "not reproduced"))
            if differs and not (claim.note or claim.because or (name, str(number)) in tried):
                silent.append((name, claim.says))
    assert not silent


def test_items_predicted_in_several_processes_are_equal_to_the_byte(shipped):
    files = [shipped / "one.yaml", shipped / "two.yaml"]
    ready = predict_items({file: read_item(file) for file in files}, (), lambda line: None)
    for file in files:
        item = read_item(file)
        with sweep_progress(err) as watcher:
            parts = make_item(file.stem, item, file, watcher, ready=ready[file])
        assert parts == [ready[file][0]]
        pages = {one.name: one.read_bytes() for one in write_item(file.stem, item, parts, shipped / "processes")}
        assert pages == made(file, shipped / "alone")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("fitted: [one]", "fitted: [three]"), "alternatives.same.fitted: found 'three'; it takes one, two"),
        (("without: [two]", "without: [three]"), "alternatives.no-memory.without: found 'three'"),
        (("{merak: ", "{merek: "), "alternatives.same.labels: found 'merek'; it takes four, gpipe, merak, two"),
        (("text: One schedule.", "words: One schedule."), "alternatives.same.words: unknown"),
    ],
)
def test_mistakes_get_one_line(shipped, change, words):
    assert change[0] in ALTERNATIVES
    (shipped / "test.yaml").write_text(ALTERNATIVES.replace(*change))
    with pytest.raises(RecipeError) as refused:
        read_alternatives("test")
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "arguments", [["nobody"], ["merak", "merak-fig7"], ["merak", "--all"], ["merak", "search.seed=1"]]
)
def test_bad_input_ends_with_one_line(folder, auto3d, arguments):
    said = auto3d("paper", "--alternatives", *arguments, code=2).err
    assert "--alternatives" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("name", papers())
def test_shipped_alternatives_are_possible_and_no_cause_changes_the_cluster(name):
    found = read_alternatives(name)
    for item_name, item in items_of(found).items():
        for part in item.parts:
            changed = [key for claim in part.claims for cause in claim.because for key in cause.changed]
            assert not [key for key in changed if key.split(".")[0] == "cluster"], (
                "an alternative of the paper says that"
            )
        with sweep_progress(err) as watcher:
            maker = RowMaker(item_name, file_of(item_name), watcher)
        for one in found.alternatives.values():
            for part in (altered(item, one) or item).parts if item_name not in one.without else []:
                if part.how == "simulated":
                    system, setting = next(iter(part.systems)), part.settings[0]
                    recipe = maker.recipe(part, part.overrides(setting, system))
                    if "cluster.memory_gib" in one.changed and "cluster.memory_gib" not in item.parts[0].changes:
                        assert cluster(recipe).memory_bytes == pytest.approx(one.changed["cluster.memory_gib"] * 2**30)


def test_every_paper_with_simulated_claims_that_differ_has_alternatives():
    assert {one.partition("-")[0] for one in names()} == set(papers())
