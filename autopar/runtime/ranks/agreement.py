"""Shares results and errors between all ranks, so that all ranks continue or fail together. Also
reports the loss of other ranks.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch.distributed as dist

from autopar.errors import AutoparError
from autopar.runtime.ranks.process_groups import call_group

_T = TypeVar("_T")

TIMEOUT_S = 600.0
"""Seconds that a rank waits for the others. The longest work of one rank alone is planning and file
access.
"""


_OF_GLOO = ("gloo", "pair closure", "Connection closed by peer", "Connection reset by peer")
"""Parts of gloo's messages. Once a collective has timed out, the next one names no source."""


class LostRanks(AutoparError):
    """Raised if another rank has ended, or did not respond within the time limit."""


def from_first(group: dist.ProcessGroup | None, function: Callable[[], _T]) -> _T:
    """Call `function` on rank 0 only, and return its result on every rank, or raise its
    AutoparError on every rank. Without a group this rank is alone and calls it.
    """
    if group is None:
        return function()
    message: list[tuple[Any, str]] = [(None, "")]
    if dist.get_rank() == 0:
        message = [_outcome(function)]
    dist.broadcast_object_list(message, src=0, group=group)
    value, mistake = message[0]
    if mistake:
        raise AutoparError(mistake)
    return value


def from_all(group: dist.ProcessGroup | None, function: Callable[[], _T]) -> list[_T]:
    """Call `function` on every rank, and return the list of results, by rank, on every rank. If
    ranks fail, the AutoparError of the first one is raised on all. Without a group this rank is
    alone.
    """
    if group is None:
        return [function()]
    found: list[tuple[Any, str]] = [(None, "")] * dist.get_world_size()
    dist.all_gather_object(found, _outcome(function), group=group)
    for rank, (_, mistake) in enumerate(found):
        if mistake:
            raise AutoparError(
                mistake
                if all(other == mistake for _, other in found)
                else f"rank {rank}: {mistake}"
            )
    return [value for value, _ in found]


def raise_on_all(mistake: AutoparError | None) -> None:
    """Raise the AutoparError of the first rank that has one, on every rank; a rank's own one as it is.
    Every rank must call it; `mistake` is None on ranks without an error.
    """

    def own() -> None:
        if mistake is not None:
            raise mistake

    try:
        from_all(call_group(), own)
    except AutoparError as error:
        raise mistake or error from None


def _outcome(function: Callable[[], _T]) -> tuple[_T | None, str]:
    try:
        return function(), ""
    except AutoparError as error:
        return None, str(error)


def lost_contact(error: BaseException) -> bool:
    """Whether an error comes from gloo, NCCL or the store, which means that other ranks are
    unreachable.
    """
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _OF_GLOO)
    )


@contextlib.contextmanager
def lost_ranks(doing: str) -> Iterator[None]:
    """A context in which an error of gloo, NCCL or the store becomes LostRanks, with advice.
    `doing`, such as "while saving", says when.
    """
    try:
        yield
    except RuntimeError as error:
        if not lost_contact(error):
            raise
        rank = dist.get_rank() if dist.is_initialized() else 0
        raise LostRanks(
            f"rank {rank} lost the other ranks {doing}: one of them ended, or did not answer within the time limit of the process group. "
            "The first error that any rank printed is the cause; torchrun --max-restarts starts all ranks again, and engine.load goes on "
            f"from the last checkpoint.  ({type(error).__name__}: {str(error)[:200]})"
        ) from error


def say(text: str) -> None:
    """Print a line to stderr, on rank 0 only. A failing stderr does not stop training."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        with contextlib.suppress(OSError, ValueError):  # full, or closed
            print(f"autopar: {text}", file=sys.stderr, flush=True)
