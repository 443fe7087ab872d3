"""The cache returns stored content or nothing, whatever happens to its files and whoever else uses them."""

import json
import multiprocessing
import os
import sys
import time
from hashlib import sha256
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

import auto3d
from auto3d.capture import cache as cache_module
from auto3d.capture.cache import Cache
from auto3d.capture.graph_json import graph_from_json, graph_to_json
from tests.models import KINDS, OTHERS, captured
from tests.soak import soak

IDENTITY = {"model": {"layers": 4}, "micro_batch_size": 2}
CONTENT = {"numbers": [1, 2, 3], "name": "α"}


@pytest.fixture
def kept(tmp_path):
    """A cache with one entry, and the file of that entry."""
    cache = Cache(tmp_path)
    cache.store(IDENTITY, CONTENT)
    (file,) = (tmp_path / "models").iterdir()
    return cache, file


def load(cache: Cache, identity: dict = IDENTITY) -> dict | None:
    return cache.load(identity, lambda content: content)


def test_only_the_owner_can_read_what_was_stored(kept):
    cache, file = kept
    assert load(cache) == CONTENT
    assert load(cache, {**IDENTITY, "micro_batch_size": 3}) is None
    assert file.parent.stat().st_mode & 0o077 == 0
    assert file.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("model", [*KINDS, *soak(*OTHERS)])
def test_a_graph_survives_json(model):
    graph = captured(model, 2).graph
    assert graph_from_json(json.loads(json.dumps(graph_to_json(graph)))) == graph


def signed(text: str) -> str:
    return f"{sha256(text.encode()).hexdigest()}\n{text}"


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: text.replace("[1,2,3]", "[1,2,4]"),
        lambda text: text + " ",
        lambda text: "not json",
        lambda text: signed("not json"),
        lambda text: signed("[]"),
        lambda text: signed('{"content": 1}'),
        lambda text: signed(json.dumps(json.loads(text.partition("\n")[2]) | {"key": "of another model"})),
        lambda text: text.encode("utf-16").decode("latin-1"),
    ],
)
def test_a_damaged_entry_is_ignored_and_replaced(kept, damage):
    cache, file = kept
    file.write_text(damage(file.read_text()))
    assert load(cache) is None
    cache.store(IDENTITY, CONTENT)
    assert load(cache) == CONTENT


def test_content_that_cannot_be_read_is_ignored(kept):
    cache, _ = kept
    assert cache.load(IDENTITY, lambda content: content["absent"]) is None
    assert cache.load(IDENTITY, graph_from_json) is None


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A folder of packages, besides those of this process."""
    folder = tmp_path / "installed"
    folder.mkdir()
    monkeypatch.setattr(cache_module, "_PACKAGES", (*cache_module._PACKAGES, str(folder)))
    cache_module._installed.cache_clear()
    yield folder
    cache_module._installed.cache_clear()


@pytest.mark.parametrize("package", ["torch-99.dist-info", "transformers-99.dist-info"])
def test_another_version_of_a_package_makes_an_entry_stale(tmp_path, installed, package):
    cache = Cache(tmp_path)
    cache.store(IDENTITY, CONTENT)
    assert load(cache) == CONTENT
    (installed / package).mkdir()
    cache_module._installed.cache_clear()
    assert load(cache) is None


def test_packages_are_those_that_the_process_started_with(kept, monkeypatch, tmp_path):
    """A capture puts the folders of a recipe's code into sys.path; a clone of auto3d is one, with an egg-info."""
    cache, _ = kept
    (tmp_path / "mine" / "auto3d.egg-info").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "mine"), *sys.path])
    cache_module._installed.cache_clear()
    assert load(cache) == CONTENT


@pytest.mark.parametrize("change", ["print('changed')\n", None])
def test_a_changed_source_makes_an_entry_stale(tmp_path, monkeypatch, change):
    """The source is that of a module that was loaded when the entry was made, such as a user's model or its imports."""
    source = tmp_path / "mine.py"
    source.write_text("width = 4\n")
    os.utime(source, (0, 0))
    specification = spec_from_file_location("mine", source)
    module = module_from_spec(specification)
    specification.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "mine", module)
    cache = Cache(tmp_path / "cache")
    cache.store(IDENTITY, CONTENT)
    assert load(cache) == CONTENT
    if change is None:
        source.unlink()
    else:
        source.write_text(change)
    assert load(cache) is None
    cache.store(IDENTITY, CONTENT)  # stores nothing, since the loaded module is still the old one
    assert load(cache) is None


def test_a_changed_engine_makes_an_entry_stale(kept, monkeypatch):
    cache, _ = kept
    monkeypatch.setattr(cache_module, "_engine_digest", lambda: "of another version")
    assert load(cache) is None


def test_the_engine_has_the_files_of_folders_within_its_packages():
    files = {file.relative_to(Path(auto3d.__file__).parent).as_posix() for file in cache_module._engine_files()}
    assert {
        "capture/export.py",
        "derived/shards.py",
        "partition/methods/uniform.py",
        "tensor/rules/attention.py",
    } < files
    assert {file.partition("/")[0] for file in files} == {"capture", "derived", "partition", "runtime", "tensor"}


def _store_often(folder, letter: str, until: float) -> None:
    cache = Cache(folder)
    while time.time() < until:
        cache.store(IDENTITY, letter * 300_000)


def test_concurrent_processes_never_read_half_an_entry(tmp_path):
    cache = Cache(tmp_path)
    cache.store(IDENTITY, "a" * 300_000)
    until = time.time() + 1.5
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_store_often, args=(tmp_path, letter, until)) for letter in "abc"]
    for writer in writers:
        writer.start()
    seen = set()
    while time.time() < until:
        content = load(cache)
        assert content is not None
        assert len(content) == 300_000
        assert len(set(content)) == 1
        seen.add(content[0])
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert len(seen) > 1


def test_a_folder_that_cannot_be_used_only_costs_time(tmp_path):
    (tmp_path / "file").write_text("")
    cache = Cache(tmp_path / "file")
    cache.store(IDENTITY, CONTENT)
    assert load(cache) is None


def test_the_least_recently_used_entries_are_removed(kept, monkeypatch):
    most = 16
    monkeypatch.setattr(cache_module, "ENTRIES", most)
    cache, file = kept
    cache.store({"number": "unused"}, "unused")
    for entry in file.parent.iterdir():
        os.utime(entry, (0, 0))
    for number in range(most):
        if number == most // 2:
            assert load(cache) == CONTENT  # loading counts as a use
        cache.store({"number": number}, number)
    assert load(cache, {"number": "unused"}) is None
    assert load(cache) == CONTENT
    assert len(list(file.parent.iterdir())) == most
