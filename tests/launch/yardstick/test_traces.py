"""Real trainings, replayed in the simulator from the measured times of their operations."""

import gzip
from pathlib import Path
from statistics import mean

import pytest

from auto3d.errors import InputError
from launch.model.measured_layers import published
from launch.yardstick.traces import read_trace, replay

HEADER = "dp_rank,stage,step,optype,start_ts,duration,seq_id"


@pytest.mark.parametrize(
    ("name", "bound", "recorded_only"),
    [("trace_dp2_pp4", 0.010, 0.020), ("trace_dp4_pp4_tp4", 0.005, 0.007)],
)
def test_the_step_times_of_real_trainings(name, bound, recorded_only):
    """Lin et al. replay these steps from the recorded durations within 1.9 and 0.7 %; so does the simulator, and it is
    nearer with the time between two records in which a rank works too."""
    trace = read_trace(published(f"{name}.csv.gz"))
    assert mean_error(trace) <= bound
    assert bound < mean_error(trace, unrecorded=False) <= recorded_only


def mean_error(trace, **options):
    return mean(abs(each.predicted_s / each.measured_s - 1) for each in replay(trace, **options))


def small_trace(folder: Path, *, left_out: str = "") -> Path:
    """Two stages, one micro-batch, one copy: stage 0 computes 3 s, stage 1 waits for it, and so on; 20 s in all."""
    rows = """\
0,0,7,params-all-gather,100,1,0
0,1,7,params-all-gather,100,1,0
0,0,7,forward-compute,102,3,0
0,0,7,forward-send,105,1,0
0,1,7,forward-recv,102,4,0
0,1,7,forward-compute,106,2,0
0,1,7,backward-compute,108,2,0
0,1,7,backward-send,110,1,0
0,0,7,backward-recv,106,5,0
0,0,7,backward-compute,111,4,0
0,0,7,layernorm-grads-all-reduce,115,0,0
0,1,7,layernorm-grads-all-reduce,111,0,0
0,0,7,embedding-grads-all-reduce,115,1,0
0,1,7,embedding-grads-all-reduce,111,5,0
0,0,7,grads-reduce-scatter,117,1,0
0,1,7,grads-reduce-scatter,117,1,0
0,0,7,optimizer-clip-main-grad,118,1,0
0,1,7,optimizer-clip-main-grad,118,1,0
0,0,7,optimizer,119,1,0
0,1,7,optimizer,119,1,0""".splitlines()
    file = folder / "trace.csv.gz"
    with gzip.open(file, "wt") as lines:
        lines.write("\n".join([HEADER, *(row for row in rows if not left_out or left_out not in row)]) + "\n")
    return file


def test_waiting_is_not_part_of_a_communication(tmp_path):
    trace = read_trace(small_trace(tmp_path))
    (exact,), (recorded,) = replay(trace), replay(trace, unrecorded=False)
    assert (exact.step, exact.measured_s, exact.predicted_s) == (7, 20.0, 20.0)
    # Without a record: 1 s before the first forward, and 1 s before the reduce-scatter.
    assert recorded.predicted_s == pytest.approx(18.0)


def test_what_is_no_trace(tmp_path):
    with pytest.raises(InputError, match=r"step 7: stage 0 of copy 0 has no backward-recv 0; a trace needs every"):
        list(replay(read_trace(small_trace(tmp_path, left_out="backward-recv"))))
    file = tmp_path / "trace.csv"
    file.write_text("step,stage\n1,2\n")
    with pytest.raises(InputError, match="lacks the column dp_rank; a trace has dp_rank, stage"):
        read_trace(file)
    file.write_text(f"{HEADER}\n0,0,7,optimizer,soon,1,0\n")
    with pytest.raises(InputError, match="line 2: could not convert string to float: 'soon'"):
        read_trace(file)
    file.write_text(f"{HEADER}\n")
    with pytest.raises(InputError, match="holds no operations"):
        read_trace(file)
