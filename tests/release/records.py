"""What a part of a release found, kept in results/release/PART.jsonl: one line for each run, the newest last."""

import ast
import json
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path

from launch.report.release import Record, Target, records_in
from tests.release.parts import ROOT, Part

FOLDER = Path("results/release")


def add_record(part: Part, record: Record) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / f"{part.name}.jsonl").open("a") as file:
        file.write(json.dumps(asdict(record), ensure_ascii=False) + "\n")


def records_of(part: Part) -> list[Record]:
    """All records of ``part``, oldest first."""
    file = FOLDER / f"{part.name}.jsonl"
    return records_in(file) if file.is_file() else []


def changed_since(record: Record, part: Part) -> list[str]:
    """The files that ``part`` tries and whose code was changed after the commit of ``record``.

    Comments, docstrings and the layout of Python files are no code. Raises ValueError if that commit is not known here.
    """
    if _git("cat-file", "-t", record.commit).strip() != "commit":
        raise ValueError(f"{part.name}: its commit {record.commit} is not known here")
    changed = _git("diff", "--name-only", record.commit, "--", *part.tests).splitlines()
    return [path for path in changed if not _same_code(record.commit, path)]


@cache
def _same_code(commit: str, path: str) -> bool:
    """Whether the Python file at ``path`` does the same as at ``commit``."""
    file, before = ROOT / path, _git("show", f"{commit}:{path}")
    return path.endswith(".py") and file.is_file() and bool(before) and _code(file.read_text()) == _code(before)


def _code(text: str) -> str:
    """The syntax tree of a Python file without docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        match node:
            case ast.Module() | ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef() if ast.get_docstring(node):
                del node.body[0]
    return ast.dump(tree)


def commit_here() -> str:
    """The commit of the clone; raises ValueError if tracked files were changed after it."""
    if changed := _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!results").strip():
        raise ValueError(f"commit these first, since a figure is kept with its commit:\n{changed}")
    return _git("rev-parse", "--short=12", "HEAD").strip()


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout


def read_figures(file: Path) -> Sequence[Target]:
    """The figures that benchmarks wrote to the file of AUTO3D_FIGURES."""
    return [Target(**json.loads(line)) for line in file.read_text().splitlines()] if file.is_file() else []
