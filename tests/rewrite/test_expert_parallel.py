"""Experts and tokens sharded over 2, 3 and 4 processes against a loop over all tokens, in fp64: results and every gradient."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from autopar_kernels.routed_experts import routed_experts
from support.effort import slow_but
from support.naive_experts import ACTIVATIONS, make, naive, value_and_gradients
from torch import Tensor

from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import shard_extent
from autopar.rewrite.collectives.axes import AxisGroup, active_axes
from autopar.rewrite.lowerings.expert_parallel import expert_parallel
from autopar.runtime.ranks.launch import WorkerPool
from autopar.runtime.ranks.process_groups import mesh_axes

EXPERT_TENSORS = ("up", "up_bias", "down", "down_bias")
TOKEN_TENSORS = ("x", "index", "weights")


@pytest.fixture(scope="session")
def pool3() -> Iterator[WorkerPool]:
    with WorkerPool(3) as pool:
        yield pool


@dataclass(frozen=True)
class Case:
    """`tokens` of each rank; `routing` is 'random', 'one' (all choices take the last expert), 'half' (the second half of the experts has
    no token) or 'none' (some choices take no expert)."""

    tokens: tuple[int, ...]
    experts: int
    choices: int = 2
    routing: str = "random"
    activation: str = "gated:silu"
    transposed: bool = False
    bias: bool = True
    capacity_factor: float = 0.0
    seed: int = 0

    def arguments(self) -> dict:
        sizes = (sum(self.tokens), min(self.choices, self.experts), self.experts, 5, 3)
        found = make(*sizes, self.activation, self.transposed, self.bias, self.seed)
        index = found["index"]
        if self.routing == "one":
            index = torch.full_like(index, self.experts - 1)
        elif self.routing == "half":
            index = index % max(self.experts // 2, 1)
        elif self.routing == "none":
            index = torch.where(index % 2 == 0, index, self.experts)
        return found | {"index": index}


def local_arguments(case: Case, rank: int) -> dict:
    """This rank's tokens and experts."""
    found = case.arguments()
    for name in TOKEN_TENSORS:
        found[name] = (
            found[name]
            .detach()
            .split(case.tokens)[rank]
            .clone()
            .requires_grad_(found[name].requires_grad)
        )
    for name in EXPERT_TENSORS:
        if found[name] is not None:
            mine = shard_extent(case.experts, len(case.tokens), rank)
            found[name] = found[name].detach().narrow(0, *mine).clone().requires_grad_()
    return found


def run_local(case: Case, arguments: dict) -> dict[str, Tensor]:
    def run(**kwargs):
        return expert_parallel(
            **kwargs, axis="tp", experts=case.experts, capacity_factor=case.capacity_factor
        )

    return value_and_gradients(run, arguments)


_axes: dict[int, dict[str, AxisGroup]] = {}


def run_cases(rank: int, cases: list[Case]) -> list[dict[str, Tensor]]:
    """In a worker: value and gradients of every case."""
    ranks = len(cases[0].tokens)
    if ranks not in _axes:
        _axes[ranks] = mesh_axes(MeshShape(tp=ranks), "cpu")[1]
    with active_axes(_axes[ranks]):
        return [run_local(case, local_arguments(case, rank)) for case in cases]


def expected(case: Case) -> list[dict[str, Tensor]]:
    """What each rank should give.  With a capacity, which every rank counts for itself, the whole is the naive runs of the ranks."""
    arguments = case.arguments()
    wanted = [name for name, v in arguments.items() if torch.is_tensor(v) and v.requires_grad]
    parts = {name: arguments[name].split(case.tokens) for name in TOKEN_TENSORS}
    outs, grads = [], []
    for rank in range(len(case.tokens)):
        mine = arguments | {name: parts[name][rank] for name in TOKEN_TENSORS}
        outs.append(naive(**mine, capacity_factor=case.capacity_factor))
        grads.append(
            torch.randn(
                outs[-1].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
            )
        )
    found = dict(zip(wanted, torch.autograd.grad(outs, [arguments[n] for n in wanted], grads, allow_unused=True, materialize_grads=True),
                     strict=True))  # fmt: skip
    ranks = []
    for rank, out in enumerate(outs):
        mine = shard_extent(case.experts, len(case.tokens), rank)
        ranks.append({"out": out.detach()} | {
            name: grad.split(case.tokens)[rank] if name in TOKEN_TENSORS else grad.narrow(0, *mine) for name, grad in found.items()
        })  # fmt: skip
    return ranks


def check(pool: WorkerPool, cases: list[Case]) -> None:
    by_rank, worst = pool.run(run_cases, cases), 0.0
    for number, case in enumerate(cases):
        for rank, whole in enumerate(expected(case)):
            found = by_rank[rank][number]
            assert found.keys() == whole.keys()
            for name, tensor in whole.items():
                assert found[name].shape == tensor.shape, f"{name} of rank {rank}: {case}"
                if tensor.numel():
                    error = (
                        (found[name] - tensor).abs().max() / tensor.abs().max().clamp(min=1.0)
                    ).item()
                    assert error <= 1e-12, f"{name} of rank {rank}: {error}: {case}"
                    worst = max(worst, error)
    print(f"{len(cases)} cases, worst error {worst:.1e}")


def cases_for(ranks: int) -> list[Case]:
    even, uneven = (4,) * ranks, tuple(range(ranks))[::-1]  # the last rank has no tokens
    alone = (6, *(0,) * (ranks - 1))
    cases = [
        Case(tokens, experts, routing=routing, seed=seed)
        for seed, tokens in enumerate((even, uneven, alone))
        for experts in (
            2 * ranks,
            2 * ranks + 1,
            ranks - 1,
            ranks + 1,
        )  # even, uneven, a rank (or more) with no experts
        for routing in ("random", "one", "half", "none")
        if experts >= 2 or routing == "one"
    ]
    cases += [
        Case(even, 5, activation=name, transposed=flip, bias=not flip)
        for name in ACTIVATIONS
        for flip in (False, True)
    ]
    capped = [(tokens, c) for tokens in (even, uneven) for c in (0.3, 1.0)]
    cases += [
        Case(tokens, 5, capacity_factor=c, routing=r)
        for tokens, c in capped
        for r in ("random", "one", "none")
    ]
    return [*cases, Case((0,) * ranks, 4), Case(even, 5, choices=5), Case(even, 1, choices=1)]


@pytest.mark.parametrize("ranks", slow_but([3], [2, 3, 4]))
def test_equals_the_whole_run(ranks, request):
    check(request.getfixturevalue(f"pool{ranks}"), cases_for(ranks))


def test_the_ranks_really_differ_from_local_experts(pool2):
    """The oracle catches a missing exchange: with each rank's tokens sent nowhere the gradients are incomplete."""
    case = Case((4, 4), 4)
    whole = expected(case)
    with active_axes({"tp": AxisGroup("tp", 2, 0, simulate=True)}):
        found = run_local(case, local_arguments(case, 0))
    assert not torch.allclose(found["out"], whole[0]["out"])


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("capacity_factor", [0.0, 0.5])
@pytest.mark.parametrize("experts", [5, 2])
def test_simulation_gives_the_shapes(device, capacity_factor, experts):
    case = Case((3, 0, 5, 1), experts, capacity_factor=capacity_factor)
    for rank in range(4):
        arguments = local_arguments(case, rank)
        moved = {
            k: v.detach().to(device).requires_grad_(v.requires_grad) if torch.is_tensor(v) else v
            for k, v in arguments.items()
        }
        with active_axes({"tp": AxisGroup("tp", 4, rank, simulate=True)}):
            out = expert_parallel(
                **moved, axis="tp", experts=experts, capacity_factor=capacity_factor
            )
            grads = torch.autograd.grad(
                out.sum(), [v for v in moved.values() if torch.is_tensor(v) and v.requires_grad]
            )
        assert out.shape == arguments["x"].shape and out.device.type == device
        assert [g.shape for g in grads] == [
            v.shape for v in arguments.values() if torch.is_tensor(v) and v.requires_grad
        ]


def test_one_rank_is_the_local_function():
    arguments = Case((6,), 4).arguments()
    with active_axes({"tp": AxisGroup("tp", 1)}):
        found = value_and_gradients(
            lambda **k: expert_parallel(**k, axis="tp", experts=4), arguments
        )
    for name, tensor in value_and_gradients(routed_experts, arguments).items():
        assert torch.equal(found[name], tensor)


def test_a_wrong_number_of_experts_is_refused():
    arguments = Case((6,), 4).arguments()
    with (
        active_axes({"tp": AxisGroup("tp", 2, 0, simulate=True)}),
        pytest.raises(ValueError, match="expects 2 of 4 experts and got 4"),
    ):
        expert_parallel(**arguments, axis="tp", experts=4)
