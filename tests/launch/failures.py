"""Kill or stop one rank of `auto3d train` in the middle of an iteration: python -m tests.launch.failures [times]

Prints what results/failures.md holds. The command runs in a process forked from this one, which saves the imports.
"""

import multiprocessing
import os
import random
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from tabulate import tabulate

from launch import main as command
from launch.run.ranks import GRACE_S

RECIPE = """
model:
  architecture: GPT2LMHeadModel
  config: {n_layer: 4, n_head: 2, n_embd: 32, n_positions: 32, vocab_size: 256, bos_token_id: 0, eos_token_id: 0}
data: {sequence_length: 32}
training: {global_batch: 8, iterations: 1000000}
plan: {pp: 4, micro_batch_size: 1}
"""
RANKS = 4
TIMES = 20
TIMEOUT_S = 3  # training.timeout_s
SLACK_S = GRACE_S + 2
SCHEDULES = ("1f1b", "chimera")
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
WORDS = {signal.SIGKILL: "was killed by SIGKILL", signal.SIGSTOP: "is stopped"}
HEADING = f"""\
# A rank killed or stopped in the middle of an iteration

Made by `python -m tests.launch.failures`: `auto3d train` of a small GPT-2 over {RANKS} ranks, a random one of which
gets the signal at a random moment. As it should be: the command ends within {SLACK_S:g} s of the signal or, where the
rank is only stopped, of training.timeout_s = {TIMEOUT_S} s after it, with exit code 1 and no process left; it names the
rank, its host, stage and operation, and what other ranks waited for.
"""


@dataclass(frozen=True)
class End:
    """How the command ended after ``rank`` got its signal."""

    rank: int
    seconds: float
    exit_code: int
    output: str
    left: list[int]  # processes

    def faults(self, number: signal.Signals) -> list[str]:
        """What is not as it should be."""
        place = rf"on {re.escape(socket.gethostname())}, in iteration \d+ at [FBSU][\d+]*@\d(:1)? of stage \d,"
        told = re.search(rf"^rank {self.rank} {place} {WORDS[number]}", self.output, re.MULTILINE)
        waited = re.search(rf"^rank \d {place} (waited 3 s|was waiting) for \w+", self.output, re.MULTILINE)
        latest_s = SLACK_S + (TIMEOUT_S if number is signal.SIGSTOP else 0)
        checks = {
            f"exit code {self.exit_code}": self.exit_code == 1,
            f"took {self.seconds:.1f} s": self.seconds < latest_s,
            f"left processes {self.left}": not self.left,
            "does not name rank, host, stage and operation": told,
            "does not say what others waited for": waited,
            "shows a traceback": "Traceback" not in self.output,
        }
        return [fault for fault, fine in checks.items() if not fine]


def strike(schedule: str, number: signal.Signals, seed: int) -> End:
    """Train, send ``number`` to a random rank at a random moment, and see how that ends."""
    chance = random.Random(f"{schedule} {number} {seed}")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "own.yaml").write_text(RECIPE)
        output = Path(folder) / "output"
        arguments = ["train", f"{folder}/own.yaml", f"plan.schedule={schedule}", f"training.timeout_s={TIMEOUT_S}"]
        arguments.append("training.log_every=1")
        training = _start(arguments, output)
        try:
            while not _reaches("iteration 3/", output, training):  # with so short a time-out a busy machine may not
                training = _start(arguments, output)
            time.sleep(chance.uniform(0, 0.3))
            ranks = sorted(psutil.Process(training.pid).children(), key=lambda child: (child.create_time(), child.pid))
            assert len(ranks) == RANKS
            rank = chance.randrange(RANKS)
            start = time.monotonic()
            ranks[rank].send_signal(number)
            training.join(timeout=60)
            seconds = time.monotonic() - start
            left = [process.pid for process in ranks if process.is_running()]
        finally:
            training.kill()
            training.join()
        return End(rank, seconds, training.exitcode, _ending(output.read_text()), left)


def _command(arguments: Sequence[str], output: Path) -> None:
    os.setsid()  # else the kernel wakes stopped ranks when the shell that started this program ends (exit(3))
    sys.stdout = sys.stderr = output.open("w", buffering=1)
    os.dup2(sys.stderr.fileno(), 1)
    os.dup2(sys.stderr.fileno(), 2)
    sys.argv = ["auto3d", *arguments]
    command.main()


def _start(arguments: Sequence[str], output: Path) -> multiprocessing.Process:
    output.unlink(missing_ok=True)
    training = multiprocessing.get_context("fork").Process(target=_command, args=(arguments, output))
    training.start()
    return training


def _reaches(words: str, output: Path, training: multiprocessing.Process) -> bool:
    """Wait until it says ``words``; False where a wait of its own took too long before."""
    deadline = time.monotonic() + 300
    while not (output.exists() and words in output.read_text()):
        if not training.is_alive():
            told = output.read_text()
            assert f"waited {TIMEOUT_S} s" in told or "did not meet" in told, told
            print("it timed out before it was struck: once more", file=sys.stderr)
            return False
        assert time.monotonic() < deadline, f"no {words!r} after 300 s"
        time.sleep(0.01)
    return True


def _ending(output: str) -> str:
    return output[output.find("auto3d: ") :]


def main() -> None:
    times = int(sys.argv[1]) if len(sys.argv) > 1 else TIMES
    rows, example, failed = [], {}, False
    for schedule in SCHEDULES:
        for number in SIGNALS:
            ends = [strike(schedule, number, seed) for seed in range(times)]
            example[number] = ends[-1].output.strip()
            faults = [(seed, end.rank, fault) for seed, end in enumerate(ends) for fault in end.faults(number)]
            good = sum(not end.faults(number) for end in ends)
            rows.append((schedule, number.name, f"{good} of {times}", f"{max(end.seconds for end in ends):.1f}"))
            failed |= bool(faults)
            print(schedule, number.name, faults or "as it should be", file=sys.stderr, flush=True)
    print(HEADING)
    print(tabulate(rows, ["schedule", "signal", "as it should be", "longest, s"], "github"))
    for number, text in example.items():
        print(f"\nWhat it says after {number.name}, for example:\n\n```\n{text}\n```")
    sys.exit(failed)


if __name__ == "__main__":
    main()
