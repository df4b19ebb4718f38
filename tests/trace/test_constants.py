"""Tensors of the model that forward or the loss read past the modules' attributes: torch.export takes them for constants."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.api import trace
from autopar.errors import AutoparError
from autopar.ir.traced import TracedModel


class Model(nn.Module):
    """Reads `self.read()` beside its own linear layer; `keep` makes what it keeps outside of its registers."""

    def __init__(self, keep) -> None:
        super().__init__()
        self.own, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("scale", torch.ones(4))
        self.read = keep(self)

    def forward(self, x: Tensor) -> Tensor:
        read = self.read
        for _ in range(3):
            read = (
                read()
                if callable(read)
                else next(iter(read.values()))
                if isinstance(read, dict)
                else read
            )
            read = read[0] if isinstance(read, (list, tuple)) else read
        return (self.own(x) @ read).square().sum()


def closure(tensor):
    return lambda: tensor


def reads(traced: TracedModel) -> set[str]:
    return {name for segment in traced.segments for name in segment.parameters}


KEPT = {
    "list": (lambda m: [m.own.weight], "own.weight"),
    "tuple in a dict": (lambda m: {"a": (m.own.weight,)}, "own.weight"),
    "frozen, in a closure": (lambda m: closure(m.frozen.weight), "frozen.weight"),
    "buffer": (lambda m: [m.scale], "scale"),
    "buffer in a closure": (lambda m: closure(m.scale), "scale"),
}


@pytest.mark.parametrize(
    ("name", "device"),
    [(name, "cpu") for name in KEPT] + [(name, "meta") for name in KEPT if "closure" not in name],
)
def test_they_are_known_for_what_they_are(name, device):
    keep, expected = KEPT[name]
    with torch.device(device):
        traced = trace(Model(keep), {"x": torch.ones(3, 4)})
    assert not traced.constants and reads(traced) == {"own.weight", "own.bias", expected}
    slots = [slot for block in traced.classes for slot in block.slots]
    assert len(slots) == len(reads(traced)), "one slot for each"


def test_a_closure_over_a_meta_model_is_refused():
    with torch.device("meta"), pytest.raises(AutoparError):
        trace(Model(lambda m: closure(m.own.weight)), {"x": torch.ones(3, 4)})


@pytest.mark.parametrize(
    "keep",
    [
        lambda m: [m.own.weight.data[:, :2]], lambda m: [m.own.weight.detach().t()], lambda m: closure(m.own.weight.detach()[1:3].T),
        lambda m: closure(m.own.weight), lambda m: closure(m.own.weight.detach()), lambda m: [m.own.weight.data],
    ],
    ids=["slice in a list", "transposed", "slice in a closure", "closure", "detached in a closure", "detached in a list"],
)  # fmt: skip
def test_parts_of_parameters_are_refused(keep):
    with pytest.raises(AutoparError, match=r"parameter 'own.weight' past the module's attributes"):
        trace(Model(keep), {"x": torch.ones(3, 4)})


def test_a_parameter_in_another_dtype_is_refused():
    with pytest.raises(AutoparError):
        trace(Model(lambda m: closure(m.own.weight)), {"x": torch.ones(3, 4)}, precision="bf16")


def test_views_of_what_does_not_train_are_constants():
    traced = trace(Model(lambda m: [m.frozen.weight.detach().t()]), {"x": torch.ones(3, 4)})
    assert len(traced.constants) == 1
    flat = torch.ones(32)

    def keep(model):
        model.own.weight = nn.Parameter(flat[:16].view(4, 4))
        return closure(flat[16:].view(4, 4))

    assert len(trace(Model(keep), {"x": torch.ones(3, 4)}).constants) == 1, (
        "beside a parameter, in one storage"
    )


def test_sparse_tensors_are_no_hindrance():
    model = Model(lambda m: [torch.ones(4, 4)])
    model.adjacent = torch.eye(4).to_sparse()
    model.register_buffer("graph", torch.eye(4).to_sparse())
    assert trace(model, {"x": torch.ones(3, 4)}).constants


def test_constants_stay_constants():
    traced = trace(Model(lambda m: [torch.full((4, 4), 2.0)]), {"x": torch.ones(3, 4)})
    assert [float(tensor[0, 0]) for tensor in traced.constants.values()] == [2.0]


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x)


def test_a_loss_that_reads_parameters_of_the_model_is_exact():
    model, batch = (
        Plain().double(),
        {"x": torch.randn(4, 4).double(), "y": torch.ones(4, 4).double()},
    )
    plain, before = copy.deepcopy(model), copy.deepcopy(model.state_dict())

    def sgd(parameters):
        return torch.optim.SGD(parameters, 0.1, momentum=0.9)

    engine = autopar.parallelize(
        model, "cpu:1", batch, sgd, pin={"micro_batch": 2}, global_batch=4,
        loss_fn=lambda out, y: (out - y).square().mean() + model.own.weight.sum(),
    )  # fmt: skip
    stepping = sgd(plain.parameters())
    for _ in range(3):
        engine.step(batch)
        stepping.zero_grad()
        loss = (plain(batch["x"]) - batch["y"]).square().mean() + plain.own.weight.sum()
        loss.backward()
        stepping.step()
    state = engine.full_state_dict()
    for name, value in plain.state_dict().items():
        assert (state[name] - value).norm() <= 1e-9 * (value - before[name]).norm(), name


def test_a_loss_with_tensors_of_its_own_is_refused():
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, out: Tensor, y: Tensor) -> Tensor:
            return self.scale * (out - y).square().mean()

    with pytest.raises(AutoparError, match="make it a part of the model"):
        trace(Plain(), {"x": torch.ones(3, 4), "y": torch.ones(3, 4)}, Loss())


class Registering(nn.Module):
    """Keeps a table in a buffer that its first forward registers, and notes its last shape."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(4, 4)
        self.register_buffer("table", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.last = x.dim()
        return (self.own(x) * self.table).square().sum()


def test_a_table_that_forward_registers_beside_unread_state_is_captured():
    model = Registering()
    traced = trace(model, {"x": torch.randn(2, 4)})
    assert model.table is None and "last" not in vars(model)
    assert set(traced.parameters) == {"own.weight", "own.bias"}
