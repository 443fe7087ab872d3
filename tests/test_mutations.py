"""Faults that are planted to try the suite are faults of one operator or number, and the draw can be made again."""

import ast
from pathlib import Path

from tests.mutations import ROOMS, ROOT, drawn, mutations_of


def test_each_changes_the_program_and_can_be_parsed():
    file = Path("auto3d/cost/closed_forms.py")
    text = (ROOT / file).read_text()
    found = list(mutations_of(file))
    assert len(found) > 20
    for mutation in found:
        changed = text[: mutation.start] + mutation.text + text[mutation.end :]
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text)), mutation
        assert text[: mutation.start].count("\n") + 1 == mutation.line


def test_a_draw_has_as_many_of_every_room_and_is_the_same_again():
    faults = drawn(3, 10)
    assert [fault.file.parts[1] for fault in faults] == [room for room in ROOMS for _ in range(2)]
    assert faults == drawn(3, 10) != drawn(4, 10)
