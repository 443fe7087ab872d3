"""Imports run down the order of the house, without a circle; and what is slow to import, others do without."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from launch.recipe.load import load
from launch.store.trials import Command, write_command

ROOT = Path(__file__).parents[2]
LARGE = {"torch", "transformers", "scipy", "matplotlib"}


def house_of(page: str) -> str:
    """The first fenced block under the heading "The house": one room per line, each importing those above it."""
    block = re.search(r"^#+ The house\n.*?^```\w*\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert block, "ARCHITECTURE.md lists the rooms in import order"
    return block[1]


def rooms_of(house: str) -> list[str]:
    """The paths of ``house``, lowest first; lines that do not begin with a path of the two packages are prose."""
    return [line.split()[0] for line in house.splitlines() if line.startswith(("auto3d/", "launch/"))]


def files_of(root: Path) -> list[Path]:
    return sorted(file for package in ("auto3d", "launch") for file in (root / package).rglob("*.py"))


def imports_of(root: Path) -> dict[Path, set[Path]]:
    """Each file of the two packages, with those that it imports, also for types alone under ``if TYPE_CHECKING``."""
    return {
        file: {found for name in imported_names(ast.parse(file.read_text())) if (found := file_of(root, name)) != file}
        - {None}
        for file in files_of(root)
    }


@cache
def trees() -> dict[Path, ast.Module]:
    """Each file of the two packages, parsed."""
    return {file: ast.parse(file.read_text()) for file in files_of(ROOT)}


@cache
def imports_of_ours() -> dict[Path, set[Path]]:
    return imports_of(ROOT)


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Every imported module or member of a module, by its full name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            yield from imported_names(node)


@cache
def file_of(root: Path, name: str) -> Path | None:
    """The file of a module, or of the module that has such a member; None if it is in neither package."""
    parts = name.split(".")
    if parts[0] not in ("auto3d", "launch"):
        return None
    for path in (root.joinpath(*parts), root.joinpath(*parts[:-1])):
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None


def in_circles(root: Path, imports: dict[Path, set[Path]]) -> set[str]:
    """The files that import themselves through others."""
    return {str(file.relative_to(root)) for file in imports if file in reached(file, imports)}


def reached(file: Path, imports: dict[Path, set[Path]]) -> set[Path]:
    """What ``file`` imports, and what that imports, and so on."""
    found: set[Path] = set()
    ahead = [file]
    while ahead:
        new = imports[ahead.pop()] - found
        found |= new
        ahead += new
    return found


def imports_up(root: Path, imports: dict[Path, set[Path]], rooms: list[str]) -> list[str]:
    """The imports from a room below, and the files in no room."""
    problems = []
    for file, others in imports.items():
        place = place_of(file.relative_to(root), rooms)
        if place is None:
            problems.append(f"{file.relative_to(root)} is in no room of the house")
            continue
        for other in sorted(others):
            if (its := place_of(other.relative_to(root), rooms)) is not None and its > place:
                problems.append(f"{file.relative_to(root)} imports {other.relative_to(root)}, of a later room")
    return problems


def place_of(file: Path, rooms: list[str]) -> int | None:
    """The number of a file's room, the innermost that has it; a package's own __init__.py is the package's door, in
    its last room."""
    if len(file.parts) == 2 and file.name == "__init__.py" and str(file) not in rooms:
        return max(place for place, room in enumerate(rooms) if room.startswith(f"{file.parts[0]}/"))
    found = [place for place, room in enumerate(rooms) if f"{file}" == room or f"{file}".startswith(room)]
    return max(found, key=lambda place: len(rooms[place]), default=None)


def test_there_is_no_circle():
    assert in_circles(ROOT, imports_of_ours()) == set()


def test_imports_run_down_the_house():
    rooms = rooms_of(house_of((ROOT / "ARCHITECTURE.md").read_text()))
    assert all((ROOT / room).exists() for room in rooms)
    assert rooms == sorted(rooms, key=lambda room: room.startswith("launch/")), "auto3d never imports launch"
    assert imports_up(ROOT, imports_of_ours(), rooms) == []


def test_a_class_name_means_one_thing():
    files: dict[str, list[str]] = {}
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                files.setdefault(node.name, []).append(str(file.relative_to(ROOT)))
    assert {name: found for name, found in files.items() if len(found) > 1} == {}


IN_TWO_ROOMS = {  # names of functions that two rooms give to others; this list only gets shorter
    "all_reduce",
    "check",
    "check_optimizer",
    "explain",
    "export",
    "identity_of",
    "items_of",
    "measure",
    "metrics_of",
    "numbers_of",
    "optimizer_settings",
    "parameters_of",
    "place_of",
    "plan_of",
    "plan_training",
    "trace",
    "training_settings",
    "traits_of",
    "uniform",
    "without",
}


def public_names(rooms: list[str]) -> dict[str, set[int]]:
    """Functions that other files import -> the numbers of their rooms, without commands, named after what they run."""
    imported = {
        (file_of(ROOT, f"{node.module}.{alias.name}"), alias.name)
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    found: dict[str, set[int]] = {}
    for file, tree in trees().items():
        place = place_of(file.relative_to(ROOT), rooms)
        if place is None or rooms[place] == "launch/commands/":
            continue
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and (file, node.name) in imported:
                found.setdefault(node.name, set()).add(place)
    return found


def test_a_public_name_is_of_one_room():
    rooms = rooms_of(house_of((ROOT / "ARCHITECTURE.md").read_text()))
    assert {name for name, places in public_names(rooms).items() if len(places) > 1} == IN_TWO_ROOMS


def doubled(glossary: str) -> set[str]:
    """The words of a table that have two entries; a row may have several words, with commas between them."""
    rows = re.findall(r"^\| ([^|]+) \|", glossary, re.MULTILINE)[2:]  # without heading and rule
    words = [word.strip() for row in rows for word in row.split(",")]
    return {word for word in words if words.count(word) > 1}


def test_a_word_of_the_glossary_has_one_entry():
    glossary = (ROOT / "ARCHITECTURE.md").read_text().partition("## Glossary")[2].partition("\n## ")[0]
    assert glossary.count("\n| ") > 40
    assert doubled(glossary) == set()
    assert doubled("| word | meaning |\n| --- | --- |\n| rank | a |\n| peer, rank | b |") == {"rank"}


READING = {
    "startswith",
    "endswith",
    "removeprefix",
    "removesuffix",
    "partition",
    "rpartition",
    "split",
    "find",
    "index",
}


def read_as_text(tree: ast.AST, ours: set[str]) -> list[int]:
    """The lines that look into the message of one of ``ours``, the names of error classes that have key and problem."""

    def is_ours(annotation: ast.expr | None) -> bool:
        return annotation is not None and not ours.isdisjoint(re.findall(r"\w+", ast.unparse(annotation)))

    scopes = [
        (node, node.name) for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) and is_ours(node.type)
    ]
    scopes += [
        (node, argument.arg)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for argument in node.args.args
        if is_ours(argument.annotation)
    ]
    return [
        call.lineno
        for scope, name in scopes
        for call in ast.walk(scope)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in READING
        if ast.unparse(call.func.value) == f"str({name})"
    ]


def test_our_errors_say_their_key_instead_of_being_read():
    bases = {
        node.name: {ast.unparse(base) for base in node.bases}
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    ours = {"InputError"}
    while new := {name for name, of in bases.items() if of & ours} - ours:
        ours |= new
    assert len(ours) > 20
    assert {str(file.relative_to(ROOT)) for file, tree in trees().items() if read_as_text(tree, ours)} == set()
    example = "try: f()\nexcept PlanError as error:\n    word = str(error).partition(': ')\n    other.split()"
    assert read_as_text(ast.parse(example), ours) == [3]


def test_a_mark_is_on_a_test():
    """pytest takes a mark of a helper without a word, and the tests that it was meant for run in the suite."""
    lost = [
        f"{file.relative_to(ROOT)}:{node.lineno} {node.name}"
        for file in sorted((ROOT / "tests").rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("test_")
        if any("pytest.mark." in ast.unparse(decorator) for decorator in node.decorator_list)
    ]
    assert lost == []


def test_a_circle_an_import_up_and_a_file_in_no_room_are_found(tmp_path):
    files = {
        "auto3d/__init__.py": "from auto3d.high.a import value",
        "auto3d/low.py": "def function():\n    from auto3d.high import a",
        "auto3d/high/__init__.py": "",
        "auto3d/high/a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from auto3d.high.b import B",
        "auto3d/high/b.py": "import auto3d.high.a, os\nfrom auto3d.low import function",
        "auto3d/high/top.py": "",
        "auto3d/high/c.py": "from auto3d.high.top import x",
        "launch/stray.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    page = "# The house\nIn order:\n```\nauto3d/low.py   x\nauto3d/high/   y\n  more of y\nauto3d/high/top.py  z\n```\n"
    rooms = rooms_of(house_of(page))
    assert rooms == ["auto3d/low.py", "auto3d/high/", "auto3d/high/top.py"]
    assert imports_up(tmp_path, imports_of(tmp_path), rooms) == [
        "auto3d/high/c.py imports auto3d/high/top.py, of a later room",
        "auto3d/low.py imports auto3d/high/a.py, of a later room",
        "launch/stray.py is in no room of the house",
    ]
    circle = {"auto3d/low.py", "auto3d/high/a.py", "auto3d/high/b.py"}
    assert in_circles(tmp_path, imports_of(tmp_path)) == circle  # though an import in it is for types alone
    (tmp_path / "auto3d/high/a.py").write_text("def function():\n    from auto3d.high.b import B")
    assert in_circles(tmp_path, imports_of(tmp_path)) == circle
    (tmp_path / "auto3d/high/a.py").write_text("")
    assert in_circles(tmp_path, imports_of(tmp_path)) == set()


# What is slow to import


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("launch.drivers.sweep", LARGE),  # for whoever submits trials, and follows them for days
        ("launch.drivers.tune", LARGE),
        ("launch.commands.resume", LARGE),
        ("launch.console.ranking", LARGE),
    ],
)
def test_what_a_driver_of_days_does_without(module, absent):
    script = f"import {module}, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not absent & set(done.stdout.split())


@pytest.mark.parametrize("arguments", [["--help"], ["status", "tiny"], ["cancel", "tiny"], ["sweep", "--help"]])
def test_what_a_quick_command_does_without(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_command(load("tiny"), Command("train", [], trials=["dp1"]))
    code = "import sys; from launch.main import main; sys.argv[0] = 'auto3d'\ntry: main()\nexcept SystemExit as end:\n"
    code += "    assert not end.code\n    print('\\n', *sys.modules)"
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"PYTHONPATH": str(ROOT)})
    slow = LARGE | ({"numpy", "submitit"} if arguments[0] != "sweep" else set())
    assert not slow & set(done.stdout.splitlines()[-1].split())
    if arguments == ["--help"]:
        assert not {"omegaconf", "launch.recipe", "launch.commands.plan"} & set(done.stdout.splitlines()[-1].split())
