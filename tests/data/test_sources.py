"""Samples of every source equal those that plain code makes of the same files."""

import json
import random
import struct
import sys
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from datasets import Dataset, load_dataset

from auto3d.data import Batches, DataError, DataSettings, InputField
from auto3d.data.drawing import drawing
from auto3d.data.opening import open_source
from tests.data.corpora import documents, save_json, save_tokenizer

LENGTH = 16
PACKED = {"input_ids": InputField(kind="tokens"), "labels": InputField(kind="next-tokens")}
PADDED = {
    "input_ids": InputField(kind="tokens"),
    "attention_mask": InputField(kind="attention-mask"),
    "labels": InputField(kind="labels"),
    "score": InputField(kind="column", dtype_name="float32", shape=(2, 2)),
    "later": InputField(kind="next-tokens"),
    "kind": InputField(kind="column", column="class"),
}
ROWS = [{"text": text, "score": [[1.5, n], [n / 2, 0]], "class": n % 5} for n, text in enumerate(documents())]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    save_tokenizer(folder / "tokenizer")
    save_json(folder / "rows.jsonl", ROWS)
    Dataset.from_list(ROWS).save_to_disk(folder / "dataset")
    pa.parquet.write_table(pa.Table.from_pylist(ROWS), folder / "rows.parquet", row_group_size=7)
    return folder


def settings_of(folder, source: str, cache, **changes: object) -> DataSettings:
    file = {"json": "rows.jsonl", "dataset": "dataset", "parquet": "rows.parquet"}[source]
    values = {"tokenizer": str(folder / "tokenizer"), "sequence_length": LENGTH, "inputs": PACKED, **changes}
    return DataSettings(source=source, files=(str(folder / file),), cache=cache, **values)


def in_order(settings: DataSettings, samples: int) -> dict[str, torch.Tensor]:
    batches = Batches(replace(settings, shuffle=False), seed=1, global_batch=samples, micro_batch_size=samples)
    return batches.micro_batch(0, 0, settings.inputs)


@pytest.mark.parametrize("source", ["json", "dataset", "parquet"])
def test_padded_samples_are_those_of_the_tokenizer(corpus, tmp_path, source):
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    settings = settings_of(corpus, source, tmp_path, inputs=PADDED, packing="padded")
    rows = list(load_dataset("json", data_files=str(corpus / "rows.jsonl"), cache_dir=tmp_path)["train"])
    rows = [row for row in rows if row["text"]]
    wanted = tokenizer(
        [row["text"] for row in rows], padding="max_length", truncation=True, max_length=LENGTH, return_tensors="pt"
    )
    found = in_order(settings, len(rows))
    assert open_source(settings).samples == len(rows) == len(ROWS) - 1
    mask = wanted["attention_mask"]
    assert torch.equal(found["input_ids"], wanted["input_ids"])
    assert torch.equal(found["attention_mask"], mask)
    assert torch.equal(found["labels"], wanted["input_ids"].masked_fill(mask == 0, -100))
    assert torch.equal(found["later"][:, :-1], found["labels"][:, 1:])
    assert (found["later"][:, -1] == -100).all()
    assert torch.equal(found["score"], torch.tensor([row["score"] for row in rows]))
    assert torch.equal(found["kind"], torch.tensor([row["class"] for row in rows]))
    assert 0 < mask.sum() < mask.numel(), "some are padded and some are cut"


@pytest.mark.parametrize("source", ["json", "dataset", "parquet"])
def test_packed_samples_reassemble_the_corpus(corpus, tmp_path, source):
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    joined = [
        token
        for text in documents()
        if text
        for token in [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    ]
    settings = settings_of(corpus, source, tmp_path)
    count = open_source(settings).samples
    assert count == (len(joined) - 1) // LENGTH
    found = in_order(settings, count)
    assert found["input_ids"].flatten().tolist() == joined[: count * LENGTH]
    assert found["labels"].flatten().tolist() == joined[1 : count * LENGTH + 1]


def test_every_plan_sees_the_same_samples(corpus, tmp_path):
    settings = settings_of(corpus, "json", tmp_path, inputs=PADDED, packing="padded", last_batch="pad")
    batch, iterations = 24, 6

    def global_batches(size: int, replicas: int) -> list[dict[str, torch.Tensor]]:
        parts = [
            Batches(settings, seed=5, global_batch=batch, micro_batch_size=size, replica=one, replicas=replicas)
            for one in range(replicas)
        ]
        return [
            {
                name: torch.cat([part.micro_batch(t, m, [name])[name] for m in range(batch // size) for part in parts])
                for name in settings.inputs
            }
            for t in range(iterations)
        ]

    whole = global_batches(batch, 1)
    for size, replicas in ((1, 1), (2, 1), (4, 2), (6, 3), (8, 1), (24, 4)):
        for ours, theirs in zip(global_batches(size, replicas), whole, strict=True):
            assert all(torch.equal(ours[name], theirs[name]) for name in settings.inputs), (size, replicas)
    filled = [(part["labels"] == -100).all(1).sum().item() for part in whole]
    assert filled == [0, 0, 13, 0, 0, 13], "59 samples in batches of 24, of which the last of an epoch has 11"
    assert all(part["attention_mask"].sum(1).min() > 0 for part in whole), "no attention over nothing"


def test_a_rank_reads_only_the_columns_of_its_inputs(corpus, tmp_path):
    settings = settings_of(corpus, "json", tmp_path, inputs=PADDED, packing="padded")
    open_source(settings)
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    kept = {file.name for file in folder.iterdir()}
    assert kept == {"about.json", "tokens", "ends", "column-0", "column-1"}

    def load(names: list[str]) -> None:
        Batches(settings, seed=1, global_batch=4, micro_batch_size=4).micro_batch(0, 0, names)

    for gone, works, fails in (
        ("column-0", ["input_ids", "labels", "kind"], ["score"]),
        ("column-1", ["input_ids", "attention_mask"], ["kind"]),
        ("tokens", [], ["labels"]),
        ("about.json", [], ["kind"]),
    ):
        (folder / gone).rename(folder / "away")
        load(works)
        if gone == "about.json":
            (tmp_path / f"{folder.name}.lock").unlink()
            (folder / "away").write_text("{")  # neither complete nor absent
            (folder / "away").rename(folder / gone)
        with pytest.raises((FileNotFoundError, DataError)):
            load(fails)
        if gone != "about.json":
            (folder / "away").rename(folder / gone)


def test_a_prepared_table_is_made_again_for_other_files_and_settings_only(corpus, tmp_path):
    def folders() -> int:
        return sum(path.is_dir() for path in tmp_path.iterdir())

    settings = settings_of(corpus, "json", tmp_path)
    for changed, count in (
        (settings, 1),
        (replace(settings, sequence_length=8), 1),
        (replace(settings, shuffle=False), 1),
        (replace(settings, packing="padded", inputs={"input_ids": PACKED["input_ids"]}), 2),
        (replace(settings, files=settings.files * 2), 3),
    ):
        open_source(changed)
        assert folders() == count


def write_megatron(prefix, sequences: list[list[int]], code: int, letter: str) -> str:
    """The two files byte by byte, after the format that auto3d/data/sources/tokens.py describes."""
    size, places, place = struct.calcsize(f"<{letter}"), [], 0
    for sequence in sequences:
        places.append(place)
        place += size * len(sequence)
    bounds = range(len(sequences) + 1)
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(bounds))
    index += struct.pack(f"<{len(sequences)}i", *map(len, sequences)) + struct.pack(f"<{len(places)}q", *places)
    prefix.with_suffix(".idx").write_bytes(index + struct.pack(f"<{len(bounds)}q", *bounds))
    tokens = [token for sequence in sequences for token in sequence]
    prefix.with_suffix(".bin").write_bytes(struct.pack(f"<{len(tokens)}{letter}", *tokens))
    return str(prefix.with_suffix(".bin"))


@pytest.mark.parametrize(("code", "letter"), [(4, "i"), (8, "H"), (5, "q"), (3, "h"), (1, "B")])
def test_token_files_are_read_in_order(tmp_path, code, letter):
    sequences = [[(17 * s + t) % 120 for t in range(5 + 9 * s)] for s in range(6)]
    tokens = [token for sequence in sequences for token in sequence]
    file = write_megatron(tmp_path / "corpus", sequences, code, letter)
    np.save(tmp_path / "corpus.npy", np.array(tokens, dtype=letter))
    for name in (file, str(tmp_path / "corpus.npy")):
        settings = DataSettings(
            source="tokens", files=(name, name), sequence_length=LENGTH, inputs=PACKED, cache=tmp_path / "cache"
        )
        source, count = open_source(settings), (len(tokens) - 1) // LENGTH
        assert (source.samples, source.largest(None)) == (2 * count, max(tokens))
        found = in_order(settings, 2 * count)
        assert found["input_ids"].flatten().tolist() == tokens[: count * LENGTH] * 2
        assert found["labels"].flatten().tolist() == tokens[1 : count * LENGTH + 1] * 2


def test_an_own_dataset_gives_its_columns(tmp_path, monkeypatch):
    (tmp_path / "ours.py").write_text(
        "import numpy as np\nreads = []\nclass Ours:\n    def __len__(self): return 10\n"
        "    def __getitem__(self, i):\n        reads.append(i)\n"
        "        return {'image': np.full((2, 3), i / 4, np.float32), 'label': -100 if i == 3 else i}\n"
        "def make(size): return Ours()\ndef wrong(): return 7\n"
        "def nothing(): return [None] * 10\ndef pairs(): return [(1, 2)] * 10\n"
        "def ragged(): return [{'image': [[1.0], [2.0, 3.0]]}] * 10\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    image = InputField(kind="column", column="image", shape=(2, 3), dtype_name="float32")
    label = InputField(kind="column", column="label", targets=True)
    settings = DataSettings(source="ours:make", arguments={"size": 1}, inputs={"pixels": image, "labels": label})
    found = in_order(settings, 10)
    assert torch.equal(found["pixels"][:, 1, 2], torch.arange(10) / 4)
    assert found["labels"].tolist() == [0, 1, 2, -100, 4, 5, 6, 7, 8, 9]
    assert sys.modules["ours"].reads == list(range(10)), "one read for both inputs"
    Batches(settings, seed=1, global_batch=2, micro_batch_size=2).micro_batch(0, 0, [])
    assert len(sys.modules["ours"].reads) == 10, "a stage without inputs reads nothing"
    for changes, problem in (
        ({"inputs": {"labels": replace(label, targets=False)}}, "it contains -100.*say targets: true"),
        ({"inputs": {"labels": replace(label, shape=(2,))}}, r"shape \[\] of int64; it takes \[2\] of int64"),
        ({"inputs": {"labels": replace(label, column="none")}}, "lacks it; it has image, label"),
        ({"inputs": {"p": replace(image, dtype_name="int64")}}, r"shape \[2, 3\] of float32; it takes"),
        ({"source": "ours:nothing", "arguments": {}}, "sample 0 of ours:nothing is a NoneType; it takes a mapping"),
        ({"source": "ours:pairs", "arguments": {}}, "sample 0 of ours:pairs is a tuple; it takes a mapping from names"),
        ({"source": "ours:ragged", "arguments": {}}, "sample 0 of ours:ragged has rows of different lengths"),
        ({"arguments": {}}, "TypeError: make"),
        ({"source": "ours:wrong", "arguments": {}}, "no dataset with a length: TypeError"),
        ({"source": "ours:none"}, "cannot be imported: AttributeError"),
        ({"source": "nothing.here:make"}, "cannot be imported: ModuleNotFoundError"),
    ):
        with pytest.raises(DataError, match=problem) as raised:
            in_order(replace(settings, **changes), 10)
        assert "\n" not in str(raised.value)


DRAWING = """
import random
import numpy as np
import torch

class Rows:
    def __init__(self):
        self.order = random.sample(range(8), 8)
    def __len__(self):
        return 8
    def __getitem__(self, i):
        drawn = [random.random(), np.random.random(), torch.rand(()).item()]
        return {"place": np.array(self.order[i]), "noise": np.array(drawn, dtype=np.float32)}
"""


def test_what_an_own_dataset_draws_follows_from_the_seed_and_the_sample(tmp_path, monkeypatch):
    (tmp_path / "drawing_rows.py").write_text(DRAWING)
    monkeypatch.syspath_prepend(str(tmp_path))
    inputs = {"place": InputField(kind="column"), "noise": InputField(kind="column", shape=(3,), dtype_name="float32")}
    settings = DataSettings(source="drawing_rows:Rows", inputs=inputs)

    def read(iterations, *, seed=4, size=4):
        batches = Batches(settings, seed=seed, global_batch=8, micro_batch_size=size)
        state = random.getstate()
        found = {}
        for iteration in iterations:
            read = [batches.read(iteration, index, ("place", "noise")) for index in range(8 // size)]
            found[iteration] = torch.cat([torch.cat([r.inputs["place"][:, None], r.inputs["noise"]], 1) for r in read])
        assert random.getstate() == state
        return found

    forwards = read([0, 1, 2])
    for other in (read([2, 0, 1]), read([0, 1, 2], size=1)):
        assert all(torch.equal(other[iteration], rows) for iteration, rows in forwards.items())
    places = [rows[:, 0].tolist() for rows in forwards.values()]
    assert all(sorted(each) == list(range(8)) for each in places), "epochs"
    noise = torch.cat([rows[:, 1:] for rows in forwards.values()])
    assert len(noise.flatten().unique()) == noise.numel(), "another draw for each sample and epoch"
    assert not torch.equal(read([0], seed=5)[0], forwards[0])


def restored() -> float:
    state = random.getstate()
    drawn = random.random()
    random.setstate(state)
    return drawn


DRAWS = {
    "Python": random.random,
    "Python's normal numbers": random.gauss,
    "numpy": np.random.random,
    "numpy's normal numbers": np.random.randn,  # it makes two at a time, and keeps the second
    "torch": lambda: torch.rand(()).item(),
    "a state that is put back": restored,
}


class SomeDraw:
    """Rows of which every third draws a number."""

    def __init__(self, kind: str) -> None:
        self.draw = DRAWS[kind]

    def __len__(self) -> int:
        return 8

    def __getitem__(self, sample: int) -> dict[str, np.ndarray]:
        return {"drawn": np.array(self.draw() if sample % 3 == 2 else 0.0, dtype=np.float32)}


@pytest.mark.parametrize("kind", DRAWS)
def test_what_a_sample_draws_follows_from_its_number_whatever_was_read_before(kind):
    inputs = {"drawn": InputField(kind="column", dtype_name="float32")}
    settings = DataSettings(source=f"{__name__}:SomeDraw", arguments={"kind": kind}, inputs=inputs, shuffle=False)
    expected = []
    for number in range(16):
        with drawing() as begin:
            begin(4, number)
            expected.append(DRAWS[kind]() if number % 8 % 3 == 2 else 0.0)
    for size in (1, 2, 8):
        batches = Batches(settings, seed=4, global_batch=8, micro_batch_size=size)
        found = []
        for number in range(0, 16, size):
            found.append(batches.micro_batch(number // 8, number % 8 // size, ("drawn",))["drawn"])
            DRAWS[kind]()
        assert torch.equal(torch.cat(found), torch.tensor(expected))


def test_what_labels_may_ignore():
    tokens = DataSettings(source="tokens", files=("x.npy",), inputs=PACKED)
    assert not tokens.may_ignore_targets
    assert replace(tokens, last_batch="pad").may_ignore_targets
    table = DataSettings(source="json", files=("x",), tokenizer="t", packing="padded", inputs=PADDED)
    assert table.may_ignore_targets
    only = {"x": InputField(kind="tokens"), "label": InputField(kind="column")}
    assert not replace(table, inputs=only).may_ignore_targets, "a column without targets may not contain -100"
    assert replace(table, inputs={**only, "label": InputField(kind="column", targets=True)}).may_ignore_targets
    assert replace(tokens, inputs={"x": InputField(kind="tokens", prefix=-100, prefix_length=1)}).may_ignore_targets


def test_json_lines_are_taken_as_they_are(tmp_path):
    """Texts that look like dates stay texts, where a reader that guesses types makes dates of them."""
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    texts = ["2024-01-02", "2024-01-02T03:04:05"] * 4
    file = tmp_path / "dates.jsonl"
    file.write_text("\ufeff" + "\n\n".join(json.dumps({"other": [1, "x"], "text": text}) for text in texts))
    settings = DataSettings(
        source="json", files=(str(file),), tokenizer=str(tmp_path / "tokenizer"), packing="padded", cache=tmp_path,
        sequence_length=LENGTH, inputs={"input_ids": InputField(kind="tokens")},
    )  # fmt: skip
    wanted = tokenizer(texts, padding="max_length", max_length=LENGTH, truncation=True, return_tensors="pt")
    assert torch.equal(in_order(settings, len(texts))["input_ids"], wanted["input_ids"])
