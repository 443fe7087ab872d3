"""A benchmark that misses what it holds cannot pass."""

import pytest

from launch.report.release import Target
from tests.targets import end


def test_a_missed_target_ends_with_exit_code_1(capsys):
    with pytest.raises(SystemExit) as caught:
        end([Target(what="error", found=4, wish=5), Target(what="rate", found=1999, wish=2000, least=True)])
    assert caught.value.code == 1
    assert capsys.readouterr().out.splitlines() == [
        "error: 4; wished: at most 5, kept",
        "rate: 1,999; wished: at least 2,000, MISSED",
    ]


def test_a_wish_out_of_reach_is_told_and_a_looser_bound_held(capsys):
    known = {"what": "error", "wish": 5, "held": 6.5, "unit": " %"}
    end([Target(found=6.0, **known)])
    assert capsys.readouterr().out == "error: 6 %; wished: at most 5 %, missed; held: at most 6.5 %, kept\n"
    with pytest.raises(SystemExit):
        end([Target(found=6.6, **known)])
    end([Target(found=5, **known)])
    assert capsys.readouterr().out.splitlines()[-1] == "error: 5 %; wished: at most 5 %, kept"
