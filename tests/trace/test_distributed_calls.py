"""What forward asks of torch.distributed: it computes as one process with the whole batch, or is refused by line."""

from __future__ import annotations

import os
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as with_gradients
import torch.nn.functional as F
from support.captures import captured_once
from support.eager_runs import paragraph
from support.effort import every
from support.exactness import Reference
from support.state_runs import PINS, WIDTH, Stateful, batches, eager, error, made, micro_batches
from torch import Tensor, nn
from torch.distributed import all_reduce, get_world_size

from autopar.api import trace
from autopar.errors import AutoparError
from autopar.planning.notes import notes


def initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def world_size() -> int:
    return dist.get_world_size() if initialized() else 1


def contrast(a: Tensor, b: Tensor) -> Tensor:
    scores = F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T
    return F.cross_entropy(scores, torch.arange(a.shape[0], device=a.device))


# ------------------------------------------------------------------------------------------------------------------ exact


def scaled(m, x, y):
    return y * dist.get_world_size() * (1 + dist.get_rank())


def scaled_if_initialized(m, x, y):
    return y * world_size()


def imported_names(m, x, y):
    number = (x > 0).sum().double().reshape(1)
    all_reduce(number, op=dist.ReduceOp.SUM)
    return y * number / get_world_size()


def number_of_boxes(m, x, y):
    number = (x > 0).sum().double().reshape(1)
    if initialized():
        dist.all_reduce(number)
    return y * torch.clamp(number / world_size(), min=1)


def mean_over_ranks(m, x, y):
    mean = y.detach().square().mean()
    handle = dist.all_reduce(mean, op=dist.ReduceOp.AVG, async_op=True)
    handle.wait()
    return y / (1 + mean)


@torch.no_grad()
def concat_all_gather(tensor: Tensor) -> Tensor:
    gathered = [torch.ones_like(tensor) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(gathered, tensor, async_op=False)
    return torch.cat(gathered, dim=0)


def gathered_keys(m, x, y):
    return y * (1 + contrast(y, concat_all_gather(y)))


class GatherLayer(torch.autograd.Function):
    """Gathers rows; each rank keeps the gradient of its own."""

    @staticmethod
    def forward(ctx, x: Tensor) -> tuple:
        gathered = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, x)
        return tuple(gathered)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> Tensor:
        return grads[dist.get_rank()].clone()


class SummingGather(GatherLayer):
    """Gathers rows, and sums their gradients over ranks."""

    @staticmethod
    def backward(ctx, *grads: Tensor) -> Tensor:
        all_grads = torch.stack(grads)
        dist.all_reduce(all_grads)
        return all_grads[dist.get_rank()]


class Mean(torch.autograd.Function):
    """The mean over ranks, whose gradient is each rank's."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        if initialized() and dist.get_world_size() > 1:
            x = x.contiguous() / dist.get_world_size()
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


def gather_layer(m, x, y):
    return y * (1 + contrast(y, torch.cat(GatherLayer.apply(y), dim=0)))


def summing_gather(m, x, y):
    return y * (1 + contrast(y, torch.cat(SummingGather.apply(y), dim=0)))


def mean_layer(m, x, y):
    return y * Mean.apply(y.square().mean())


def gathered_with_gradients(m, x, y):
    gathered = torch.cat(with_gradients.all_gather(y), dim=0)
    return y * (1 + contrast(y, gathered)) / with_gradients.all_reduce(1 + y.square().sum())


def own_rows_put_back(m, x, y):
    gathered = [torch.zeros_like(y) for _ in range(world_size())]
    dist.all_gather(gathered, y)
    gathered[dist.get_rank()] = y
    return y * (1 + contrast(y, torch.cat(gathered)))


def into_one_tensor(m, x, y):
    rows = torch.empty(y.shape[0] * dist.get_world_size(), WIDTH, dtype=y.dtype)
    dist.all_gather_into_tensor(rows, y.detach())
    return y * (1 + contrast(y, rows))


def functional_collectives(m, x, y):
    rows = functional.all_gather_single(y, 0, dist.group.WORLD)
    return y * (1 + contrast(y, rows)) + functional.all_reduce(y.sum(), "sum", dist.group.WORLD)


def broadcast(m, x, y):
    scale = torch.full((1,), 2.0, dtype=y.dtype)
    dist.broadcast(scale, src=0)
    dist.barrier()
    return y * scale


def from_the_environment(m, x, y):
    return y * int(os.environ.get("WORLD_SIZE", 1)) * (1 + int(os.getenv("RANK", "0")))


def where_it_must_be_initialized(m, x, y):
    if not dist.is_initialized():
        raise RuntimeError("call init_process_group first")
    return y * dist.get_world_size()


def objects(m, x, y):
    found = [None] * world_size()
    dist.all_gather_object(found, 3)
    return y * found[0]


def center_of_all_ranks(m, x, y):
    center = y.detach().sum(0, keepdim=True)
    if initialized():
        dist.all_reduce(center)
    m.center = m.center * 0.9 + 0.1 * center[0] / (y.shape[0] * world_size())
    return y - m.center


def size_of_the_group(m, x, y):
    return y * dist.group.WORLD.size() * (1 + dist.group.WORLD.rank())


def keeps_functions(m: nn.Module) -> None:
    m.reduce, m.calls = dist.all_reduce, {"size": dist.get_world_size}


def functions_that_are_kept(m, x, y, rank=dist.get_rank):
    total = y.detach().sum(0)
    m.reduce(total)
    return y - total / (y.shape[0] * m.calls["size"]()) * (1 + rank())


SETUPS = {functions_that_are_kept: keeps_functions}


def build(change) -> nn.Module:
    return made(lambda: Stateful(change, SETUPS.get(change)))


EXACT = (
    scaled, gather_layer, center_of_all_ranks, functions_that_are_kept, scaled_if_initialized, imported_names, number_of_boxes,
    mean_over_ranks, gathered_keys,
    summing_gather, mean_layer, gathered_with_gradients, own_rows_put_back, into_one_tensor, functional_collectives, broadcast,
    from_the_environment, where_it_must_be_initialized, objects, size_of_the_group,
)  # fmt: skip
SILENT = (scaled_if_initialized, number_of_boxes, center_of_all_ranks, from_the_environment)
"""Those that call nothing without a process group and without a launcher's variables."""
OF_THE_WHOLE_BATCH = (imported_names, number_of_boxes)
"""Those that sum inputs, which autopar does over the whole batch, not in each micro-batch."""


@pytest.fixture(scope="module")
def one_process():
    """A process group of this process alone, in which eager PyTorch runs."""
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        yield
        dist.destroy_process_group()


@captured_once()
def errors(rank: int, change, pins: list[str], results: dict[str, Reference]) -> list[float]:
    return [error(build(change), PINS[pin], 2, results[pin]) for pin in pins]


@pytest.mark.parametrize("change", every(len(EXACT), EXACT), ids=lambda change: change.__name__)
def test_ranks_train_as_one_process(pool2, one_process, change):
    pins = [pin for pin in PINS if "dp" in PINS[pin]]
    if change in OF_THE_WHOLE_BATCH:
        pins = [pin for pin in pins if micro_batches(PINS[pin])[1] == 1]
    results = {pin: eager(build(change), *micro_batches(PINS[pin])) for pin in pins}
    for found in pool2.run(errors, change, pins, results):
        assert max(found) <= 1, dict(zip(pins, found, strict=True))


@pytest.mark.parametrize("change", every(7, EXACT), ids=lambda change: change.__name__)
def test_one_process_trains_as_in_eager_pytorch(one_process, change):
    assert error(build(change), PINS["one device"], 1) <= 1


ALONE = [change for change in EXACT if change is not size_of_the_group]


@pytest.mark.parametrize("change", every(8, ALONE), ids=lambda change: change.__name__)
def test_a_plan_needs_no_process_group(change):
    traced = trace(build(change), batches()[0])
    found = [note for note in notes(traced) if "it sees one process" in note]
    assert len(found) == (change not in SILENT)


# ---------------------------------------------------------------------------------------------------------------- refused


def sends(m, x, y):
    dist.send(y, 1)
    return y


def from_another_rank(m, x, y):
    dist.broadcast(y, src=1)
    return y


def too_many(m, x, y):
    gathered = [torch.zeros_like(y) for _ in range(4)]
    dist.all_gather(gathered, y)
    return torch.cat(gathered)[: y.shape[0]]


def too_long(m, x, y):
    rows = torch.empty(4 * y.shape[0], WIDTH, dtype=y.dtype)
    dist.all_gather_into_tensor(rows, y)
    return rows[: y.shape[0]] + y


class Centred(torch.autograd.Function):
    """Subtracts a sum over ranks, which is no identity."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        total = x.sum(0, keepdim=True)
        dist.all_reduce(total)
        return x - total

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


def no_identity(m, x, y):
    return Centred.apply(y)


class Doubled(GatherLayer):
    """Gathers rows, with another gradient than theirs."""

    @staticmethod
    def backward(ctx, *grads: Tensor) -> Tensor:
        return 2 * grads[dist.get_rank()]


def other_gradient(m, x, y):
    return torch.cat(Doubled.apply(y))


def low_level(m, x, y):
    return torch.ops._c10d_functional.all_reduce(y, "sum", "0")


REFUSED = {
    sends: r"torch.distributed.send \(test_dist", from_another_rank: r"broadcast from or to rank 1 \(test_dist",
    too_many: r"all_gather with 4 tensors \(test_dist", too_long: r"shape \(batch, 6\) into one of \(batch, 6\) \(test_dist",
    no_identity: r"Centred \(test_dist.*not the identity", other_gradient: r"Doubled \(test_dist.*not the identity",
    low_level: r"_c10d_functional.all_reduce",
}  # fmt: skip


@pytest.mark.parametrize("change", every(3, REFUSED), ids=lambda change: change.__name__)
def test_other_calls_are_refused_by_line(change):
    with pytest.raises(AutoparError, match=REFUSED[change]) as refused:
        trace(made(lambda: Stateful(change)), batches()[0])
    paragraph(refused.value)


def keeps_size(m: nn.Module) -> None:
    m.world_size = dist.get_world_size()


def keeps_rank(m: nn.Module) -> None:
    m.rank = dist.get_rank()


def by_size(m, x, y):
    return y * m.world_size


def by_rank(m, x, y):
    return y * (1 + m.rank)


def refusals(rank: int) -> list[str]:
    found = []
    for change, setup in ((by_size, keeps_size), (by_rank, keeps_rank)):
        try:
            error(made(lambda c=change, s=setup: Stateful(c, s)), PINS["dp=2"], 2)
        except AutoparError as mistake:
            found.append(str(mistake))
    return found


def test_sizes_and_ranks_that_the_model_keeps_are_refused(pool2):
    for size, rank in pool2.run(refusals):
        assert "forward reads 'world_size' (test_distributed_calls.py:" in size
        assert "rank 1 has another model than rank 0: it computes something else" in rank


def test_torch_distributed_is_as_before():
    before = {k: v for k, v in vars(dist).items() if not k.startswith("__")}
    kept = vars(dist.ProcessGroup)["size"], type(os.environ).__getitem__, globals()["all_reduce"]
    for change in (imported_names, sends):
        try:
            trace(made(lambda c=change: Stateful(c)), batches()[0])
        except AutoparError:
            assert change is sends
    assert all(vars(dist)[k] is v for k, v in before.items())
    after = vars(dist.ProcessGroup)["size"], type(os.environ).__getitem__, globals()["all_reduce"]
    assert kept == after
