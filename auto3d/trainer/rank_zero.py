"""What rank 0 alone does: it prints, and all ranks get the result of what it makes."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

from auto3d.errors import InputError
from auto3d.runtime.waiting import PeerLostError, waiting_for
from auto3d.trainer.setup import setup

Result = TypeVar("Result")


def tell(line: str) -> None:
    """Print ``line`` on rank 0."""
    if not setup().world.rank:
        print(f"auto3d: {line}", flush=True)


def first_and_more(names: Sequence[str]) -> str:
    """In words, the first of ``names``, and how many others there are."""
    return names[0] + f" and {len(names) - 1} more" * (len(names) > 1)


def of_rank_0(make: Callable[[], Result], what: str) -> Result:
    """Rank 0's ``make()``, on every rank; ``what`` says in an error what the others waited for.

    An error is raised on every rank: an InputError as it is, any other elsewhere as a PeerLostError.
    """
    answer: list[tuple[Result | None, str, bool]] = [(None, "", False)]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            answer = [(make(), "", False)]
        except Exception as error:  # whatever it is, the other ranks wait for an answer
            failure = error
            answer = [(None, f"{type(error).__name__}: {error}", isinstance(error, InputError))]
    with waiting_for(f"rank 0 {what}"):
        dist.broadcast_object_list(answer)
    if failure is not None:
        raise failure
    result, problem, is_of_user = answer[0]
    if problem:
        of_rank = InputError(problem.partition(": ")[2]), PeerLostError(f"rank 0 failed {what}: {problem}")
        raise of_rank[not is_of_user]
    return result  # type: ignore[return-value]  # None only if that is the result
