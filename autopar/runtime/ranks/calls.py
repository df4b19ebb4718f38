"""Compares which method of the engine each rank calls, so that ranks that disagree raise an error
instead of waiting for each other, or mixing their messages.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import AutoparError

CALLS = (
    "step", "a second pass of step", "eval_step", "full_state_dict", "save", "load", "export", "set",
    "load_state_dict", "freeze", "unfreeze", "gradient_norm", "reduce_gradients", "average",
    "averaged", "full_optimizer_state_dict", "load_optimizer_state_dict", "add_param_group",
    "register_gradient_hook",
)  # fmt: skip
"""The methods of an engine that every rank calls together. A rank sends the number of its method
here.
"""


def check_calls(told: Sequence[tuple[int, int, int]]) -> None:
    """Raise AutoparError unless all ranks call one method, at one step. `told` has an entry (rank,
    method's index in `CALLS`, steps so far) from each rank.
    """
    ranks = sorted(told)
    calls: dict[tuple[int, int], list[int]] = {}
    for rank, method, steps in ranks:
        calls.setdefault((method, steps), []).append(rank)
    if len(calls) > 1:
        raise AutoparError(
            f"ranks called different methods of the engine: {_listed(calls)}. Every rank calls the same methods in the same order: "
            "call them outside of `if rank == 0:`, and give each rank as many batches"
        )


def _listed(calls: dict[tuple[int, int], list[int]]) -> str:
    shown = [
        f"{_ranks(ranks)} called {CALLS[method]} after {steps} steps"
        for (method, steps), ranks in list(calls.items())[:4]
    ]
    return ", ".join(shown) + (f" and {len(calls) - 4} more" if len(calls) > 4 else "")


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
