"""`auto3d schedule`: figures against closed forms, the files that it writes, and errors for bad input."""

import json
from xml.etree import ElementTree

import pytest

from auto3d.schedule import SCHEDULES


@pytest.fixture
def auto3d(auto3d):
    """Runs the command and returns its standard output or, for an exit code other than 0, its standard error."""

    def run(*arguments: str, code: int = 0) -> str:
        printed = auto3d("schedule", *arguments, code=code)
        return printed.err if code else printed.out

    return run


@pytest.fixture
def simulated(auto3d):
    def run(name: str, devices: int, micro_batches: int, *arguments: str) -> dict:
        sizes = ["--stages", str(devices), "--micro-batches", str(micro_batches)]
        return json.loads(auto3d(name, *sizes, *arguments, "--json"))

    return run


def times(forward: float, backward: float) -> list[str]:
    return ["--forward", str(forward), "--backward", str(backward)]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


# Figures


def test_json_holds_what_the_issue_asks_for(simulated):
    assert simulated("1f1b", 2, 2) == {
        "schedule": "1f1b",
        "stages": 2,
        "micro_batches": 2,
        "devices": 2,
        "makespan": 9,
        "bubble_ratio": pytest.approx(1 / 3),
        "idle": [3, 3],
        "idle_within": [3, 0],
        "steady_state": None,
        "peak_activations": [2, 1],
        "weight_copies": [1, 1],
        "critical_path": {"forwards": 3, "backwards": 3},
        "operations": [
            ["F0@0", "F1@0", "B0@0", "B1@0", "S@0", "U@0"],
            ["F0@1", "B0@1", "F1@1", "B1@1", "S@1", "U@1"],
        ],
    }


@pytest.mark.parametrize(("depth", "n"), [(2, 2), (4, 8), (5, 7)])
def test_synchronous_pipelines(simulated, depth, n):
    for name in ("gpipe", "1f1b"):
        assert simulated(name, depth, n)["makespan"] == 3 * (n + depth - 1)
    for chunks in (2, 3):
        interleaved = simulated("interleaved-1f1b", depth, 2 * depth, "--chunks", str(chunks))
        assert interleaved["makespan"] == pytest.approx(6 * depth + 3 * (depth - 1) / chunks)
        assert (interleaved["stages"], interleaved["devices"]) == (chunks * depth, depth)


@pytest.mark.parametrize(("depth", "n"), [(3, 3), (4, 5), (6, 12)])
def test_recomputation(simulated, depth, n):
    assert simulated("1f1b", depth, n, "--recompute", "full")["makespan"] == 4 * (n + depth - 1)
    assert simulated("1f1b", depth, n, "--recompute", "full", "--recompute-time", "2")["makespan"] == 5 * (
        n + depth - 1
    )
    assert simulated("early-recompute", depth, n)["makespan"] == 4 * n + 3 * (depth - 1)
    shifted = simulated("shifted-critical-path", depth, n)
    assert shifted["makespan"] == 4 * n + 3 * (depth - 2)
    assert shifted["peak_activations"] == [*range(depth, 2, -1), 3, 1][-depth:]
    assert not any(text.startswith("R") for text in shifted["operations"][-1])


@pytest.mark.parametrize("depth", [2, 4, 6, 10])
def test_chimera(simulated, depth):
    equal = simulated("chimera", depth, depth, *times(1, 1))
    assert equal["makespan"] == 3 * depth - 2
    assert equal["bubble_ratio"] == pytest.approx((depth - 2) / (3 * depth - 2))
    longer = simulated("chimera", depth, depth)
    assert longer["makespan"] == 5 * depth - 4
    assert longer["critical_path"] == {"forwards": depth, "backwards": 2 * depth - 2}
    assert set(longer["weight_copies"]) == {2}
    assert min(longer["peak_activations"]) >= depth / 2 + 1 or depth == 2
    assert max(longer["peak_activations"]) <= depth
    for units in (1, 2, 3):
        direct = simulated("chimera", depth, units * depth)
        assert mean(direct["idle"]) == pytest.approx((units + 1) * (depth - 2))
    for units in (1, 2):
        doubling = simulated("chimera", depth, 2 * units * depth, "--scale", "doubling")
        assert mean(doubling["idle"]) == pytest.approx(1.5 * (depth - 2))


def test_groups_and_waves(simulated):
    assert simulated("interleaved-1f1b", 4, 10, "--group", "5")["makespan"] == pytest.approx(30 + 4.5)
    assert simulated("hanayo", 4, 4, "--waves", "3")["makespan"] == pytest.approx(12 + 2)


def test_slices_of_the_sequence(simulated, auto3d):
    """The command's default is two slices; three have a third of the bubbles of 1F1B."""
    assert simulated("seq1f1b", 4, 6)["makespan"] == pytest.approx(18 + 9 / 2)
    sliced = simulated("seq1f1b", 4, 6, "--slices", "3")
    assert sliced["makespan"] == pytest.approx(18 + 9 / 3)
    assert sliced["peak_activations"] == pytest.approx([6 / 3, 5 / 3, 4 / 3, 3 / 3])
    assert sliced["operations"][3][:6] == ["F0@3", "F1@3", "F2@3", "B2@3", "F3@3", "B1@3"]
    compared = auto3d("--compare", "1f1b,seq1f1b:slices=3", "--stages", "4", "--micro-batches", "6")
    assert [line.split()[:2] for line in compared.splitlines()[3:5]] == [["1f1b", "27"], ["seq1f1b:slices=3", "21"]]


def test_chimera_with_more_pipes(simulated):
    for depth, pipes in [(4, 4), (8, 4), (8, 8), (12, 6)]:
        found = simulated("chimera", depth, depth, "--pipes", str(pipes), *times(1, 1))
        assert found["makespan"] == 2 * depth + 2 * depth / pipes - 2


def test_others(simulated):
    for depth, n in [(4, 6), (8, 8)]:
        assert mean(simulated("gems", depth, n, *times(1, 1))["idle"]) == pytest.approx((n + 1) * (depth - 1))
        halves = ["--backward-input", "1", "--backward-weight", "1"]
        h1, v = (simulated(name, depth, 4 * depth, *halves) for name in ("zb-h1", "zb-v"))
        assert mean(h1["idle"]) == depth - 1
        assert mean(v["idle"]) < mean(h1["idle"])
        assert max(v["peak_activations"]) <= max(h1["peak_activations"])


def test_asynchronous(simulated):
    for name in ("pipedream", "pipedream-2bw"):
        found = simulated(name, 4, 4, "--iterations", "6")
        assert found["steady_state"] == {"iteration_time": 12, "bubble_ratio": 0}
        most = [4, 3, 2, 1] if name == "pipedream" else [2, 2, 2, 2]
        assert all(copies <= bound for copies, bound in zip(found["weight_copies"], most, strict=True))


def test_messages_and_syncs(simulated):
    assert simulated("1f1b", 2, 1, "--p2p", "0.5")["makespan"] == 7
    assert simulated("1f1b", 2, 1, "--p2p", "0.5", "--no-overlap")["makespan"] == 7
    assert simulated("1f1b", 2, 1, "--sync", "4")["makespan"] == 10
    lazy, eager = (
        simulated("chimera", 4, 4, "--sync", "2", "--sync-placement", placement) for placement in ("lazy", "eager")
    )
    assert lazy["makespan"] == 20  # the two syncs of P0 follow each other
    assert eager["makespan"] == 18  # the sync of stage 0 still follows the last backward


# What people read


def test_the_timeline_and_the_figures(auto3d):
    lines = auto3d("1f1b", "--stages", "2", "--micro-batches", "2", "--backward-input", "0.5").splitlines()
    assert lines[0] == "P0  01··0 ·1 "
    text = "\n".join(lines)
    assert "makespan 9, bubble ratio 0.3333 = idle / (devices × makespan)" in text
    assert "critical path: 3 forwards, 3 backwards" in text
    assert "Simulated, not measured: 2 devices, 2 micro-batches" in text
    assert "forward 1, backward 2, backward-input 0.5, backward-weight 1.5, recompute 1, p2p 0, sync 0." in text
    assert "steady state: 6 per iteration" in auto3d("pipedream", "--stages", "2", "--micro-batches", "2")


def test_the_list_names_every_schedule_and_option(auto3d):
    text = auto3d("--list")
    for family in SCHEDULES.values():
        assert f"\n{family.name}\n" in f"\n{text}"
        assert f"\n    {family.summary}\n    proposed by {family.source}\n" in text
        assert not family.ships_in or f"\n    ships in {', '.join(family.ships_in)}\n" in text
    assert "--pipes 2  --scale direct  --recompute none  --sync-placement lazy" in text
    records = json.loads(auto3d("--list", "--json"))
    assert [record["name"] for record in records] == list(SCHEDULES)
    assert records[0] == {
        "name": "gpipe",
        "summary": "all forwards, then all backwards",
        "source": "Huang et al., NeurIPS 2019, section 2",
        "ships_in": ["torch.distributed.pipelining"],
        "options": {"recompute": "none", "sync": "lazy"},
    }


def test_compare(auto3d):
    names = "1f1b,chimera,chimera:scale=doubling,pipedream-2bw"
    sizes = ["--stages", "4", "--micro-batches", "16"]
    rows = [line.split() for line in auto3d("--compare", names, *sizes).splitlines()[3:7]]
    assert [row[:4] for row in rows] == [
        ["1f1b", "57", "0.1579", "1"],
        ["chimera", "58", "0.1724", "2"],  # direct concatenation loses for many units, doubling does not
        ["chimera:scale=doubling", "51", "0.0588", "2"],
        ["pipedream-2bw", "48*", "0.0000*", "2"],
    ]
    records = json.loads(auto3d("--compare", "1f1b,chimera", *sizes, "--scale", "doubling", "--json"))
    assert [record["makespan"] for record in records] == [57, 51]


def test_files(auto3d, tmp_path):
    files = {form: tmp_path / f"schedule.{form}" for form in ("svg", "trace", "csv")}
    given = [word for form, file in files.items() for word in (f"--{form}", str(file))]
    text = auto3d("1f1b", "--stages", "3", "--micro-batches", "4", *given)
    assert text.splitlines()[-1] == f"written: {', '.join(map(str, files.values()))}"
    ElementTree.parse(files["svg"])
    assert json.loads(files["trace"].read_text())["traceEvents"]
    assert files["csv"].read_text().splitlines()[2] == "2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3"


# Bad input


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("chimera --stages 5 --micro-batches 4", "5 devices; it needs an even number, 4 or 6"),
        ("chimera --stages 8 --micro-batches 8 --pipes 6", "6 pipes on 8 devices; it must be 2f"),
        ("1f1b --stages 4 --micro-batches 0", "0 micro-batches"),
        ("1f1b --stages 0 --micro-batches 4", "0 devices"),
        ("1f1b --stages 4 --micro-batches 4 --forward -1", "'--forward': -1.0 is not in the range x>=0"),
        ("1f1b --stages 4 --micro-batches 4 --sync nan", "sync of stage 0 is nan"),
        ("1f1b --stages 4 --micro-batches 4 --backward 1 --backward-input 2", "longer than the whole"),
        ("chimra --stages 4 --micro-batches 4", "did you mean chimera?"),
        ("--compare 1f1b,chimra --stages 4 --micro-batches 4", "did you mean chimera?"),
        ("1f1b --stages 4 --micro-batches 4 --pipes 2", "it has no --pipes; it takes --recompute, --sync-placement"),
        ("--compare gpipe,1f1b --stages 4 --micro-batches 4 --pipes 2", "--pipes: none of gpipe, 1f1b takes it"),
        ("--compare chimera:scale --stages 4 --micro-batches 4", "write NAME:option=value"),
        ("seq1f1b --stages 4 --micro-batches 4 --slices 0", "slices is 0; it must be 1 or more"),
        ("seq1f1b --stages 4 --micro-batches 4 --save x.json", "it runs micro-batches in parts"),
        ("seq1f1b --stages 4 --micro-batches 4 --csv x.csv", "cannot express operations on other than one whole"),
        ("1f1b --stages 4 --micro-batches 4 --sync-placement soon", "'soon' is not one of 'lazy', 'eager'"),
        ("chimera --stages 4 --micro-batches 4 --scale tripling", "direct, doubling, halving"),
        ("1f1b --stages four --micro-batches 4", "'four' is not a valid integer"),
        ("1f1b --stages 4", "--stages and --micro-batches are needed"),
        ("--stages 4 --micro-batches 4", "write one schedule's name"),
        ("1f1b --compare gpipe --stages 4 --micro-batches 4", "write one schedule's name"),
        ("--compare gpipe --stages 4 --micro-batches 4 --svg x.svg", "--compare has several"),
        ("chimera --stages 4 --micro-batches 4 --csv x.csv", "cannot express more than one pipe"),
        ("1f1b --stages 4 --micro-batches 4 --svg no/such/folder/x.svg", "cannot be written"),
    ],
)
def test_bad_input_is_told_in_one_line(auto3d, arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    complaint = auto3d(*arguments.split(), code=2)
    assert complaint.count("\n") == 1
    assert complaint.startswith("auto3d: ")
    assert words in complaint
    assert not list(tmp_path.iterdir())


# Files of schedules, and orders for given times and memory

PROBLEM = """
devices: 2
micro_batches: 4
stages: 4
forward: [1, 1, 1, 3]
backward: [2, 2, 2, 6]
message: 0.1
activation: 1
kept: 0.2
weights: [0.5, 0, 0, 1]
memory: 6.5
"""


def test_a_schedule_is_saved_and_loaded(auto3d, tmp_path):
    file, again = str(tmp_path / "order.json"), str(tmp_path / "again.json")
    sizes = ["--stages", "4", "--micro-batches", "8", "--sync-placement", "eager"]
    saved = json.loads(auto3d("early-recompute", *sizes, "--save", file, "--json"))
    loaded = json.loads(auto3d("--load", file, "--save", again, "--json"))
    assert loaded == saved | {"schedule": "synthesized"}
    first, second = (json.loads((tmp_path / name).read_text()) for name in ("order.json", "again.json"))
    assert first | {"made_by": ""} == second | {"made_by": ""}
    assert first["made_by"].startswith("auto3d schedule early-recompute. Simulated, not measured: 4 devices")
    assert first["order"][3].startswith("F0@3 R0@3 B0@3 ")
    csv = str(tmp_path / "order.csv")
    assert "cannot express recomputation" in auto3d("--load", file, "--csv", csv, code=2)
    auto3d("zb-v", *sizes, "--save", file)
    auto3d("--load", file, "--csv", csv)
    assert (tmp_path / "order.csv").read_text().startswith("0F0,")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": 2}, "schema: found '2'; it must be 1"),
        ({"devices": 3}, "the order is for 2 devices; here there are 3"),
        ({"micro_batches": "2"}, "micro_batches: found '2'; it must be a whole number"),
        ({"order": ["F0@0"]}, "the order is for 1 devices; here there are 2"),
        ({"order": []}, "order: found '[]'; it must be a list with the operations of each device"),
        ({"recompute": "some"}, "recompute is 'some'; it must be none, full or stages"),
        ({"sync": "soon"}, "sync is 'soon'"),
        ({"pipes": 2}, "pipes: unknown; a schedule file has schema, made_by"),
        ({"order": ["F0@0 B0@0 F1@0 B1@0", "F0@1 F1@1 B0@1 B1@1"]}, "order: deadlock"),
    ],
)
def test_wrong_files_are_refused(auto3d, tmp_path, change, words):
    file = tmp_path / "order.json"
    auto3d("1f1b", "--stages", "2", "--micro-batches", "2", "--save", str(file))
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    complaint = auto3d("--load", str(file), code=2)
    assert complaint.startswith(f"auto3d: {file}: ")
    assert words in complaint
    assert complaint.count("\n") == 1


def test_an_order_is_found_for_a_problem(auto3d, tmp_path):
    file, saved = tmp_path / "problem.yaml", str(tmp_path / "order.json")
    file.write_text(PROBLEM)
    found = json.loads(auto3d("synthesize", str(file), "--seconds", "0.5", "--save", saved, "--json"))
    assert found["makespan"] <= found["by_rule"]["makespan"]
    assert found["gain"] == pytest.approx(1 - found["makespan"] / found["by_rule"]["makespan"])
    assert max(found["memory"]) <= 6.5
    certificate = found["certificate"]
    assert 0 < certificate["lower_bound"] <= certificate["makespan"] == found["makespan"]
    assert certificate["gap"] == pytest.approx(found["makespan"] / certificate["lower_bound"] - 1, abs=1e-8)
    assert certificate["reason"]
    assert json.loads(auto3d("--load", saved, "--json"))["operations"] == found["operations"]
    text = auto3d("synthesize", str(file), "--seconds", "0.2")
    assert "best by rule    " in text
    assert "less time" in text
    assert "\ncertificate     " in text
    assert "best possible: no order takes less than " in text


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("devises: 2", "devises: unknown; the keys are devices, micro_batches"),
        ("micro_batches: 0", "micro_batches: found 0; it must be a whole number from 1 on"),
        ("stages: 3", "stages: 3 are no multiple of 2 devices"),
        ("stages: 6", "forward: found 4 values; it takes a number, or 6 of them"),
        ("forward: [1, 1, 1, soon]", "forward: found 'soon'; it must be a number from 0 on"),
        ("backward_weight: 4", "backward_weight: found 4; it is longer than the whole backward of its stage"),
        ("speed: [1, 0]", "speed: found 0; it must be more than 0"),
        ("placements: [diagonal]", "placements: found ['diagonal']; it must be a list of straight"),
        ("placements: [wave]", "placements: none of wave is possible"),
        ("memory: 1", "one micro-batch alone exceeds the memory of a device"),
        ("memory: 0.1", "the weights do not fit their memory"),
        ("kept: 2", "stage 0 keeps 2"),
        ("split: 1", "split: found 1; it must be true or false"),
    ],
)  # fmt: skip
def test_wrong_problems_are_refused(auto3d, tmp_path, line, words):
    file = tmp_path / "problem.yaml"
    key = line.partition(":")[0]
    rest = [each for each in PROBLEM.splitlines() if not each.startswith(f"{key}:")]
    file.write_text("\n".join([*rest, line]))
    complaint = auto3d("synthesize", str(file), "--seconds", "0.2", code=2)
    assert words in complaint
    assert complaint.count("\n") == 1


def test_a_loaded_schedule_keeps_its_sizes(auto3d, tmp_path):
    file = str(tmp_path / "order.json")
    auto3d("1f1b", "--stages", "2", "--micro-batches", "2", "--save", file)
    assert "--stages: found 4; the order in" in auto3d("--load", file, "--stages", "4", code=2)
    assert "decides what recomputes" in auto3d("--load", file, "--recompute", "full", code=2)
    assert "it has no order" in auto3d("synthesized", "--stages", "2", "--micro-batches", "2", code=2)
    assert "its iterations overlap" in auto3d(
        "pipedream", "--stages", "2", "--micro-batches", "2", "--save", file, code=2
    )
