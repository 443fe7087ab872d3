"""`make release` keeps what a part found with its commit, and says what is out of date, failed or missed."""

from functools import cache
from pathlib import Path

import pytest

from launch.report.release import Target
from tests.release import __main__ as release
from tests.release import page, records
from tests.release.parts import PARTS, ROOT, Part

CODE = """
from launch.report.release import Target
from tests.targets import end
end([Target(what='error', found={found}, wish=5, held=9, unit=' %'), Target(what='rate', found=3, wish=2, least=True)])
"""


pace = cache(release.pace)  # measured once, for all runs of these tests


def part(found: float, tests: str = "one") -> Part:
    return Part(name="tried", command=f'python -c "{CODE.format(found=found)}"', minutes=1, tests=(tests,))


@pytest.fixture(autouse=True)
def repository(tmp_path, monkeypatch) -> Path:
    """A repository with the files one and two, in which records look for commits; they are kept outside of it."""
    monkeypatch.setattr(release, "pace", pace)
    monkeypatch.setattr(records, "FOLDER", tmp_path / "records")
    monkeypatch.setattr(records, "ROOT", tmp_path / "repository")
    (tmp_path / "repository").mkdir()
    records._git("init", "--quiet")
    change(tmp_path / "repository", "one", "two")
    return tmp_path / "repository"


def change(repository: Path, *names: str) -> None:
    for name in names:
        (repository / name).write_text(f"{(repository / name).exists()}")
    records._git("add", ".")
    records._git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "change")


def test_a_run_is_kept_with_its_figures_and_is_out_of_date_after_a_change_of_what_it_tries(repository):
    tried = part(4)
    assert page.state_of(tried) == "never run"
    records.add_record(tried, release.run(tried))
    (record,) = records.records_of(tried)
    assert record.code == 0
    assert 0 < (record.pace or 0) < 100
    assert record.figures == (
        Target(what="error", found=4, wish=5, unit=" %"),
        Target(what="rate", found=3, wish=2, least=True),
    )
    change(repository, "two")
    assert page.state_of(tried) == "current"
    change(repository, "one")
    assert page.state_of(tried) == "out of date: 1 files changed"
    records.add_record(tried, records.Record(**vars(record) | {"commit": "0" * 12}))
    assert page.state_of(tried) == "out of date: its commit is unknown here"
    records.add_record(tried, release.run(tried))
    assert page.state_of(tried) == "current"
    assert len(records.records_of(tried)) == 3


def test_comments_docstrings_and_layout_leave_a_record_current(repository):
    tried, file = part(4, "code.py"), repository / "code.py"

    def write(text: str) -> None:
        file.write_text(text)
        records._git("add", ".")
        records._git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "change")

    write('"""What it does."""\n\n\ndef double(x):\n    """Twice x."""\n    return 2 * x  # exact\n')
    records.add_record(tried, release.run(tried))
    write("def double(x):\n    # twice x\n    return (\n        2 * x\n    )\n")
    assert page.state_of(tried) == "current"
    for changed in ("def double(x):\n    return 3 * x\n", "def double(y):\n    return 2 * y\n", ""):
        records._same_code.cache_clear()
        write(changed)
        assert page.state_of(tried) == "out of date: 1 files changed"
    records._same_code.cache_clear()
    file.unlink()
    assert page.state_of(tried) == "out of date: 1 files changed"


def test_a_missed_wish_needs_a_reason_even_where_a_looser_bound_is_held(monkeypatch):
    tried = part(6)
    record = release.run(tried)
    records.add_record(tried, record)
    assert record.code == 0, "9 is held"
    assert "misses a target" in page.state_of(tried)
    monkeypatch.setitem(page.MISSED, "error", "it is far")
    monkeypatch.setattr(page, "PARTS", (tried,))
    assert page.state_of(tried) == "current"
    assert "- tried: error: 6 % (≤ 5 %). it is far" in page.page()
    worse = part(10)
    records.add_record(worse, release.run(worse))
    assert page.state_of(worse) == "**failed** (exit code 1)"


def test_every_part_tries_files_that_exist_and_unknown_parts_are_refused(monkeypatch, capsys):
    assert not [(one.name, path) for one in PARTS for path in one.tests if not (ROOT / path).exists()]
    assert {file.stem for file in (ROOT / "tests/benchmarks").glob("*.py")} - {"__init__"} == {
        one.command.rpartition(".")[2] for one in PARTS if "tests.benchmarks" in one.command
    }
    monkeypatch.setattr("sys.argv", ["release", "pariti"])
    assert release.main() == 2
    assert "there is no part 'pariti'" in capsys.readouterr().err


def test_uncommitted_changes_are_refused(repository, monkeypatch, capsys):
    assert len(records.commit_here()) == 12
    (repository / "one").write_text("changed")
    with pytest.raises(ValueError, match="one"):
        records.commit_here()
    monkeypatch.setattr("sys.argv", ["release", "report"])
    assert release.main() == 2
    assert "commit these first" in capsys.readouterr().err
