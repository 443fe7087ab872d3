"""Targets for predictions of published measurements: python -m tests.benchmarks.published

`auto3d yardstick --out results/published` writes all figures.
"""

import sys

from launch.report.release import Target
from launch.yardstick.results import predictors, replay_trace, score_set
from launch.yardstick.scores import time_error
from launch.yardstick.sets import SETS
from tests.targets import end

# The wish is what these sets should reach; what is held is what they reach today, where that is less.
# set -> (mean error of time wished, held), in per cent
TIMES = {"t4x16-gpt2": (9.0, None), "a100-node": (5.0, 6.5), "megatron-sc21": (8.0, None)}
LARGEST = 15.0  # per cent, of a run of Megatron-LM
TRACES = {"trace_dp2_pp4": 1.0, "trace_dp4_pp4_tp4": 0.5}  # mean error of the step time, in per cent


def main() -> None:
    ours = predictors()["auto3d-simulated"]
    targets = []
    for name, (wish, held) in TIMES.items():
        scored = score_set(SETS[name], [ours], lambda words: print(f"  {words}", file=sys.stderr, flush=True))
        (part,) = scored.parts
        error = 100 * part.scores.time_error
        targets.append(Target(what=f"{name}, mean error", found=error, wish=wish, held=held, unit=" %"))
        if name == "t4x16-gpt2":
            order = part.scores.spearman
            targets.append(Target(what=f"{name}, Spearman's correlation", found=order, wish=0.95, least=True))
        if name == "megatron-sc21":
            pairs = zip(scored.runs, scored.predicted[ours], strict=True)
            largest = 100 * max(time_error(run, said) or 0.0 for run, said in pairs)
            targets.append(Target(what=f"{name}, largest error", found=largest, wish=LARGEST, unit=" %"))
    for name, wish in TRACES.items():
        found = 100 * replay_trace(name).error
        targets.append(Target(what=f"{name}, mean error", found=found, wish=wish, unit=" %"))
    end(targets)


if __name__ == "__main__":
    main()
