"""Wrong backwards of transitions that return what the right ones return, so that training on them
shows no difference.

Three kinds of programs have them. If a value is gathered and cut again, each rank's partial
gradient lies in its own shard, and adding up the ranks' gradients adds zeros. If the loss reads one
position only (a class token), a single rank may give the only gradient. Last, nothing reads the
last position of a causal model, since it predicts no target.

They are found before any mutant runs. The undamaged program trains, and the gradients that reach
each transition are recorded. Then every backward that its function allows is run on them. A
backward counts as the same if, on every rank and in every step, it returns what the right one
returns, element by element, and

    SAME      that is not zero on all ranks in any step, or
    UNREAD    that is zero on all ranks in all steps, and large random numbers in the place of the value change no loss and no parameter.

A last step leaves no target out, so that no pattern of ignored targets makes two backwards look
alike. Equal gradients give equal parameters, so that the mutant trains as the program does. Its
training is checked like that of all others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule, Node

from autopar.rewrite.collectives.axes import active_axes
from autopar.rewrite.collectives.transitions import wait
from autopar.runtime.engine import Engine
from benchmarks.exactness.inner_mutations import Place

IGNORED = -100
SAME, UNREAD = "same gradients", "read by nothing"
SCRAMBLED = 1e3
"""Standard deviation of the random numbers that replace a value: large, so that flat regions of
functions are left.
"""

Candidates = Iterable[tuple[str, GraphModule, Node, Iterable[str]]]
"""(module's name, module, transition, the backwards to compare with its own)."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A gradient that reached a transition, and the call that it came back through: the function,
    its operand (without values) and its other arguments.
    """

    gradient: Tensor
    operand: Tensor
    function: Callable[..., Tensor]
    args: tuple
    kwargs: dict[str, Any]

    def through(self, backward: str) -> Tensor:
        """The gradient of the operand, if the transition had the primitive `backward` as its
        backward.
        """
        x = torch.zeros_like(self.operand, device=self.gradient.device, requires_grad=True)
        return torch.autograd.grad(
            self.function(x, *self.args, **{**self.kwargs, "backward": backward}), x, self.gradient
        )[0]


def same_backwards(
    engine: Engine,
    batches: list[dict[str, Tensor]],
    candidates: Candidates,
    reset: Callable[[], None],
) -> dict[tuple[Place, str], str]:
    """Find wrong backwards that do what the right one does: (place, backward) -> SAME or UNREAD, as
    the module describes. Equal on every rank.

    `candidates` has the transitions and their wrong backwards. `reset` puts the engine back to
    where training starts; this function trains it.
    """
    candidates = list(candidates)
    runs = [*batches, without_ignored(batches[0])]
    with arrivals((name, module, node) for name, module, node, _ in candidates) as arrived:
        trained = _train(engine, runs, reset)
    found = {}
    for name, module, node, others in candidates:
        with active_axes(engine.axes):
            seen = arrived[name, node.name]
            if any_rank(len(seen) != len(runs) * engine.plan.num_microbatches):
                continue  # no gradient comes here, or not on every rank
            right = [arrival.through(node.kwargs["backward"]) for arrival in seen]
            same = [other for other in others if _agree(seen, right, other)]
            nonzero = {any_rank(bool(gradient.any())) for gradient in right}
        if not same or len(nonzero) > 1:
            continue
        if nonzero == {True}:
            found |= {((name, node.name), other): SAME for other in same}
        elif _is_unread(engine, runs, module, node, reset, trained):
            found |= {((name, node.name), other): UNREAD for other in same}
    return found


def _train(
    engine: Engine, runs: list[dict[str, Tensor]], reset: Callable[[], None]
) -> list[Tensor]:
    """Reset the engine and run a step for each batch. Returns the loss of each step, followed by
    this rank's tensors after the last.
    """
    reset()
    losses = [engine.step(engine.local_batch(batch)) for batch in runs]
    return [*losses, *(leaf.detach().clone() for leaf in engine._leaves.values())]


def _is_unread(
    engine: Engine,
    runs: list,
    module: GraphModule,
    node: Node,
    reset: Callable[[], None],
    trained: list[Tensor],
) -> bool:
    """Whether training gives `trained` (as `_train`), bit by bit on every rank, if random numbers
    replace the value of a transition.
    """
    value = _value(node)
    target = value.target

    def scrambled(*args, **kwargs) -> Tensor:
        right = target(*args, **kwargs)
        return right + (SCRAMBLED * torch.randn_like(right) - right).detach()

    try:
        value.target = scrambled
        module.recompile()
        found = _train(engine, runs, reset)
    finally:
        value.target = target
        module.recompile()
    return not any_rank(any(not torch.equal(a, b) for a, b in zip(found, trained, strict=True)))


def _value(node: Node) -> Node:
    """The node with the transition's result: the transition itself or, if it is asynchronous, its
    `wait`. RuntimeError if its user is no `wait`.
    """
    value = next(iter(node.users)) if node.kwargs.get("async_op") else node
    if value is not node and value.target is not wait:
        raise RuntimeError(
            f"{node.name} is asynchronous, and {value.name} is not where it is waited for"
        )
    return value


def _agree(seen: list[Arrival], right: list[Tensor], backward: str) -> bool:
    wrong = [arrival.through(backward) for arrival in seen]
    return not any_rank(any(not torch.equal(a, b) for a, b in zip(wrong, right, strict=True)))


def without_ignored(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch in which -100 in an int64 tensor (ignored targets) is replaced by the tensor's
    largest value.
    """
    return {
        name: x.masked_fill(x == IGNORED, x.max()) if x.dtype == torch.int64 and x.numel() else x
        for name, x in batch.items()
    }


@contextlib.contextmanager
def arrivals(
    nodes: Iterable[tuple[str, GraphModule, Node]],
) -> Iterator[dict[Place, list[Arrival]]]:
    """A context that records the gradients that reach transitions, given as (module's name, module,
    node). It yields a dict: place -> list of arrivals, in order, which backward fills.
    """
    found: dict[Place, list[Arrival]] = {}
    originals: list[tuple[GraphModule, Node, Callable]] = []
    try:
        for name, module, node in nodes:
            done = _value(node)
            started, waited = _watching(node.target, found.setdefault((name, node.name), []))
            originals += (
                [(module, node, node.target)]
                if done is node
                else [(module, node, node.target), (module, done, done.target)]
            )
            if done is node:
                node.target = lambda *args, started=started, waited=waited, **kwargs: waited(
                    started(*args, **kwargs)
                )
            else:
                node.target, done.target = (
                    started,
                    lambda pending, waited=waited: waited(wait(pending)),
                )
            module.recompile()
        yield found
    finally:
        for module, node, target in originals:
            node.target = target
            module.recompile()


def _watching(function: Callable, found: list[Arrival]) -> tuple[Callable, Callable]:
    """Two functions: one calls the transition and remembers its arguments; the value must pass
    through the other, which records its gradient in `found`.
    """
    latest: list[tuple] = []

    def started(*args, **kwargs):
        given = {key: value for key, value in kwargs.items() if key != "async_op"}
        latest[:] = [(args[0].detach().to("meta"), function, args[1:], given)]
        return function(*args, **kwargs)

    def waited(value: Tensor) -> Tensor:
        if value.requires_grad:
            call = latest[0]
            value.register_hook(
                lambda gradient: found.append(Arrival(gradient.detach().clone(), *call))
            )
        return value

    return started, waited


def any_rank(flag: bool) -> bool:
    """Whether the flag is True on any rank. Every rank must call it."""
    flags = torch.tensor([float(flag)])
    dist.all_reduce(flags)
    return bool(flags)
