"""Data that is damaged, missing or does not fit is refused in one line; what is prepared is complete or absent."""

import os
import signal
import threading
import time
from dataclasses import replace
from multiprocessing import get_context

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict

from auto3d.capture.model import capture
from auto3d.data import DataError, DataSettings, InputField
from auto3d.data.fit import check_fit
from auto3d.data.kept import kept
from auto3d.data.opening import open_source
from tests.data.corpora import SIZE, documents, save_json, save_tokenizer
from tests.data.test_sources import PACKED, write_megatron
from tests.models import gpt2


def refused(settings: DataSettings, problem: str) -> None:
    with pytest.raises(DataError, match=problem) as raised:
        open_source(settings)
    assert "\n" not in str(raised.value)


def test_damaged_token_files_are_refused(tmp_path):
    file = write_megatron(tmp_path / "a", [[1, 2, 3]] * 20, 4, "i")
    settings = DataSettings(source="tokens", files=(file,), sequence_length=8, inputs=PACKED, cache=tmp_path / "cache")
    assert open_source(settings).samples == 7
    index, tokens = (tmp_path / "a.idx").read_bytes(), (tmp_path / "a.bin").read_bytes()
    for changed, name, problem in (
        (tokens[:-4], "a.bin", "a.bin: found 236 bytes; its index a.idx describes 240"),
        (tokens + b"\0" * 4, "a.bin", "found 244 bytes"),
        (b"\xff" * 4 + tokens[4:], "a.bin", "token 0 is -1; it takes tokens of at least 0"),
        (index[:-8], "a.idx", "damaged: it has 434 bytes, and 20 sequences with 21 bounds have 442"),
        (b"TNTIDX" + index[6:], "a.idx", "it does not begin with MMIDIDX"),
        (index[:17] + b"\x07" + index[18:], "a.idx", "type 7; it takes version 1 and integers"),
        (index[:9] + b"\x02" + index[10:], "a.idx", "found version 2"),
        (index[:34] + b"\x02" + index[35:], "a.idx", "its sequences do not follow one another"),
        (b"", "a.idx", "a.idx"),
    ):
        (tmp_path / name).write_bytes(changed)
        refused(settings, problem)
        (tmp_path / "a.idx").write_bytes(index)
        (tmp_path / "a.bin").write_bytes(tokens)
    (tmp_path / "a.idx").unlink()
    refused(settings, "a.idx: No such file")
    refused(replace(settings, files=(str(tmp_path / "a.txt"),)), r"source tokens takes .npy, and .bin with an .idx")
    array = tmp_path / "a.npy"
    for content, problem in (
        (np.array([{"a": 1}], dtype=object), "not a readable .npy of integers"),
        (np.zeros((3, 4), dtype=np.int32), r"found shape \[3, 4\] of int32; it takes one dimension of integers"),
        (np.zeros(100), "of float64; it takes one dimension of integers"),
        (np.zeros(8, dtype=np.int64), "found 8 tokens; one sample needs 9 of one file"),
    ):
        np.save(array, content, allow_pickle=True)
        refused(replace(settings, files=(str(array),)), problem)
    array.write_bytes(array.read_bytes()[:-3])
    refused(replace(settings, files=(str(array),)), "not a readable .npy")


def test_tables_that_do_not_fit_their_inputs_are_refused(tmp_path):
    save_tokenizer(tmp_path / "tokenizer")
    save_tokenizer(tmp_path / "without-end", end=None)
    (tmp_path / "empty").mkdir()
    rows = [{"text": text, "two": [n, 2], "real": 0.5, "label": n - 100} for n, text in enumerate(documents())]
    good = save_json(tmp_path / "rows.jsonl", rows)
    settings = DataSettings(
        source="json", files=(good,), tokenizer=str(tmp_path / "tokenizer"), inputs=PACKED, cache=tmp_path / "cache"
    )
    assert open_source(settings).samples

    def columns(**fields: InputField) -> DataSettings:
        return replace(settings, tokenizer=None, inputs=fields)

    def of(text: str) -> DataSettings:
        file = tmp_path / f"bad-{len(list(tmp_path.iterdir()))}.jsonl"
        file.write_text(text)
        return replace(settings, files=(str(file),))

    column = InputField(kind="column")
    parquet, saved, splits = tmp_path / "rows.parquet", tmp_path / "saved", tmp_path / "splits"
    pa.parquet.write_table(pa.Table.from_pylist([{"other": 1, "text": None}]), parquet)
    Dataset.from_list(rows).save_to_disk(saved)
    DatasetDict(train=Dataset.from_list(rows)).save_to_disk(splits)
    for changed, problem in (
        (of('{"text": "a"}\n{"text": 1'), "line 2: not JSON"),
        (of('{"text": "a"}\n[1]'), "line 2: it takes an object"),
        (of('{"text": "a"}\n{"texts": "b"}'), "line 2 has no column text; it has texts"),
        (of('{"text": "a"}\n{"text": null}'), "line 2: text is null; leave such rows out"),
        (of('{"text": 3}'), "row 0 holds int; it takes text"),
        (of('{"text": "a"}\n{"text": [1]}'), "line 2: text holds a list, and in line 1 text"),
        (of('{"text": "a"}\n{"text": "\\ud83d"}'), r"line 2: text has half of a character, '\\ud83d'"),
        (of('{"text": "a"}\n{"text": 1e400}'), "line 2: text holds a number, and in line 1 text"),
        (of('{"text": ""}'), "no row has a token"),
        (of('{"text": "a"}'), "tokens; one sample needs 129"),
        (of(""), "they have no rows"),
        (replace(settings, files=(str(tmp_path / "none"),)), "none: No such file"),
        (replace(settings, tokenizer=str(tmp_path / "none")), "none', which is not a folder"),
        (replace(settings, tokenizer=str(tmp_path / "empty")), "tokenizer: .*empty: not readable"),
        (replace(settings, tokenizer=str(tmp_path / "without-end")), "has no end token"),
        (columns(two=column), r"column two: found list.*; it takes int64, as inputs say"),
        (columns(two=replace(column, shape=(3,))), r"column two: row 0 does not have the shape \[3\].*found 2"),
        (columns(two=replace(column, shape=(2, 1))), r"row 0 does not have the shape \[2, 1\].*values of 1 dim"),
        (columns(real=column), "column real: found double; it takes int64"),
        (columns(text=column), "column text: found string; it takes int64"),
        (columns(label=column), "column label: it contains -100.*say targets: true"),
        (columns(none=column), "line 1 has no column none; it has text, two, real, label"),
        (replace(columns(none=column), source="dataset", files=(str(saved),)), "has no column none; it has text"),
        (replace(columns(two=column), source="dataset", files=(str(splits),)), "it has the splits train"),
        (replace(columns(two=column), source="dataset", files=(str(tmp_path / "empty"),)), "not a saved dataset"),
        (replace(columns(two=column), source="parquet", files=(good,)), "not a readable Parquet file"),
        (replace(columns(two=column), source="parquet", files=(str(parquet),)), "no column two; it has other, text"),
        (replace(settings, source="parquet", files=(str(parquet),)), "row 0 holds null; it takes text"),
    ):
        refused(changed, problem)
    assert not list((tmp_path / "cache").glob("*.partial*"))
    assert open_source(columns(label=replace(column, targets=True))).largest("label") == len(rows) - 101


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"source": "nothing"}, "source: 'nothing' is not known; use one of text, synthetic, tokens"),
        ({"packing": "padded"}, "packing: source text draws samples at random"),
        ({"last_batch": "pad"}, "last_batch: source text"),
        ({"shuffle": False}, "shuffle: source text"),
        ({"tokenizer": "t"}, "tokenizer: source text has no text to tokenise; use one of dataset, json, parquet"),
        ({"arguments": {"a": 1}}, "arguments: source text is not a function"),
        ({"source": "a:b", "files": ("x",)}, "files: a function as source reads its own files"),
        ({"source": "a:b"}, "inputs: a function as source gives columns; an input of kind next-tokens needs tokens"),
        ({"source": "json"}, "files: none given; source json reads files"),
        ({"source": "json", "files": ("x",)}, "tokenizer: none given; an input of kind next-tokens needs one"),
        ({"source": "json", "files": ("x",), "inputs": {}}, "inputs: none is made from source json"),
        ({"source": "tokens", "files": ("x",), "packing": "padded"}, "packing: source tokens is packed"),
        ({"inputs": {"a": InputField(kind="column")}}, "inputs: source text has no columns, which column a takes"),
        (
            {"source": "json", "files": ("x",), "tokenizer": "t", "inputs": {**PACKED, "a": InputField(kind="column")}},
            "packing: packed samples are not rows",
        ),
        (
            {"source": "tokens", "files": ("x",), "last_batch": "pad", "inputs": {"a": InputField(kind="tokens")}},
            "last_batch: pad needs targets",
        ),
        (
            {"source": "json", "files": ("x",), "tokenizer": "t", "packing": "padded",
             "inputs": {"labels": InputField(kind="tokens")}},
            "inputs: labels is of kind tokens, so that padding would count",
        ),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other_are_refused(changes, problem):
    with pytest.raises(DataError, match=problem):
        DataSettings(**{"inputs": PACKED, **changes})


def test_values_beyond_the_rows_of_an_embedding_are_refused(tmp_path):
    save_tokenizer(tmp_path / "tokenizer")
    file = save_json(tmp_path / "rows.jsonl", [{"text": text, "ids": [255, 256]} for text in documents()])
    settings = DataSettings(
        source="json", files=(file,), tokenizer=str(tmp_path / "tokenizer"), sequence_length=8, cache=tmp_path,
        inputs={"input_ids": InputField(kind="tokens"), "labels": InputField(kind="labels")},
    )  # fmt: skip
    graph = capture(gpt2, settings.input_specs(), 2).graph
    problem = r"data.inputs.input_ids: found values up to \d+ in the data; transformer.wte.weight has 256 rows"
    with pytest.raises(DataError, match=problem):
        check_fit(graph, settings, open_source(settings))
    assert open_source(settings).largest(None) in range(256, SIZE)
    ids = replace(settings, tokenizer=None, inputs={"input_ids": InputField(kind="column", column="ids", shape=(2,))})
    with pytest.raises(DataError, match="input_ids: found values up to 256 in the data"):
        check_fit(graph, ids, open_source(ids))
    prefix = DataSettings(inputs={"input_ids": InputField(kind="tokens", prefix=256, prefix_length=1)})
    with pytest.raises(DataError, match="found values up to 256"):
        check_fit(graph, prefix, open_source(prefix))
    text = DataSettings(inputs={"input_ids": InputField(kind="tokens")})
    check_fit(graph, text, open_source(text))


def _make_slowly(folder, ticks: int, pause_s: float, file) -> None:
    def make(partial, tick):
        for number in range(ticks):
            (partial / "part").write_text(str(number))
            (file.with_name(f"{file.name}.begun")).write_text("")
            time.sleep(pause_s)
            tick()
        with file.open("a") as times:
            times.write("x")
        return {"made": True}

    kept(folder, {"a": 1}, make, wait_s=2.0)


def test_one_process_prepares_while_others_wait_for_its_progress(tmp_path):
    context, file = get_context("fork"), tmp_path / "times"
    arguments = (tmp_path / "kept", 8, 0.4, file)  # longer than the others wait for one that makes no progress
    processes = [context.Process(target=_make_slowly, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert file.read_text() == "x", "made once"


def test_a_killed_preparation_leaves_nothing_and_is_made_again(tmp_path):
    context, file = get_context("fork"), tmp_path / "times"
    process = context.Process(target=_make_slowly, args=(tmp_path / "kept", 1000, 0.1, file))
    process.start()
    while not (tmp_path / "times.begun").exists():
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join(10)
    assert len(list((tmp_path / "kept").glob("*.partial.*"))) == 1
    _make_slowly(tmp_path / "kept", 1, 0.0, file)
    (folder,) = (path for path in (tmp_path / "kept").iterdir() if path.is_dir())
    assert (folder / "about.json").exists(), "the only folder is complete"


def test_a_preparation_without_progress_is_not_awaited_for_ever(tmp_path):
    begun, end = threading.Event(), threading.Event()

    def hang(partial, tick):
        begun.set()
        end.wait(30)
        return {}

    thread = threading.Thread(target=kept, args=(tmp_path, {"a": 1}, hang), kwargs={"wait_s": 1.0})
    thread.start()
    begun.wait(10)
    with pytest.raises(DataError, match=r"waited 0.3 s for another process to prepare the data in .*no progress"):
        kept(tmp_path, {"a": 1}, hang, wait_s=0.3)
    end.set()
    thread.join(10)
    tmp_path.chmod(0o770)
    with pytest.raises(DataError, match="other users could change the data"):
        kept(tmp_path, {"a": 2}, hang, wait_s=0.3)
