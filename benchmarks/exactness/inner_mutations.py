"""Watch and damage the messages that special lowerings send inside one node: the loss, attention
over a sharded sequence, routed experts.

These messages are no nodes of the program. `Watch` sees each one as it is sent, by the node that
runs it, and may damage it. A damaged message has the right shape, so that only the numbers can show
the damage:

    delete    the receiver keeps what it would have sent
    zero      the receiver gets zeros
    double    what was received is sent once more
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from autopar.rewrite.collectives import transitions
from autopar.rewrite.lowerings import context_attention, expert_parallel, vocabulary_parallel

Place = tuple[str, str]
"""(module of the program, node in it)."""

KINDS = ("delete", "zero", "double")
_FRAMES_TO_CONTEXT = 2
"""Stack frames between a message and the forward or backward of its autograd function: a helper may
send it.
"""


@dataclass(frozen=True, slots=True)
class Message:
    """The `index`-th message of one `phase` ("forward" or "backward") of the `call`-th autograd
    function of a node (-1: of no autograd function). `function` sends it. `what` is "max" or "sum"
    for an all-reduce of the loss, otherwise empty.
    """

    place: Place
    function: str
    call: int
    phase: str
    index: int
    what: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.function} {self.call}.{self.index} {self.phase}" + (
            f" {self.what}" if self.what else ""
        )


# ------------------------------------------------------------------------------------------------------------------- damage


def _refilled(x: Tensor, shape: Iterable[int]) -> Tensor:
    """The elements of x, in order, in another shape: cut, or filled up with zeros."""
    flat, wanted = x.reshape(-1), prod(shape := tuple(shape))
    flat = (
        flat[:wanted]
        if flat.numel() >= wanted
        else torch.cat([flat, flat.new_zeros(wanted - flat.numel())])
    )
    return flat.view(shape)


def _damaged_sum(send: Callable, kind: str, x: Tensor, group: Any, op: str) -> Tensor:
    """What the loss gets for its all-reduce `send(x, group, op)` under the damage `kind`: x itself,
    zeros, or the all-reduce of the all-reduce.
    """
    return {
        "delete": lambda: x,
        "zero": lambda: torch.zeros_like(x),
        "double": lambda: send(send(x, group, op), group, op),
    }[kind]()


def _damaged_hop(
    send: Callable, kind: str, ring: Any, outgoing: Tensor, incoming: Tensor, tag: int
) -> list:
    """Send a message to the next rank of a ring by `send`, with the damage `kind`: `incoming` gets
    zeros, the outgoing elements, or what came after sending twice. Returns the works to wait for,
    of which none are left.
    """
    if kind == "zero":
        incoming.zero_()
    elif kind == "delete":
        incoming.copy_(_refilled(outgoing, incoming.shape))
    else:
        context_attention._wait(send(ring, outgoing, incoming, tag))
        second = torch.empty_like(incoming)
        context_attention._wait(send(ring, _refilled(incoming, outgoing.shape), second, tag))
        incoming.copy_(second)
    return []


def _damaged_exchange(
    send: Callable, kind: str, x: Tensor, to: list[int], of: list[int], group: Any
) -> Tensor:
    """What a rank gets for the exchange of rows, or of their numbers, between experts' ranks under
    the damage `kind`: zeros, its own rows, or the result of exchanging twice. `to` and `of` have
    the numbers of rows that it sends to and gets from each rank.
    """
    shape = (sum(of), *x.shape[1:])
    if kind == "double":
        return send(_refilled(send(x, to, of, group), x.shape), to, of, group)
    return x.new_zeros(shape) if kind == "zero" else _refilled(x, shape)


def _damaged_primitive(send: Callable, kind: str, name: str, x: Tensor, *rest: Any) -> Tensor:
    """What a rank gets for the all-to-all `name` of Ulysses' attention under the damage `kind`:
    zeros, its own elements, or the result of doing it twice.
    """
    result = send(name, x, *rest)
    if kind == "double":
        return send(name, _refilled(result, x.shape), *rest)
    return torch.zeros_like(result) if kind == "zero" else _refilled(x, result.shape).clone()


def _damaged_gather(send: Callable, kind: str, x: Tensor, group: Any) -> Tensor:
    """What a rank gets for the all-gather of the fused loss's statistics under the damage `kind`:
    zeros, its own values for all ranks, or the result of gathering twice.
    """
    result = send(x, group)
    if kind == "double":
        return send(_refilled(result, x.shape), group)
    return torch.zeros_like(result) if kind == "zero" else x.expand_as(result)


_SENDING = (
    (vocabulary_parallel, "_gathered", _damaged_gather),
    (vocabulary_parallel, "_reduced", _damaged_sum),
    (context_attention, "_exchange", _damaged_hop),
    (expert_parallel, "_all_to_all", _damaged_exchange),
    (transitions, "apply_primitive", _damaged_primitive),
)
"""(module, name of its function that communicates, function that does the same wrongly)."""

COMMUNICATING = (
    vocabulary_parallel.vocab_parallel_cross_entropy,
    vocabulary_parallel.vocab_parallel_statistics,
    vocabulary_parallel.vocab_parallel_linear_loss,
    context_attention.context_attention,
    expert_parallel.expert_parallel,
)
"""Functions of programs that send messages inside one node."""


def kinds_of(message: Message) -> Iterator[tuple[str, bool]]:
    """(kind, whether it changes nothing) of each of the KINDS of damage to a message.

    Cross-entropy does not change if all ranks subtract the same number from the logits of a token,
    such as a maximum of maxima, or zero.
    """
    for kind in KINDS:
        yield kind, message.what == "max" and kind in ("zero", "double")


# --------------------------------------------------------------------------------------------------------------------- the hook


class Watch:
    """Watches the messages that nodes send. Within `with watch.over(nodes):`, `see(message)` is
    called for each one, and returns the kind of damage to do to it, or None.
    """

    def __init__(self, see: Callable[[Message], str | None]) -> None:
        self._see, self._now, self._calls = see, None, 0

    @contextlib.contextmanager
    def over(self, nodes: Iterable[tuple[str, GraphModule, Node]]) -> Iterator[None]:
        """A context in which the messages of `nodes` are watched. Each node is (module's name,
        module, node).
        """
        found, originals = list(nodes), [getattr(module, name) for module, name, _ in _SENDING]
        targets = [node.target for _, _, node in found]
        try:
            for name, module, node in found:
                node.target = self._entered((name, node.name), node.target)
                module.recompile()
            for (module, name, damaged), original in zip(_SENDING, originals, strict=True):
                setattr(module, name, self._watched(name, original, damaged))
            yield
        finally:
            for (module, name, _), original in zip(_SENDING, originals, strict=True):
                setattr(module, name, original)
            for (_, module, node), target in zip(found, targets, strict=True):
                node.target = target
                module.recompile()

    def _entered(self, place: Place, target: Callable) -> Callable:
        def entered(*args, **kwargs):
            self._now, self._calls, self._outside = place, 0, 0
            try:
                return target(*args, **kwargs)
            finally:
                self._now = None

        return entered

    def _watched(self, name: str, send: Callable, damaged: Callable) -> Callable:
        def watched(*args, **kwargs):
            message = self._identify(
                name,
                next((a for a in args if a in ("max", "sum")), "") if name == "_reduced" else "",
            )
            kind = self._see(message) if message is not None else None
            return send(*args, **kwargs) if kind is None else damaged(send, kind, *args, **kwargs)

        return watched

    def _identify(self, function: str, what: str) -> Message | None:
        """The message that is being sent now, with these fields `function` and `what`; None outside
        of watched nodes. In backward, the node is known from the autograd context that its forward
        marked.
        """
        frame = sys._getframe(2)
        for _ in range(_FRAMES_TO_CONTEXT):
            if frame.f_code.co_name in ("forward", "backward") and "ctx" in frame.f_locals:
                break
            frame = frame.f_back
        else:
            if self._now is None:
                return None
            self._outside += 1
            return Message(self._now, function, -1, "forward", self._outside - 1, what)
        ctx, phase = frame.f_locals["ctx"], frame.f_code.co_name
        if not hasattr(ctx, "watched"):
            if self._now is None:
                return None
            ctx.watched = (self._now, self._calls, Counter())
            self._calls += 1
        place, call, sent = ctx.watched
        sent[phase] += 1
        return Message(place, function, call, phase, sent[phase] - 1, what)
