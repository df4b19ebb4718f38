"""The verifier runs a rank's program on the meta device and finds every value that is not shaped as the plan says."""

from __future__ import annotations

import pytest
import torch
from support.effort import every
from support.exactness import case, random_plan, setting, solved_plan
from support.trained_stacks import WIDTH, Stack, built
from torch import nn
from torch.fx import Node

from autopar.ir.mesh import MeshShape
from autopar.rewrite.program import Program, assemble
from autopar.rewrite.shape_check import ProgramError, verify_program

MESH = MeshShape(dp=2, tp=2)


def program(name: str, mesh: MeshShape = MESH, rank: int = 0, seed: int | None = None) -> Program:
    found = case(name)
    where = setting(mesh)
    plan = (
        solved_plan(found.traced, found.annotator, where)
        if seed is None
        else random_plan(found.traced, found.annotator, where, seed)
    )
    return assemble(found.traced, plan, rank, torch.device("cpu"))


def first(found: Program, wanted) -> tuple[torch.fx.GraphModule, Node]:
    for module in (found.module, *found.module.children()):
        for node in module.graph.nodes:
            if wanted(node):
                return module, node
    raise AssertionError("the program has no such node")


@pytest.mark.parametrize("rank", every(2, [3, 0]))
@pytest.mark.parametrize("name", every(2, ["moe-tiny", "llama-tiny", "gpt-tiny"]))
def test_right_programs_pass(name, rank):
    assert verify_program(program(name, rank=rank)) > 50
    assert verify_program(program(name, rank=rank, seed=rank)) > 50
    assert verify_program(program(name, MeshShape(tp=4), rank), rows=3) > 50


@pytest.mark.parametrize(("name", "seed"), [("llama-tiny", 5), ("gpt-tiny", 2)])
def test_a_rank_without_heads_passes(name, seed):
    """4 heads over tp=3 are 2+2+0; these plans give the attention of the third to a ring."""
    assert verify_program(program(name, MeshShape(cp=3, tp=3), rank=2, seed=seed)) > 50


class Repeated(nn.Module):
    """Repeats each of 4 heads, and says how many there are then, as Mamba 2 does."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (4, -1)).repeat_interleave(2, dim=2, output_size=8)
        return self.out(heads.flatten(2))


def test_a_stated_number_of_repeated_heads_is_that_of_the_rank():
    _, traced, annotator = built(lambda: Stack(Repeated))
    sharded = 0
    for seed in range(6):
        plan = random_plan(traced, annotator, setting(MeshShape(tp=2)), seed)
        choices = [block.ops.get("repeat_interleave", {}) for block in plan.blocks]
        sharded += any(choice and choice["tp"].outputs[0].dim == 2 for choice in choices)
        assert verify_program(assemble(traced, plan, 1, torch.device("cpu"))) > 10
    assert sharded


def breaks(found: Program, module: torch.fx.GraphModule) -> None:
    module.recompile()
    with pytest.raises((ProgramError, RuntimeError, ValueError)):
        verify_program(found)


def test_a_wrong_local_size_in_a_reshape():
    found = program("gpt-tiny", MeshShape(tp=4))
    module, node = first(
        found,
        lambda n: (
            n.target is torch.ops.aten.reshape.default
            and any(isinstance(s, int) and s > 1 for s in n.args[1])
        ),
    )
    sizes = list(node.args[1])
    at = max(d for d, size in enumerate(sizes) if isinstance(size, int) and size > 1)
    sizes[at] //= 2
    node.args = (node.args[0], sizes)
    breaks(found, module)


def test_a_wrong_size_in_a_collective():
    found = program("llama-tiny", seed=3)
    module, node = first(
        found, lambda n: "transition" in n.meta and isinstance(n.kwargs.get("size"), int)
    )
    node.kwargs = {**node.kwargs, "size": node.kwargs["size"] + 3}
    breaks(found, module)


def test_a_missing_gather():
    found = program("llama-tiny", seed=3)
    module, node = first(found, lambda n: getattr(n.target, "__name__", "") == "all_gather")
    node.replace_all_uses_with(node.args[0])
    module.graph.erase_node(node)
    breaks(found, module)


def test_the_message_names_node_rank_and_shapes():
    found = program("llama-tiny", MeshShape(tp=4), rank=2)
    _module, node = first(
        found,
        lambda n: (
            "whole" in n.meta
            and any(x.is_shard for x in n.meta["layouts"].values())
            and n.target is torch.ops.aten.silu.default
        ),
    )
    node.meta["layouts"] = {
        axis: type(x)(x.value.__class__("R"), x.grad.__class__("R"))
        for axis, x in node.meta["layouts"].items()
    }
    with pytest.raises(ProgramError, match=rf"rank 2: {node.name} .*local shape .*the plan says"):
        verify_program(found)
