"""Wrong backwards of transitions that return what the right ones return: nothing that trains on them can notice.

Two kinds of programs have them.  Where a value is gathered and cut again, each rank's partial gradient lies in its own shard, and adding up
the ranks' gradients adds zeros.  Where the loss reads one position only (a class token), it may be the one rank that gives a gradient that
holds this position.

They are found before any mutant runs.  The undamaged program trains, the gradients that reach each transition are written down, and every
backward that its function allows is run on them.  One counts as the same if, on every rank and in every step, it returns what the right
one returns, element by element, and that is not zero on all ranks.  A last step leaves no target out, so that no pattern of ignored ones
makes two backwards look alike.  From equal gradients follow equal parameters, so that the mutant trains as the program does; that it
really does is checked with all others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from inner_mutations import Place
from torch import Tensor
from torch.fx import GraphModule, Node

from autopar.rewrite.axes import active_axes
from autopar.rewrite.collectives import wait
from autopar.runtime.engine import Engine

IGNORED = -100
Candidates = Iterable[tuple[str, GraphModule, Node, Iterable[str]]]
"""(module's name, module, transition, the backwards to compare with its own)."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A gradient that reached a transition, and the call that it came back through: (operand without its values, function, the rest)."""

    gradient: Tensor
    operand: Tensor
    function: Callable[..., Tensor]
    args: tuple
    kwargs: dict[str, Any]

    def through(self, backward: str) -> Tensor:
        """What the transition returns for the gradient, with another backward or its own."""
        x = torch.zeros_like(self.operand, device=self.gradient.device, requires_grad=True)
        return torch.autograd.grad(self.function(x, *self.args, **{**self.kwargs, "backward": backward}), x, self.gradient)[0]


def same_backwards(engine: Engine, batches: list[dict[str, Tensor]], candidates: Candidates) -> set[tuple[Place, str]]:
    """(place, backward) of the candidates that do what the right backward does.  Trains the engine; equal on every rank."""
    candidates = list(candidates)
    runs = [*batches, without_ignored(batches[0])]
    with arrivals((name, module, node) for name, module, node, _ in candidates) as arrived:
        for batch in runs:
            engine.step(engine.local_batch(batch))
    found = set()
    with active_axes(engine.axes):
        for name, _, node, others in candidates:
            seen = arrived[name, node.name]
            if any_rank(len(seen) != len(runs) * engine.plan.num_microbatches):
                continue  # no gradient comes here, or not on every rank
            right = [arrival.through(node.kwargs["backward"]) for arrival in seen]
            if all(any_rank(bool(gradient.any())) for gradient in right):
                found |= {((name, node.name), other) for other in others if _agree(seen, right, other)}
    return found


def _agree(seen: list[Arrival], right: list[Tensor], backward: str) -> bool:
    wrong = [arrival.through(backward) for arrival in seen]
    return not any_rank(any(not torch.equal(a, b) for a, b in zip(wrong, right, strict=True)))


def without_ignored(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch with the largest of its targets where it has ignored ones."""
    return {name: x.masked_fill(x == IGNORED, x.max()) if x.dtype == torch.int64 and x.numel() else x for name, x in batch.items()}


@contextlib.contextmanager
def arrivals(nodes: Iterable[tuple[str, GraphModule, Node]]) -> Iterator[dict[Place, list[Arrival]]]:
    """Within the block, every gradient that reaches a transition is added to the list of its place, in the order of arrival."""
    found: dict[Place, list[Arrival]] = {}
    originals: list[tuple[GraphModule, Node, Callable]] = []
    try:
        for name, module, node in nodes:
            done = next(iter(node.users)) if node.kwargs.get("async_op") else node
            if done is not node and done.target is not wait:
                raise RuntimeError(f"{name}/{node.name} is asynchronous, and {done.name} is not where it is waited for")
            started, waited = _watching(node.target, found.setdefault((name, node.name), []))
            originals += [(module, node, node.target)] if done is node else [(module, node, node.target), (module, done, done.target)]
            if done is node:
                node.target = lambda *args, started=started, waited=waited, **kwargs: waited(started(*args, **kwargs))
            else:
                node.target, done.target = started, lambda pending, waited=waited: waited(wait(pending))
            module.recompile()
        yield found
    finally:
        for module, node, target in originals:
            node.target = target
            module.recompile()


def _watching(function: Callable, found: list[Arrival]) -> tuple[Callable, Callable]:
    """(the transition, which remembers its arguments; what its value passes, to have its gradient written down)."""
    latest: list[tuple] = []

    def started(*args, **kwargs):
        given = {key: value for key, value in kwargs.items() if key != "async_op"}
        latest[:] = [(args[0].detach().to("meta"), function, args[1:], given)]
        return function(*args, **kwargs)

    def waited(value: Tensor) -> Tensor:
        if value.requires_grad:
            call = latest[0]
            value.register_hook(lambda gradient: found.append(Arrival(gradient.detach().clone(), *call)))
        return value

    return started, waited


def any_rank(flag: bool) -> bool:
    """Whether the flag is set on any rank."""
    flags = torch.tensor([float(flag)])
    dist.all_reduce(flags)
    return bool(flags)
