"""Whether the suite notices faults in lines that are drawn at random: python -m tests.mutations --seed 1 --number 40

Each fault is planted in a copy of the committed tree: a comparison or an operator becomes another, a number one more, a
condition its opposite. The tests of the fault's room run first, then those of the folders behind ``--then``; the first
failure ends the run. The table says which test noticed; the exit code is 1 if fewer faults were noticed than
``--least`` says.
"""

import ast
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from time import monotonic

import click
from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("capture", "schedule", "cost", "runtime", "search")
OTHER = {  # node of the syntax tree -> what takes its place
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in",
    ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is", ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*",
    ast.FloorDiv: "*", ast.Mod: "*", ast.And: "or", ast.Or: "and",
}  # fmt: skip
OPERATOR = re.compile(r"not\s+in|is\s+not|\b(?:in|is|and|or)\b|[<>=!]=|//|[-+*/%<>]")


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """The characters from ``start`` to ``end`` of a file become ``text``."""

    file: Path  # in the repository
    line: int
    start: int
    end: int
    text: str
    was: str


def mutations_of(file: Path) -> Iterator[Mutation]:
    """All faults that may be planted in ``file``; none in a message of an error or in an annotation."""
    text = (ROOT / file).read_text()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def place(line: int, column: int) -> int:
        begin = starts[line - 1]
        return begin + len(text[begin : starts[line]].encode()[:column].decode())

    def operator(left: ast.expr, right: ast.expr, new: str) -> Mutation:
        start, end = place(left.end_lineno or 0, left.end_col_offset or 0), place(right.lineno, right.col_offset)
        found = OPERATOR.search(text, start, end)
        assert found is not None
        line = text.count("\n", 0, found.start()) + 1
        return Mutation(file=file, line=line, start=found.start(), end=found.end(), text=new, was=found[0])

    for node in _code(ast.parse(text)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in OTHER:
            yield operator(node.left, node.comparators[0], OTHER[type(node.ops[0])])
        elif isinstance(node, ast.BinOp) and type(node.op) in OTHER:
            yield operator(node.left, node.right, OTHER[type(node.op)])
        elif isinstance(node, ast.BoolOp) and len(node.values) == 2:
            yield operator(*node.values, OTHER[type(node.op)])
        elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
            start, end = place(node.lineno, node.col_offset), place(node.end_lineno or 0, node.end_col_offset or 0)
            new = str(not node.value if isinstance(node.value, bool) else node.value + 1)
            yield Mutation(file=file, line=node.lineno, start=start, end=end, text=new, was=text[start:end])


def _code(node: ast.AST) -> Iterator[ast.AST]:
    for name, field in ast.iter_fields(node):
        if isinstance(node, ast.Raise) or name in ("annotation", "returns", "decorator_list"):
            continue
        for child in field if isinstance(field, list) else [field]:
            if isinstance(child, ast.AST):
                yield child
                yield from _code(child)


@cache
def _one_a_line(room: str) -> tuple[Mutation, ...]:
    """A fault of each line of ``room`` that has any."""
    files = sorted(file.relative_to(ROOT) for file in (ROOT / "auto3d" / room).rglob("*.py"))
    return tuple({(one.file, one.line): one for file in files for one in mutations_of(file)}.values())


def drawn(seed: int, number: int) -> list[Mutation]:
    """As many faults of every room, no two of them in one line."""
    chance = Random(seed)
    return [fault for room in ROOMS for fault in chance.sample(_one_a_line(room), number // len(ROOMS))]


def noticed_by(mutation: Mutation, tree: Path, folders: list[str], workers: int) -> str:
    """The test that fails first with ``mutation`` in ``tree``; empty if none does."""
    file = tree / mutation.file
    before = file.read_text()
    command = [sys.executable, "-m", "pytest", f"--numprocesses={workers}", "--exitfirst", "--durations=0"]
    try:
        file.write_text(before[: mutation.start] + mutation.text + before[mutation.end :])
        for folder in folders:
            done = subprocess.run(
                [*command, folder],
                cwd=tree,
                env=os.environ | {"PYTHONPATH": str(tree)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            if done.returncode not in (0, 5):
                told = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
                return told[1] if told else f"{folder}: exit code {done.returncode}"
        return ""
    finally:
        file.write_text(before)


@click.command(help=__doc__)
@click.option("--seed", default=1, help="Of the draw.")
@click.option("--number", default=40, help="Faults, an equal number of every room.")
@click.option("--then", multiple=True, default=("tests",), help="A folder or test to run after the room's tests.")
@click.option("--workers", default=3, help="Processes of pytest.")
@click.option("--least", default=0, help="How many faults must be noticed.")
def main(seed: int, number: int, then: tuple[str, ...], workers: int, least: int) -> None:
    rows = []
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # an exit removes the copy
    with TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree)], cwd=ROOT, check=True)
        try:
            for mutation in drawn(seed, number):
                room = mutation.file.parts[1]
                begun = monotonic()
                by = noticed_by(mutation, tree, [f"tests/{room}", *then], workers)
                change = f"`{mutation.was}` → `{mutation.text}`"
                rows.append(
                    (f"{mutation.file}:{mutation.line}", change, by or "**nothing**", f"{monotonic() - begun:.0f}")
                )
                print(*rows[-1], flush=True)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)
    noticed = sum(row[2] != "**nothing**" for row in rows)
    print(tabulate(rows, ("line", "change", "noticed by", "seconds"), tablefmt="github", disable_numparse=True))
    print(f"{noticed} of {len(rows)} faults are noticed")
    sys.exit(noticed < least)


if __name__ == "__main__":
    main()
