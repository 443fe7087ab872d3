"""The file of `auto3d schedule synthesize`: a bare problem as YAML or JSON, every key checked."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from auto3d.errors import InputError
from auto3d.simulate.costs import MessageCost
from auto3d.synthesis.structures import PLACEMENTS, BareProblem


@dataclass(frozen=True, kw_only=True)
class _Key:
    words: str  # meaning and default
    convert: Callable[[str, Any], Any]


def _count(key: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise InputError(f"{key}: found {value!r}; it must be a whole number from 1 on")
    return value


def _flag(key: str, value: Any) -> bool:
    if type(value) is not bool:
        raise InputError(f"{key}: found {value!r}; it must be true or false")
    return value


def _numbers(key: str, value: Any) -> float | tuple[float, ...]:
    values = value if isinstance(value, list) else [value]
    for number in values:
        if type(number) not in (int, float) or not 0 <= number < inf:
            raise InputError(f"{key}: found {number!r}; it must be a number from 0 on, or a list of them")
    return tuple(map(float, values)) if isinstance(value, list) else float(value)


def _placements(key: str, value: Any) -> frozenset[str]:
    if not isinstance(value, list) or not value or not set(map(str, value)) <= set(PLACEMENTS):
        raise InputError(f"{key}: found {value!r}; it must be a list of {', '.join(PLACEMENTS)}")
    return frozenset(value)


KEYS = {
    "devices": _Key(words="number of devices", convert=_count),
    "micro_batches": _Key(words="micro-batches of an iteration", convert=_count),
    "stages": _Key(words="fine stages, a multiple of the devices [devices]", convert=_count),
    "forward": _Key(words="time of F, per fine stage", convert=_numbers),
    "backward": _Key(words="time of B [the sum of its halves, or twice forward]", convert=_numbers),
    "backward_input": _Key(words="time of I [the rest of B, or half of it]", convert=_numbers),
    "backward_weight": _Key(words="time of W [the rest of B]", convert=_numbers),
    "recompute": _Key(words="time of R [forward]", convert=_numbers),
    "message": _Key(words="time of a message to the next fine stage, and of its gradient [0]", convert=_numbers),
    "overlap": _Key(words="whether messages overlap with compute [true]", convert=_flag),
    "sync": _Key(words="time of the gradient sync, per fine stage [0]", convert=_numbers),
    "sync_copies": _Key(words="the same where several pipes hold a stage [sync]", convert=_numbers),
    "update": _Key(words="time of the update, per fine stage [0]", convert=_numbers),
    "speed": _Key(words="speed of each device [1]", convert=_numbers),
    "activation": _Key(words="bytes of a micro-batch in flight, per fine stage [1]", convert=_numbers),
    "kept": _Key(words="bytes that remain where the stage recomputes [no stage may recompute]", convert=_numbers),
    "deferred": _Key(words="bytes from I to W [activation]", convert=_numbers),
    "weights": _Key(words="bytes that are held all the time, per fine stage and pipe [0]", convert=_numbers),
    "memory": _Key(words="bytes that each device may fill [unlimited]", convert=_numbers),
    "split": _Key(words="whether a backward may be split into I and W [true]", convert=_flag),
    "placements": _Key(words=f"a list of {', '.join(PLACEMENTS)} [all]", convert=_placements),
}
_NEEDED = ("devices", "micro_batches", "forward")


def read_problem(path: str) -> BareProblem:
    """The problem in ``path``; raises InputError with the file and the key if anything is wrong."""
    try:
        values = OmegaConf.to_container(OmegaConf.load(path))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or 'holds no keys'}") from None
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not YAML: {str(error).splitlines()[0]}") from None
    try:
        if not isinstance(values, dict):
            raise InputError(f"holds a list; a problem has the keys {', '.join(KEYS)}")
        return _problem(values)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _problem(values: dict[Any, Any]) -> BareProblem:
    for key in values:
        if key not in KEYS:
            raise InputError(f"{key}: unknown; the keys are {', '.join(KEYS)}")
    for key in _NEEDED:
        if key not in values:
            raise InputError(f"{key}: missing; it is the {KEYS[key].words}")
    read = {key: KEYS[key].convert(key, value) for key, value in values.items()}
    devices = read["devices"]
    stages = read.get("stages", len(read["forward"]) if isinstance(read["forward"], tuple) else devices)
    if stages % devices:
        raise InputError(f"stages: {stages} are no multiple of {devices} devices")

    def listed(key: str, default: float | tuple[float, ...], count: int = stages) -> tuple[float, ...]:
        value = read.get(key, default)
        numbers = value if isinstance(value, tuple) else (value,) * count
        if len(numbers) != count:
            raise InputError(f"{key}: found {len(numbers)} values; it takes a number, or {count} of them")
        return numbers

    forward = listed("forward", 0.0)
    backward = listed("backward", tuple(2 * time for time in forward))
    if "backward" not in read and {"backward_input", "backward_weight"} <= read.keys():
        backward = tuple(map(sum, zip(listed("backward_input", 0.0), listed("backward_weight", 0.0), strict=True)))
    if "backward_weight" in read:
        weight = listed("backward_weight", 0.0)
    elif "backward_input" in read:
        weight = _minus("backward_input", backward, listed("backward_input", 0.0))
    else:
        weight = tuple(time / 2 for time in backward)
    halves = _minus("backward_weight", backward, weight)
    given = listed("backward_input", halves)
    if any(abs(a - b) > 1e-9 * max(a, b) for a, b in zip(halves, given, strict=True)):
        raise InputError("backward_input: it and backward_weight do not add up to backward; give two of the three")
    activation = listed("activation", 1.0)
    speed = listed("speed", 1.0, devices)
    if min(speed) <= 0:
        raise InputError(f"speed: found {min(speed):g}; it must be more than 0")
    return BareProblem(
        devices=devices,
        micro_batches=read["micro_batches"],
        forward=forward,
        backward_input=halves,
        backward_weight=weight,
        recompute=listed("recompute", forward),
        sync=listed("sync", 0.0),
        sync_copies=listed("sync_copies", listed("sync", 0.0)),
        update=listed("update", 0.0),
        messages=tuple(MessageCost(forward=time, backward=time) for time in listed("message", 0.0, stages - 1)),
        overlap=read.get("overlap", True),
        speed=speed,
        activation=activation,
        kept=listed("kept", activation),
        deferred=listed("deferred", activation),
        weights=listed("weights", 0.0),
        memory=listed("memory", inf, devices),
        placements=read.get("placements", frozenset(PLACEMENTS)),
        may_split=read.get("split", True),
        may_recompute="kept" in read,
    )


def _minus(key: str, whole: tuple[float, ...], part: tuple[float, ...]) -> tuple[float, ...]:
    rest = tuple(a - b for a, b in zip(whole, part, strict=True))
    if min(rest) < -1e-9:
        raise InputError(f"{key}: found {max(part):g}; it is longer than the whole backward of its stage")
    return tuple(max(0.0, time) for time in rest)
