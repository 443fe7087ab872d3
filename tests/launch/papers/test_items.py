"""Items of recipes/papers/: what they declare is possible, and what they claim is compared by these rules."""

from pathlib import Path

import pytest

from auto3d.errors import InputError
from launch.commands.consoles import err
from launch.console.progress import sweep_progress
from launch.papers.claims import check
from launch.papers.experiments import EXPERIMENTS
from launch.papers.item import Claim, Part, file_of, names, read_item
from launch.papers.make import make_item
from launch.papers.row import Row
from launch.papers.rows import RowMaker
from launch.papers.write import write_index, write_item
from tests.launch.papers.two_schedules import TWO_SCHEDULES
from tests.soak import soak

SMALL = (
    TWO_SCHEDULES
    + """\
      none: {search.schedule: [gpipe], search.dp: [1, 3, 5, 7, 9], cluster.memory_gib: 0.01}  # on 4 devices
    figure: {form: bars}
    printed: {gpipe: {two: 1.0}}
    claims:
      - {says: merak is faster, system: merak, against: gpipe, form: reduction, paper: 5.0,
         because: [{text: it is no other schedule., changed: {search.schedule: [gpipe]}, system: merak}]}
      - {says: no memory, system: none, form: fails, paper: [two, four]}
"""
)


@pytest.mark.parametrize(
    ("name", "every_system"), [*((name, False) for name in names()), *soak(*((name, True) for name in names()))]
)
def test_all_recipes_of_shipped_items_are_possible(name: str, every_system: bool) -> None:
    """Every label and every cause with the first system, and every system; `make soak` has each with each."""
    item = read_item(file_of(name))
    with sweep_progress(err) as watcher:
        maker = RowMaker(name, file_of(name), watcher)
    for part in item.parts:
        if part.experiment is not None:
            assert part.experiment in EXPERIMENTS
            continue
        causes = [cause.changed for claim in part.claims for cause in claim.because]
        unique = [one for number, one in enumerate(causes) if one not in causes[:number]]
        labels = max(len(axis) for axis in part.axes)
        for number in range(labels):  # every label of every axis, since all combinations would take minutes
            setting = tuple(list(axis)[number % len(axis)] for axis in part.axes)
            for place, system in enumerate(part.systems if every_system or number == 0 else list(part.systems)[:1]):
                overrides = part.overrides(setting, system)
                for changed in [{}, *unique] if number == 0 and (every_system or place == 0) else [{}]:
                    maker.recipe(part, overrides | changed)


def test_simulated_items_are_equal_on_each_run_and_show_causes(tmp_path: Path) -> None:
    file = tmp_path / "small.yaml"
    file.write_text(SMALL)
    texts = []
    for run in ("first", "second"):
        with sweep_progress(err) as watcher:
            made = make_item("small", read_item(file), file, watcher)
        files = write_item("small", read_item(file), made, tmp_path / run)
        texts.append({one.name: one.read_bytes() for one in files})
    assert texts[0] == texts[1]
    assert set(texts[0]) == {"small.md", "small.csv", "small-claims.csv", "small.svg"}
    (faster, fails), rows = made[0].claims, made[0].rows
    times = {(row.setting, row.system): row.values.get("iteration_s") for row in rows}
    least, most = sorted(1 - times[one, "merak"] / times[one, "gpipe"] for one in (("two",), ("four",)))
    assert least > 0
    assert faster.ours == f"{least:.1%} to {most:.1%}"
    assert not faster.holds
    assert faster.difference == pytest.approx(least / 5 - 1)
    assert faster.causes[0][1].ours == "0.0%"
    assert fails.holds
    assert times[("two",), "none"] is None
    assert "infeasible" in texts[0]["small.md"].decode() or "GiB" in texts[0]["small.md"].decode()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("{tabel: 2, depths: [4]}", "unknown 'tabel', no 'table'"),
        ("{table: 7, depths: [4]}", "table: found 7; it takes 2, 3"),
        ("{}", "no 'table', no 'depths'; it takes table, depths"),
    ],
)
def test_wrong_arguments_of_an_experiment_get_one_line(tmp_path: Path, arguments: str, words: str) -> None:
    file = tmp_path / "formulas.yaml"
    part = f"{{how: experiment, title: b, quantity: bubble, experiment: schedule-formulas, arguments: {arguments}}}"
    file.write_text(f"paper: a test\nplace: figure 0\ntitle: a\nparts: [{part}]")
    with sweep_progress(err) as watcher, pytest.raises(InputError, match="arguments of schedule-formulas: ") as refused:
        make_item("formulas", read_item(file), file, watcher)
    assert words in str(refused.value)


ROWS = [
    Row(setting=(size, batch), system=system, values={"samples_per_s": rate}, plan=f"dp=2 tp=1 pp={depth}")
    for size, batch, system, rate, depth in [
        ("small", "8", "ours", 12.0, 4),
        ("small", "8", "theirs", 10.0, 2),
        ("small", "8", "others", 8.0, 2),
        ("small", "16", "ours", 30.0, 4),
        ("small", "16", "theirs", 20.0, 2),
        ("small", "16", "others", 25.0, 2),
    ]
] + [
    Row(setting=("large", "8"), system="ours", values={"samples_per_s": 2.0}, plan="dp=1 tp=2 pp=4"),
    Row(setting=("large", "8"), system="theirs", problem="pipeline device 0 needs 30 GiB; it has 22.5", kind="memory"),
]


@pytest.mark.parametrize(
    ("claim", "ours", "difference", "holds"),
    [
        ({"form": "ratio", "against": "theirs", "paper": (1.2, 1.5)}, "1.2 to 1.5", 0.0, True),
        ({"form": "ratio", "against": "theirs", "paper": (1.3, 1.5)}, "1.2 to 1.5", 0.2 / 0.3 - 1, False),
        ({"form": "ratio", "against": "theirs", "paper": (1.1, 1.6)}, "1.2 to 1.5", 0.0, True),
        ({"form": "ratio", "against": "theirs", "paper": (0.9, 1.4)}, "1.2 to 1.5", 1.5 / 1.4 - 1, True),
        ({"form": "ratio", "against": "theirs", "paper": 1.52, "over": "largest"}, "1.5", 0.5 / 0.52 - 1, True),
        ({"form": "ratio", "against": "theirs", "paper": 1.6, "over": "largest"}, "1.5", 0.5 / 0.6 - 1, False),
        ({"form": "ratio", "against": "theirs", "paper": 1.0, "over": "largest"}, "1.5", 0.5, False),
        (
            {"form": "ratio", "against": ["theirs", "others"], "paper": 1.2, "over": "mean", "settings": ["small"]},
            "1.2",
            0.0,
            True,
        ),
        ({"form": "reduction", "against": "theirs", "paper": (-0.5, -0.2)}, "-50.0% to -20.0%", 0.0, True),
        ({"form": "value", "settings": ["large"], "paper": (1.0, 4.0)}, "2", 0.0, True),
        ({"form": "value", "settings": ["large"], "paper": (1.0, 1.5)}, "2", 2 / 1.5 - 1, False),
        ({"form": "value", "paper": (12.0, 30.0), "settings": ["small"]}, "12 to 30", 0.0, True),
        ({"form": "scaling", "settings": ["small"], "paper": 1.25, "factor": 0.5}, "1.25", 0.0, True),
        ({"form": "scaling", "between": ("16", "8"), "settings": ["small"], "paper": 0.4}, "0.4", 0.0, True),
        ({"form": "trend", "settings": ["small"], "paper": "rises"}, "rises: 12, 30", None, True),
        ({"form": "trend", "settings": ["8"], "paper": "rises"}, "falls: 12, 2", None, False),
        ({"form": "trend", "against": "others", "paper": "falls"}, "falls: 1.5, 1.2", None, True),
        ({"form": "levels-off", "paper": "nowhere"}, "nowhere", None, True),
        ({"form": "most"}, "in 2 of 2", None, True),
        ({"form": "most", "system": "theirs", "against": "ours"}, "in 0 of 3", None, False),  # it fails in one
        (
            {"form": "ratio", "system": "theirs", "against": "ours", "paper": (0.6, 0.9)},
            "0.667 to 0.833; no value in 1 of 3 settings",
            0.0,
            False,
        ),
        ({"form": "value", "system": "theirs", "settings": ["large"], "paper": 2.0}, "no value", None, False),
        ({"form": "least"}, "in 0 of 2", None, False),
        ({"form": "fails", "system": "theirs", "paper": ["large, 8"]}, "large, 8", None, True),
        ({"form": "fails", "system": "theirs", "paper": []}, "large, 8", None, False),
        ({"form": "plan", "settings": ["small"], "paper": "dp=2 pp=4"}, "dp=2 tp=1 pp=4", None, True),
        ({"form": "plan", "settings": ["large"], "paper": "dp=2 pp=4"}, "dp=1 tp=2 pp=4", None, False),
        ({"form": "ratio", "against": "theirs", "settings": ["large"], "paper": 1.0}, "no value", None, None),
        ({"form": "value"}, "2 to 30", None, None),
        ({"form": "most", "settings": ["large"]}, "no value", None, None),
    ],
)
def test_claims(claim: dict, ours: str, difference: float | None, holds: bool | None) -> None:
    part = Part(how="simulated", title="", quantity="samples_per_s")
    found = check(part, Claim(says="", **{"system": "ours", **claim}), ROWS, lambda *_: pytest.fail("no cause"))
    assert (found.ours, found.holds) == (ours, holds)
    assert found.difference == (None if difference is None else pytest.approx(difference))


@pytest.mark.parametrize(
    ("claim", "words"),
    [
        ({"system": "hours"}, "there is no system 'hours'; it takes ours, theirs, others"),
        ({"against": "nobody"}, "there is no system 'nobody'; it takes ours, theirs, others"),
        (
            {"settings": ["large", "16"]},
            "found settings ['large', '16']; it takes words of small, 8; small, 16; large, 8",
        ),
        ({"quantity": "bubbles"}, "found quantity 'bubbles'; it takes samples_per_s"),
    ],
)
def test_a_claim_of_what_no_row_of_an_experiment_has_is_refused(claim: dict, words: str) -> None:
    part = Part(how="experiment", title="speed", quantity="samples_per_s")
    with pytest.raises(InputError, match="'speed', claim 'faster': ") as refused:
        check(
            part,
            Claim(says="faster", form="ratio", **{"system": "ours", **claim}),
            ROWS,
            lambda *_: pytest.fail("no cause"),
        )
    assert words in str(refused.value)


def _read_first_row(file: Path) -> None:
    (part,) = read_item(file).parts
    with sweep_progress(err) as watcher:
        RowMaker("small", file, watcher).recipe(part, part.overrides(("two",), "gpipe"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("quantity: iteration_s", "quantities: iteration_s"), "parts.0.quantities: unknown"),
        (("title: Two schedules", ""), "title: missing"),
        (("quantity: iteration_s", "quantity: seconds"), "parts.0.quantity: found 'seconds'"),
        (("base: tiny", "base: tin"), "base: there is no 'tin'"),
        (("against: gpipe", "against: gpip"), "parts.0.claims.0: there is no system 'gpip'"),
        (("{gpipe: {two:", "{gpipe: {three:"), "parts.0.printed.gpipe: there is no setting 'three'"),
        (("how: simulated", "how: experiment"), "parts.0.experiment: "),
        (("how: simulated", "how: experiment\n    experiment: amp"), "parts.0.claims.0: because.changed has keys of"),
        (("search.pp: [2]", "search.depth: [2]"), "search.depth: unknown"),
        (("paper: 5.0", "paper: 0"), "parts.0.claims.0.paper: found 0, of which a difference is no fraction"),
        (("paper: 5.0", "paper: 5.0, settings: [six]"), "parts.0.claims.0: no axis has the label 'six'"),
    ],
)
def test_mistakes_get_one_line(tmp_path: Path, change: tuple[str, str], words: str) -> None:
    file = tmp_path / "small.yaml"
    assert change[0] in SMALL
    file.write_text(SMALL.replace(*change))
    with pytest.raises(InputError) as refused:
        _read_first_row(file)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_quantity_levels_off_where_it_stays_as_it_is() -> None:
    part = Part(how="simulated", title="", quantity="least_gib")
    rows = [
        Row(setting=(label,), system="ours", values={"least_gib": value})
        for label, value in {"0": 1.0, "0.2": 1.5, "0.4": 2.0, "0.6": 2.001, "0.8": 2.0}.items()
    ]
    found = check(part, Claim(says="", system="ours", form="levels-off", paper="0.4"), rows, None)
    assert (found.ours, found.holds) == ("0.4", True)


def test_the_page_of_all_claims_counts_them_by_paper_and_by_how_they_were_made(tmp_path: Path) -> None:
    file = tmp_path / "small.yaml"
    more = "\n      - {says: by a formula, system: merak, against: gpipe, form: ratio, paper: 1.0, source: formula}\n"
    file.write_text(SMALL.rstrip("\n") + more)
    item = read_item(file)
    with sweep_progress(err) as watcher:
        made = make_item("small", item, file, watcher)
    write_item("small", item, made, tmp_path)
    text = write_index({"small": item}, tmp_path).read_text()
    cells = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]]
        for line in text.splitlines()
        if line.startswith("|")
    }
    holds = made[0].claims[2].holds
    assert cells["a test"] == cells["all"] == ["–", "–", "1 of 2", f"{int(holds)} of 1", "–", "0"]


def test_columns_with_the_name_of_another_system_are_made_by_it() -> None:
    """Where something runs, DeepSpeed is DeepSpeed; what our runtime does under a system's plan is called that."""
    engines = {"DeepSpeed": "deepspeed", "FSDP": "fsdp", "torch": "torch-pipelining", "Megatron-LM": "none"}
    real = set()
    for part in (
        part for name in names() for part in read_item(file_of(name)).parts if part.how in ("measured", "emulated")
    ):
        for system, overrides in part.systems.items():
            for word, engine in engines.items():
                if system.startswith(word):
                    (only,) = overrides.get("search.engine", ["auto3d"])
                    assert only.startswith(engine), f"{part.title}: {system} is made by {only}"
                    real.add(only)
    assert real == {"deepspeed-zero", "deepspeed-pipeline"}
