"""`benchmarks/exactness/same_gradients.py` on programs of one gather, for which it is plain what a wrong backward does."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from autopar.rewrite.collectives.axes import AxisGroup, active_axes, axis_group
from autopar.rewrite.collectives.transitions import all_gather, identity, shard, wait
from benchmarks.exactness import same_gradients
from benchmarks.exactness.same_gradients import (
    IGNORED,
    SAME,
    UNREAD,
    any_rank,
    same_backwards,
    without_ignored,
)

ROWS, SEQ = 3, 8
BATCHES = [
    {
        "x": torch.arange(ROWS * SEQ, dtype=torch.float64).view(ROWS, SEQ).sin() + k,
        "labels": torch.arange(SEQ),
    }
    for k in range(2)
]


def first_position(whole: Tensor, labels: Tensor) -> Tensor:
    """Only rank 0 has a gradient, and only at a position that it holds."""
    return (whole[:, 0] ** 2).sum() * (axis_group("tp").index == 0)


def last_position(whole: Tensor, labels: Tensor) -> Tensor:
    """Only rank 0 has a gradient, at a position that it does not hold."""
    return (whole[:, -1] ** 2).sum() * (axis_group("tp").index == 0)


def cut_again(whole: Tensor, labels: Tensor) -> Tensor:
    return (shard(whole, "tp", dim=1, backward="pad") ** 2).sum()


def every_position(whole: Tensor, labels: Tensor) -> Tensor:
    return (whole**2).sum() * (1 + axis_group("tp").index)


def unread(whole: Tensor, labels: Tensor) -> Tensor:
    return whole.sum() * 0


def flat_here(whole: Tensor, labels: Tensor) -> Tensor:
    """No gradient on this data; on other data there is one."""
    return (whole - 100).relu().sum()


def valid_targets(whole: Tensor, labels: Tensor) -> Tensor:
    """Only rank 0 has a gradient, where there are targets."""
    return (whole**2 * (labels != IGNORED)).sum() * (axis_group("tp").index == 0)


def one_rank_lacks_it(whole: Tensor, labels: Tensor) -> Tensor:
    return (whole if axis_group("tp").index else whole.detach().requires_grad_())[:, 0].sum()


@dataclass
class OneGather:
    """What `same_backwards` needs of an engine: a program that is a transition and what is made of its value."""

    loss: object
    later: bool
    function: object
    right: str
    axes: dict = field(init=False)
    _leaves: dict = field(default_factory=dict)
    plan: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(num_microbatches=1))

    def __post_init__(self) -> None:
        self.axes = {
            "tp": AxisGroup(
                "tp", dist.get_world_size(), dist.get_rank(), dist.group.WORLD.group_name
            )
        }
        graph = Graph()
        x, labels = graph.placeholder("x"), graph.placeholder("labels")
        arguments = {"dim": 1, "size": SEQ} if self.function is all_gather else {}
        arguments |= {"backward": self.right} | ({"async_op": True} if self.later else {})
        self.node = graph.call_function(self.function, (x, "tp"), arguments)
        value = graph.call_function(wait, (self.node,)) if self.later else self.node
        graph.output(graph.call_function(self.loss, (value, labels)))
        self.module = GraphModule(nn.Module(), graph)

    def local_batch(self, batch: dict) -> dict:
        return batch

    def step(self, batch: dict) -> Tensor:
        with active_axes(self.axes):
            x = (
                shard(batch["x"], "tp", dim=1)
                if self.function is all_gather
                else batch["x"].clone()
            )
            loss = self.module(x.requires_grad_(), batch["labels"])
            loss.backward()
            return loss.detach()


def found(
    rank: int, loss: object, batches: list, later: bool, function: object, right: str, wrong: str
) -> tuple[dict, bool]:
    """In a worker: what `same_backwards` finds, and whether the program is as it was."""
    engine = OneGather(loss, later, function, right)
    code = engine.module.code
    same = same_backwards(
        engine, batches, [("m", engine.module, engine.node, [wrong])], lambda: None
    )
    return same, engine.module.code == code


def check(
    pool,
    loss,
    expected: str,
    batches: list = BATCHES,
    later: bool = False,
    backwards: str = "reduce_scatter slice",
) -> None:
    """`backwards`: the right one and the wrong one."""
    function = all_gather if "slice" in backwards else identity
    same = {(("m", function.__name__), backwards.split()[1]): expected} if expected else {}
    assert (
        pool.run(found, loss, batches, later, function, *backwards.split(), timeout_s=60.0)
        == [(same, True)] * 4
    )


@pytest.mark.parametrize("later", [False, True], ids=["at_once", "asynchronous"])
def test_what_the_gradients_are_decides(pool4, later):
    for loss, expected in (
        (first_position, SAME),
        (cut_again, SAME),
        (last_position, ""),
        (every_position, ""),
        (unread, UNREAD),
    ):
        check(pool4, loss, expected, later=later)


def test_zero_gradients_and_missing_ones_prove_nothing(pool4):
    """Unless the value may be anything."""
    check(pool4, unread, UNREAD)
    check(pool4, flat_here, "")
    check(pool4, one_rank_lacks_it, "", backwards="slice reduce_scatter")


def test_one_step_that_differs_suffices(pool4):
    """The position with a target is rank 0's in the first batch and rank 1's in the second."""
    only = [torch.where(torch.arange(SEQ) == k, 1, IGNORED) for k in (0, 3)]
    same, other = ({"x": BATCHES[0]["x"], "labels": labels} for labels in only)
    check(pool4, valid_targets, "", [same, other])


def test_ignored_targets_do_not_make_backwards_the_same(pool4):
    """In both steps only rank 0's positions have targets; the last step gives all of them one."""
    labels = torch.where(torch.arange(SEQ) < 2, torch.arange(SEQ), IGNORED)
    check(pool4, valid_targets, "", [batch | {"labels": labels} for batch in BATCHES])
    filled = without_ignored({"labels": labels, "x": BATCHES[0]["x"]})
    assert filled["labels"].tolist() == [0, 1, 1, 1, 1, 1, 1, 1] and filled["x"] is BATCHES[0]["x"]


def test_the_backward_of_an_identity(pool4):
    """A sum over ranks is no identity, not even where one rank alone has a gradient: the others get it from the sum."""
    check(pool4, first_position, "", backwards="all_reduce identity")
    check(pool4, first_position, "", backwards="all_reduce mask")


def flags(rank: int) -> tuple[bool, bool]:
    return any_rank(rank == 2), any_rank(False)


def test_any_rank(pool4):
    assert pool4.run(flags) == [(True, False)] * 4


def test_a_transition_that_is_waited_for_nowhere_is_refused():
    graph = Graph()
    node = graph.call_function(all_gather, (graph.placeholder("x"), "tp"), {"async_op": True})
    graph.output(graph.call_function(torch.relu, (node,)))
    with pytest.raises(
        RuntimeError, match="all_gather is asynchronous, and relu is not where it is waited for"
    ):
        with same_gradients.arrivals([("m", GraphModule(nn.Module(), graph), node)]):
            pass
