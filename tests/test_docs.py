"""Every path, link, command, option and recipe key that the README and the docs name exists."""

import ast
import re
import shlex
import subprocess
from functools import cache
from pathlib import Path

import click

from launch.commands.group import cli
from launch.commands.schedule_synthesize import synthesize
from launch.recipe.keys import documented_keys
from tests.each import for_each

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted(file for folder in ("slurm", "recipes", "results") for file in (ROOT / folder).rglob("*.md")),
]
FOLDERS = ("auto3d", "launch", "tests", "recipes", "results", "slurm", "docs")
MADE_BY_READERS = ("recipes/mine.yaml", "example.py")  # files that an example has its reader write
PLACEHOLDER = re.compile(r"NAME|VERB|<")  # a path with one stands for many
FENCE = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
CALL = re.compile(r"(make|auto3d|\.venv/bin/auto3d|torchrun|python -m|[A-Z_]+=\S+ make) ")
KEY = re.compile(r"^([a-z_]+(?:\.[a-z_]+)+)(?:\[\d+\])?=")


def pages():
    return for_each("page", PAGES)


@cache
def tracked() -> frozenset[str]:
    """Every file of the repository and every folder with one."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return frozenset(files) | {str(parent) for file in files for parent in Path(file).parents}


@cache
def names_in(file: str) -> frozenset[str]:
    """Functions, classes and constants that a Python file defines at any level or imports from elsewhere."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return frozenset(found)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as forges make them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def inline_code(page: Path) -> list[str]:
    return CODE.findall(FENCE.sub("", page.read_text()))


def commands(page: Path) -> list[str]:
    """Lines of code blocks, and inline code, that call make, auto3d or a module of this repository."""
    text = page.read_text()
    blocks = [line for _, block in FENCE.findall(text) for line in block.splitlines()]
    blocks += [line for line in FENCE.sub("", text).splitlines() if line.startswith("    ")]
    found = []
    for line in map(str.strip, [*blocks, *inline_code(page)]):
        calls = line.removeprefix("$ ").split(" #")[0].strip().split("; ")
        found += [call for call in calls if CALL.match(call)]
    return found


@pages()
def test_links(page):
    for target in LINK.findall(page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{target} does not exist"
        if anchor:
            assert anchor in anchors(file), f"{target}: {file.name} has no such heading"


@pages()
def test_paths(page):
    """`folder/file.py`, `folder/file.py:name`, `package.module.name`, and paths within auto3d/ or launch/."""
    for code in inline_code(page):
        match = re.fullmatch(r"([\w.-]+(?:/[\w.*-]+)+/?|[\w-]+\.(?:py|md|toml|yaml))(?::+(\w+))?", code)
        if match and (match[1].split("/")[0] in FOLDERS or match[1].endswith(".py")):
            path = match[1].rstrip("/")
            places = [path, f"auto3d/{path}", f"launch/{path}", str(page.parent.relative_to(ROOT) / path)]
            if path in MADE_BY_READERS or PLACEHOLDER.search(path):
                continue
            found = [place for place in places if place in tracked() or ("*" in place and list(ROOT.glob(place)))]
            assert found, f"{code}: there is no such file"
            if match[2]:
                assert match[2] in names_in(found[0]), f"{code}: {found[0]} defines no {match[2]}"
        if re.fullmatch(r"(?:auto3d|launch|tests)(?:\.\w+)+", code) and not KEY.match(f"{code}="):
            parts = code.split(".")
            files = [
                name for end in range(len(parts), 0, -1) for name in module_files(parts[:end]) if name in tracked()
            ]
            inner = parts[files[0].removesuffix("/__init__.py").count("/") + 1 :]
            inner = inner[:1] if files[0].endswith("__init__.py") else inner  # a package only imports what it exports
            assert set(inner) <= names_in(files[0]), f"{code}: {files[0]} does not define it"


def module_files(parts: list[str]) -> list[str]:
    """The files that a module or a package of this dotted name may be."""
    return [f"{'/'.join(parts)}.py", f"{'/'.join(parts)}/__init__.py"]


OUTLINE = re.compile(r"^( *)- `([\w/.]+\.py):(\w+)`", re.MULTILINE)


def outlined() -> list[tuple[tuple[str, str] | None, tuple[str, str]]]:
    """The (file, name) of each item of ARCHITECTURE's outlines, behind that of the item which it is indented under."""
    above: list[tuple[str, str]] = []
    found = []
    for indent, path, name in OUTLINE.findall((ROOT / "ARCHITECTURE.md").read_text()):
        file = next(place for place in (path, f"auto3d/{path}") if place in tracked())
        del above[len(indent) // 2 :]
        found.append((above[-1] if above else None, (file, name)))
        above.append((file, name))
    return found


def mentioned(file: str, name: str) -> set[str]:
    """The names and texts in what ``file`` defines as ``name``: functions, methods, a class or a constant."""
    nodes = [
        node
        for node in ast.walk(ast.parse((ROOT / file).read_text()))
        if getattr(node, "name", None) == name
        or (isinstance(node, ast.Assign) and name in [ast.unparse(target) for target in node.targets])
        or (isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name)
    ]
    return {
        value
        for node in nodes
        for inner in ast.walk(node)
        for value in (getattr(inner, "id", None), getattr(inner, "attr", None), getattr(inner, "value", None))
        if isinstance(value, str)
    }


def test_outlines_follow_the_calls():
    for caller, (file, name) in outlined():
        assert name in names_in(file), f"{file} defines no {name}"
        assert caller is None or name in mentioned(*caller), f"{caller[1]} of {caller[0]} does not call {name}"


def test_an_outline_that_differs_from_the_calls_is_found():
    assert "export_with" in mentioned("auto3d/capture/export.py", "export")
    assert "describe" not in mentioned("auto3d/capture/export.py", "export")
    assert len(outlined()) > 60


@cache
def targets() -> frozenset[str]:
    return frozenset(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@cache
def options_of(verb: str) -> frozenset[str]:
    command = synthesize if verb == "schedule synthesize" else cli.get_command(click.Context(cli), verb)
    assert command is not None, f"auto3d has no command {verb}"
    return frozenset(option for parameter in command.params for option in parameter.opts) | {"--help", "-h"}


@cache
def keys() -> frozenset[str]:
    return frozenset(name for name, *_ in documented_keys())


@pages()
def test_commands(page):
    for command in (each for line in commands(page) for each in line.split(" && ")):
        words = shlex.split(command.replace("…", ""))
        if "make" in words[:2]:
            target = words[words.index("make") + 1]
            assert target in targets(), f"{command}: the Makefile has no target {target}"
        if words[:2] == ["python", "-m"] and words[2].startswith("tests"):
            module = words[2].replace(".", "/")
            assert {f"{module}.py", f"{module}/__main__.py"} & tracked(), f"{command}: there is no such module"
        places = [place for place, word in enumerate(words) if Path(word).name == "auto3d"]
        if not places or len(words) <= places[0] + 1:
            continue
        verb, *arguments = words[places[0] + 1 :]
        if verb.startswith("-") or not re.fullmatch(r"[a-z]+", verb):
            continue
        if (verb, *arguments[:1]) == ("schedule", "synthesize"):
            verb = "schedule synthesize"
        for word in arguments:
            if re.match(r"--?[a-z]", word):
                assert word.split("=")[0] in options_of(verb), f"{command}: auto3d {verb} has no option {word}"
            else:
                options_of(verb)


@pages()
def test_keys(page):
    """Overrides such as training.global_batch=32, in commands and in the text."""
    for code in [*commands(page), *inline_code(page)]:
        for word in code.split():
            if (match := KEY.match(word)) and not word.startswith(("auto3d.", "launch.py")):
                key = match[1]
                known = key in keys() or any(
                    name.startswith(f"{key}.") or key.startswith(f"{name}.") for name in keys()
                )
                assert known, f"{word}: a recipe has no key {key}"


RESULT = re.compile(r"\]\(([\w./-]*results/[\w/.-]+)\)")
FIGURE = re.compile(r"(?<![\w.,])(\d[\d,]*(?:\.\d+)?)(?: ?[%×]| (?:s|ms|[KMG]iB)\b)")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def value(text: str) -> float:
    return float(text.replace(",", ""))


@cache
def numbers_in(results: Path) -> frozenset[float]:
    """All numbers of a file in results/, or of the pages and tables of a folder there."""
    files = [results] if results.is_file() else [*results.rglob("*.md"), *results.rglob("*.csv")]
    return frozenset(value(found) for file in files for found in NUMBER.findall(file.read_text()))


@pages()
def test_figures_beside_a_link_to_results_are_there(page):
    """Times, bytes, per cents and factors of a sentence, as they are rounded in it."""
    text = re.sub(r"\n(?!\n)", " ", FENCE.sub("", page.read_text()))
    for link in RESULT.finditer(text):
        begin = max(text.rfind(mark, 0, link.start()) for mark in (". ", "\n", "| "))
        for figure in FIGURE.findall(text[begin : link.start()]):
            half = 0.5001 * 10 ** -len(figure.partition(".")[2])  # half a unit of the last digit, and a little
            known = numbers_in((page.parent / link[1]).resolve())
            assert any(abs(number - value(figure)) < half for number in known), f"{figure} is not in {link[1]}"
