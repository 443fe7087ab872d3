"""The manifest survives crashes and concurrent writers."""

import json
import multiprocessing

import pytest

from launch.store import manifest as module
from launch.store.manifest import Entry, Manifest, ManifestError, State, histories


def entry(trial: str = "a", state: State = State.SUBMITTED, job: str = "1") -> Entry:
    return Entry(trial=trial, state=state, job=job)


@pytest.mark.parametrize("kept", [0, 1, 20, -2, -1])
def test_a_torn_line_is_no_entry_and_harms_none_that_follow(tmp_path, kept):
    manifest = Manifest(tmp_path / "manifest.jsonl")
    first, torn, later = entry("a"), entry("b"), entry("c")
    manifest.append([first])
    whole = manifest.file.read_bytes()
    manifest.append([torn])
    second = manifest.file.read_bytes()[len(whole) :]
    manifest.file.write_bytes(whole + second[: kept or 0])  # a crash in the middle of a write leaves this
    expected = [first, torn] if kept == -1 else [first]  # only the newline is missing
    assert manifest.entries() == expected
    manifest.append([later])
    assert manifest.entries() == [*expected, later]


def test_lines_of_another_version_are_no_entries(tmp_path):
    manifest = Manifest(tmp_path / "manifest.jsonl")
    manifest.append([entry()])
    with manifest.file.open("a") as file:
        file.write(json.dumps({"trial": "a", "state": "teleported"}) + "\n[]\n\xff\n")
    manifest.append([entry("b")])
    assert [one.trial for one in manifest.entries()] == ["a", "b"]
    assert manifest.file.stat().st_mode & 0o077 == 0


def append_many(file, writer: int) -> None:
    for number in range(50):
        Manifest(file).append([entry(f"{writer}-{number}"), entry(f"{writer}-{number}", State.ENDED)])


def test_lines_of_several_writers_do_not_mix(tmp_path):
    file = tmp_path / "manifest.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=append_many, args=(file, number)) for number in range(4)]
    for one in writers:
        one.start()
    for one in writers:
        one.join()
    entries = Manifest(file).entries()
    assert len(entries) == 400
    assert all(first.trial == second.trial for first, second in zip(entries[::2], entries[1::2], strict=True))


def test_a_history_counts_starts_and_has_the_last_word():
    asked, refused = entry(state=State.SUBMITTING, job=""), entry(state=State.REFUSED, job="")
    history = histories([asked, refused, asked, entry(job="7"), entry(state=State.ENDED, job="7"), asked])["a"]
    assert (history.starts, history.last) == (1, asked), "what was refused, or not yet taken, was not started"


def hold(file, held, done) -> None:
    with Manifest(file).decided_alone():
        held.set()
        done.wait(30)


def test_one_process_decides_at_a_time_and_none_waits_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LOCK_S", 0.5)
    file = tmp_path / "manifest.jsonl"
    context = multiprocessing.get_context("fork")
    held, done = context.Event(), context.Event()
    other = context.Process(target=hold, args=(file, held, done))
    other.start()
    assert held.wait(10)
    with pytest.raises(ManifestError, match=r"deciding: another process has been starting trials for 0.5 s"):
        Manifest(file).decided_alone().__enter__()
    other.kill()  # the kernel releases its lock
    other.join()
    with Manifest(file).decided_alone():
        pass
