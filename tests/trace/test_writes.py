"""Writes into parts of tensors: each row is written on its own, so that micro-batches add up to their batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import every, examples
from torch import Tensor, nn

import autopar
from autopar.api import trace
from autopar.errors import AutoparError

ROWS, SEQ, WIDTH = 4, 6, 6
PLACES = torch.tensor([0, 3])
EVERY_OTHER = torch.tensor([True, False] * 3)
LINE = torch.linspace(0, 1, WIDTH, dtype=torch.float64)

BASES = {
    "zeros": lambda h: torch.zeros(h.shape[0], SEQ, WIDTH, dtype=h.dtype),
    "zeros like it": torch.zeros_like,
    "a number": lambda h: h.new_full((len(h), SEQ, WIDTH), 2.0),
    "a constant": lambda h: LINE.expand(len(h), SEQ, WIDTH).clone(),
    "itself": torch.clone,
    "what is computed": lambda h: 2 * h,
}
WRITES = {
    "x[:, 2]": lambda b, h, y: b[:, 2].copy_(h[:, 0]),
    "x[:, 2] = number": lambda b, h, y: b[:, 2].fill_(0.5),
    "x[:, 2] = constant": lambda b, h, y: b[:, 2].copy_(LINE),
    "x[:, 1:3]": lambda b, h, y: b[:, 1:3].copy_(h[:, :2]),
    "x[:, 1::2]": lambda b, h, y: b[:, 1::2].copy_(h[:, :3]),
    "x[..., 3]": lambda b, h, y: b[..., 3].copy_(h[..., 0]),
    "x[:]": lambda b, h, y: b[:].mul_(2).add_(h),
    "x[:batch]": lambda b, h, y: b[: b.shape[0]].copy_(h.square()),
    "x[-batch:, 1]": lambda b, h, y: b[-b.shape[0] :, 1].copy_(h[:, 0]),
    "x[:, 2:] = 0": lambda b, h, y: b[:, 2:].zero_(),
    "x[:, 2:][:, 1][..., 3:]": lambda b, h, y: b[:, 2:][:, 1][..., 3:].copy_(h[:, 0, 3:]),
    "a transposed view": lambda b, h, y: b.transpose(0, 1)[2].copy_(h[:, 1]),
    "a flat view": lambda b, h, y: b.view(-1, WIDTH)[:, 3:5].copy_(h.flatten(0, 1)[:, :2]),
    "an unflattened view": lambda b, h, y: b.unflatten(1, (2, 3))[:, 1].copy_(h[:, :3]),
    "a diagonal": lambda b, h, y: b.diagonal(0, 1, 2).copy_(h[:, :, 0]),
    "a list": lambda b, h, y: b.__setitem__((slice(None), [0, 3]), h[:, :2]),
    "places": lambda b, h, y: b.__setitem__((slice(None), PLACES), h[:, :2]),
    "places = number": lambda b, h, y: b.__setitem__((slice(None), PLACES), 0.25),
    "pairs of places": lambda b, h, y: b.__setitem__((slice(None), PLACES, PLACES), h[:, :2, 0]),
    "places apart": lambda b, h, y: b[:, None].__setitem__(
        (slice(None), [0], slice(None), [2]), h[..., 0]
    ),
    "index_fill": lambda b, h, y: b.index_fill_(1, PLACES, 0.5),
    "index_fill of a tensor": lambda b, h, y: b.index_fill_(-1, PLACES, LINE[2]),
    "index_copy": lambda b, h, y: b.index_copy_(1, PLACES, h[:, :2]),
    "some places": lambda b, h, y: b.__setitem__((slice(None), EVERY_OTHER), h[:, :3]),
    "some places = number": lambda b, h, y: b.__setitem__((slice(None), EVERY_OTHER), 0.5),
    "where labels say": lambda b, h, y: b.__setitem__(y == 3, 0.5),
    "where labels say = constant": lambda b, h, y: b.__setitem__(y > 2, LINE),
    "where it is positive": lambda b, h, y: b.__setitem__(h > 0, 0.0),
    "an entry of each row": lambda b, h, y: b.__setitem__((torch.arange(len(h)), y[:, 0]), h[:, 1]),
    "entries of each row = number": lambda b, h, y: b.__setitem__(
        (torch.arange(len(h))[:, None], y[:, :1] - SEQ), 0.5
    ),
    "added to the same entries": lambda b, h, y: b.index_put_(
        (torch.arange(len(h))[:, None], PLACES[None]), h[:, :2], accumulate=True
    ),
    "added to entries of each row": lambda b, h, y: b.index_put_(
        (torch.arange(len(h))[:, None], y[:, :3]), h[:, :3], accumulate=True
    ),
}  # fmt: skip
ACROSS = {
    "a row": lambda b, h, y: b[0].copy_(h[1]),
    "the rows before": lambda b, h, y: b[1:].copy_(h[:-1]),
    "every other row": lambda b, h, y: b[::2].copy_(h[1::2]),
    "rows that labels name": lambda b, h, y: b.__setitem__(y[:, 0] % ROWS, h),
    "in the order of places": lambda b, h, y: b.masked_scatter_(y[..., None] > 2, h),
}


class Written(nn.Module):
    """Writes what a layer computes into a base, and weighs each entry of the result."""

    def __init__(self, base, write) -> None:
        super().__init__()
        self.linear, self.base, self.write = nn.Linear(WIDTH, WIDTH), base, write

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = self.linear(x)
        target = self.base(h)
        self.write(target, h, labels)
        places = torch.arange(1.0, SEQ * WIDTH + 1, dtype=x.dtype).view(SEQ, WIDTH)
        return ((target * places).square() * (1 + h.square())).mean()


def model_of(base: str, write) -> Written:
    torch.manual_seed(0)
    return Written(BASES[base], write).double()


def batch_of(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, SEQ, WIDTH, dtype=torch.float64, generator=generator)
    return {"x": x, "labels": torch.randint(SEQ, (ROWS, SEQ), generator=generator)}


class Several(nn.Module):
    """Sums the losses of one `Written` for each write, on bases in turn, over one layer."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        bases = list(BASES)
        self.parts = [
            model_of(bases[number % len(bases)], WRITES[name]) for number, name in enumerate(names)
        ]
        self.linear = self.parts[0].linear
        for part in self.parts:
            part.linear = self.linear
        self.losses = nn.ModuleList(self.parts)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return sum((n + 1) * part(x, labels) for n, part in enumerate(self.parts))


@pytest.mark.parametrize("first", range(4))
def test_micro_batches_of_several_writes_are_exact(first):
    """Each write in one capture with every fourth of the others; `--runslow` has each by itself."""
    names = list(WRITES)[first::4]
    assert_micro_batches_are_exact(lambda: Several(names), batch_of(first), 1 + first % 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITES)
@settings(max_examples=examples(1, 12))
@given(st.sampled_from(list(BASES)), st.sampled_from([1, 2]), st.integers(0, 10**6))
def test_micro_batches_are_exact(name, base, micro_batch, seed):
    assert_micro_batches_are_exact(
        lambda: model_of(base, WRITES[name]), batch_of(seed), micro_batch
    )


def assert_micro_batches_are_exact(
    make: Callable[[], nn.Module], batch: dict[str, Tensor], micro_batch: int
) -> None:
    """A step in micro-batches has the loss and the updates of eager PyTorch on the whole batch."""
    model = make()
    sgd = lambda params: torch.optim.SGD(params, 1e-4)  # noqa: E731
    engine = autopar.parallelize(
        make(), "cpu:1", batch, sgd, pin={"micro_batch": micro_batch}, precision="fp64",
    )  # fmt: skip
    loss = model(**batch)
    assert engine.step(batch).item() == pytest.approx(loss.item(), rel=1e-11)
    loss.backward()
    state = engine.full_state_dict()
    for name, before in model.named_parameters():
        assert torch.allclose(before - state[name], 1e-4 * before.grad, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("name", every(2, ACROSS))
def test_what_is_written_from_row_to_row_is_refused(name):
    split = trace(model_of("itself", ACROSS[name]), batch_of(0)).split
    assert "combine" in split.reason and not split.joins


SHAPES = {"square": (6, 6), "wide": (6, 9), "tall": (9, 4)}


class OfWeights(nn.Module):
    """A layer that computes with a changed copy of its weights."""

    def __init__(self, shape: tuple[int, int], write) -> None:
        super().__init__()
        self.linear, self.write = nn.Linear(shape[1], shape[0]), write

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight.clone()
        self.write(weight)
        return F.linear(x[..., : weight.shape[1]], weight).square().mean()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("wrap", [False, True])
def test_diagonals_are_filled_as_in_eager_pytorch(shape, wrap):
    torch.manual_seed(0)
    model = OfWeights(SHAPES[shape], lambda weight: weight.fill_diagonal_(0.5, wrap)).double()
    batch = {"x": torch.randn(ROWS, 9, dtype=torch.float64)}
    before = {k: v.detach().clone() for k, v in model.named_parameters()}
    engine = autopar.parallelize(
        model, "cpu:1", batch, lambda params: torch.optim.SGD(params, 0.1),
        pin={"micro_batch": 2}, precision="fp64",
    )  # fmt: skip
    loss = model(**batch)
    assert engine.step(batch).item() == pytest.approx(loss.item(), rel=1e-12)
    loss.backward()
    for name, value in engine.full_state_dict().items():
        gradient = dict(model.named_parameters())[name].grad
        wanted = before[name] - 0.1 * (0 if gradient is None else gradient)
        assert torch.allclose(value, wanted, rtol=1e-12, atol=1e-13)


def test_writes_through_as_strided_are_refused_by_line():
    model = OfWeights((6, 6), lambda weight: weight.as_strided((6,), (7,)).fill_(0.5))
    batch = {"x": torch.randn(ROWS, 9)}
    with pytest.raises(AutoparError, match=r"writes through as_strided.*test_writes.py"):
        trace(model, batch)


def test_a_diagonal_that_eager_pytorch_refuses_is_refused():
    model = OfWeights((6, 6), lambda weight: weight.view(2, 3, 6).fill_diagonal_(0.5))
    with pytest.raises(AutoparError, match="equal length"):
        trace(model, {"x": torch.randn(ROWS, 9)})
