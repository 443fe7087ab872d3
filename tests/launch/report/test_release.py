"""`auto3d report FOLDER` for the records of `make release`."""

import json
from dataclasses import asdict

from launch.report.release import Record, Target


def record(commit: str, found: float) -> str:
    target = Target(what="error <of times>", found=found, wish=5, unit=" %")
    fields = {"date": "2026-11-26", "machine": "one", "command": "try it", "seconds": 3.0, "summary": "the last line"}
    return json.dumps(asdict(Record(commit=commit, code=int(target.missed), figures=(target,), **fields)))


def test_it_has_the_history_of_each_figure_and_what_the_last_run_misses(auto3d, tmp_path):
    folder, page = tmp_path / "release", tmp_path / "page.html"
    folder.mkdir()
    (folder / "tried.jsonl").write_text("\n".join([record("first", 4), record("second", 4.5), record("third", 6)]))
    auto3d("report", str(folder), "--output", str(page))
    text = page.read_text()
    assert [text.count(f"<title>{run}</title>") for run in ("first: 4 %", "second: 4.5 %", "third: 6 %")] == [1, 1, 1]
    assert "6 %, missed" in text
    assert "failed with exit code 1" in text
    assert "error &lt;of times&gt;" in text


def test_keys_of_a_recipe_and_other_files_are_refused(auto3d, tmp_path):
    (tmp_path / "tried.jsonl").write_text(record("first", 4))
    assert "takes no keys of a recipe" in auto3d("report", str(tmp_path), "search.seconds=1", code=2).err
    (tmp_path / "other.jsonl").write_text('{"commit": "1"}')
    assert "other.jsonl: no records of `make release`" in auto3d("report", str(tmp_path), code=2).err
