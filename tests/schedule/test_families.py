"""The table of schedules and the folder of their files agree."""

import re
from importlib import import_module
from pkgutil import iter_modules

import pytest

from auto3d.schedule import SCHEDULES, families
from auto3d.schedule.family import Family
from tests.schedule.samples import BY_RULE, least_micro_batches, options_of


def test_every_file_of_the_folder_is_in_the_table():
    files = [module.name for module in iter_modules(families.__path__)]
    in_files = [import_module(f"{families.__name__}.{file}").FAMILY for file in files]
    assert all(isinstance(family, Family) for family in in_files)
    assert sorted(SCHEDULES) == sorted(family.name for family in in_files)


@pytest.mark.parametrize("name", BY_RULE)
def test_a_family_describes_its_schedule(name):
    family = SCHEDULES[name]
    assert family.name == name
    assert family.summary
    assert "\n" not in family.summary
    assert re.search(r"\b(19|20)\d\d\b", family.source), "who proposed it, and when"
    assert "sync" in family.options, "every schedule offers the placements of the gradient sync"
    devices = next(devices for devices in (2, 4) if options_of(name, devices))
    schedule = family.build(devices=devices, micro_batches=max(2, least_micro_batches(name, devices)))
    assert schedule.name == name
    assert (schedule.slices > 1) == family.sliced
    assert (schedule.iterations > 1) == family.asynchronous == bool(schedule.weight_version)
