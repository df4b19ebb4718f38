"""Embedding tables with options: sparse gradients, gradients divided by counts, padding rows and rows of limited norm."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from support.captures import captured_once
from support.eager_runs import paragraph
from support.effort import every
from support.exactness import ABSOLUTE, TOLERANCE, random_plan, run_steps, setting, sgd, solved_plan
from torch import Tensor, nn

from autopar.annotate.annotator import Annotator
from autopar.api import parallelize, plan, trace
from autopar.errors import AutoparError
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.runtime.engine import Engine

VOCAB, WIDTH, ROWS, SEQ = 11, 8, 8, 5


class Classifier(nn.Module):
    """Rows of a table, through two equal layers.  `look_up` makes of ids (b, s) what the layers read, (b, WIDTH)."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.table = self.make(**options)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)

    def make(self, **options) -> nn.Module:
        return nn.Embedding(VOCAB, WIDTH, **options)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.look_up(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.cross_entropy(self.head(x), labels)

    def look_up(self, ids: Tensor) -> Tensor:
        return torch.tanh(self.table(ids)).mean(1)


class Bag(Classifier):
    def make(self, **options) -> nn.Module:
        return nn.EmbeddingBag(VOCAB, WIDTH, **options)

    def look_up(self, ids: Tensor) -> Tensor:
        return self.table(ids)


class Functional(Classifier):
    def look_up(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.table.weight, sparse=True).tanh().mean(1)


class Gathered(Classifier):
    def look_up(self, ids: Tensor) -> Tensor:
        rows = ids.flatten()[:, None].expand(-1, WIDTH)
        return (
            torch.gather(self.table.weight, 0, rows, sparse_grad=True)
            .unflatten(0, ids.shape)
            .sum(1)
        )


class Rescaled(Classifier):
    """What a refusal of `max_norm` advises."""

    def look_up(self, ids: Tensor) -> Tensor:
        rows = self.table(ids)
        return (rows / (rows.norm(2, -1, True) / 1.5).clamp(min=1)).sum(1)


SPARSE = {
    "sparse": partial(Classifier, sparse=True),
    "sparse-padding": partial(Classifier, sparse=True, padding_idx=3),
    "sparse-bag": partial(Bag, sparse=True, mode="sum"),
    "functional": Functional,
    "gathered": Gathered,
}
COUNTED = {
    "counted": partial(Classifier, scale_grad_by_freq=True),
    "counted-padding": partial(Classifier, scale_grad_by_freq=True, padding_idx=2),
    "counted-bag": partial(Bag, scale_grad_by_freq=True, mode="mean"),
}
OTHERS = {
    "padding": partial(Classifier, padding_idx=0),
    "padding-bag": partial(Bag, padding_idx=1, mode="sum"),
    "largest": partial(Bag, mode="max"),
    "rescaled": Rescaled,
}
MODELS = SPARSE | COUNTED | OTHERS
OPTIMIZERS = {
    "momentum": sgd,
    "plain": partial(torch.optim.SGD, lr=0.5),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1, lr_decay=0.1, eps=1e-3),
}


class OfUser(torch.optim.SGD):
    """An optimizer of the user's own."""


@cache
def model(name: str) -> tuple:
    state = torch.get_rng_state()
    torch.manual_seed(0)
    built = MODELS[name]().double()
    shapes = {"ids": (VOCAB, (ROWS, SEQ)), "labels": (4, (ROWS,))}
    batches = [
        {key: torch.randint(0, high, shape) for key, (high, shape) in shapes.items()}
        for _ in range(3)
    ]
    torch.set_rng_state(state)
    return built, batches, trace(built, batches[0], precision="fp64")


@cache
def reference(
    name: str, optimizer: str
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, and parameters before and after, of eager PyTorch, with the sparse gradients that the model asks for."""
    built, batches, _ = model(name)
    torch.manual_seed(0)
    eager, losses = MODELS[name]().double(), []
    eager.load_state_dict(built.state_dict())
    stepping = OPTIMIZERS[optimizer](eager.parameters())
    for batch in batches:
        stepping.zero_grad()
        loss = eager(**batch)
        loss.backward()
        assert eager.table.weight.grad.is_sparse == (name in SPARSE)
        stepping.step()
        losses.append(loss.item())
    return losses, built.state_dict(), eager.state_dict()


def steps(rank: int, name: str, optimizer: str, text: str):
    built, batches, traced = model(name)
    return run_steps(
        Engine(built, traced, Plan.from_json(text), OPTIMIZERS[optimizer], None, None, "cpu"),
        batches,
    )


def check(pool, name: str, optimizer: str, found: Plan) -> None:
    expected, before, after = reference(name, optimizer)
    for losses, state in pool.run(steps, name, optimizer, found.to_json()):
        assert losses == pytest.approx(expected, rel=1e-9)
        for key, value in after.items():
            update = (value - before[key]).norm()
            assert (state[key] - value).norm() <= max(TOLERANCE * update, ABSOLUTE), key


@pytest.mark.parametrize(
    ("name", "dp", "tp", "number"),
    [
        pytest.param(name, *layout, marks=pytest.mark.slow if (place + turn) % 6 else ())
        for place, name in enumerate(OTHERS | SPARSE | COUNTED)
        for turn, layout in enumerate([(2, 1, 1), (1, 2, 1), (2, 1, 2)])
    ],
)
def test_training_is_exact(pool2, name, dp, tp, number):
    if number > 1 and name in (*COUNTED, "largest"):
        assert model(name)[2].split.joins == ""
        return
    traced = model(name)[2]
    check(
        pool2,
        name,
        "momentum",
        solved_plan(traced, Annotator(traced), setting(MeshShape(dp=dp, tp=tp), number)),
    )


@pytest.mark.parametrize("optimizer", ["plain", "adagrad"])
@pytest.mark.parametrize("name", ["sparse", "sparse-bag", "gathered"])
def test_optimizers_update_alike_by_sparse_and_by_dense_gradients(pool2, name, optimizer):
    traced = model(name)[2]
    check(pool2, name, optimizer, solved_plan(traced, Annotator(traced), setting(MeshShape(dp=2))))


@pytest.mark.parametrize("seed", every(3, range(3)))
@pytest.mark.parametrize("name", ["sparse", "sparse-padding", "counted"])
def test_any_placement_is_exact(pool2, name, seed):
    traced = model(name)[2]
    check(
        pool2,
        name,
        "momentum",
        random_plan(traced, Annotator(traced), setting(MeshShape(tp=2)), seed),
    )


@pytest.mark.parametrize("name", ["sparse-padding", "functional", "rescaled"])
def test_pipelines_are_exact(pool2, name):
    built, batches, traced = model(name)
    pin = {"pp": 2, "micro_batch": ROWS // 2}
    check(
        pool2,
        name,
        "momentum",
        plan(built, "cpu:2", batches[0], ROWS, pin, traced=traced, precision="fp64"),
    )


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("optimizer", [torch.optim.SparseAdam, OfUser])
def test_optimizers_that_may_tell_sparse_gradients_from_dense_ones_are_refused(name, optimizer):
    built, batches, _ = model(name)

    def make(parameters):
        return optimizer(list(parameters), lr=0.1)

    with pytest.raises(
        AutoparError, match=r"'table.weight'.*sparse=True.*(Adam|sparse=False)"
    ) as error:
        parallelize(built, "cpu:1", batches[0], make, precision="fp64")
    paragraph(error.value)


def test_the_advice_for_an_optimizer_of_the_user_works():
    built, batches, _ = model("padding")
    engine = parallelize(
        built,
        "cpu:1",
        batches[0],
        lambda parameters: OfUser(parameters, lr=0.5, momentum=0.9),
        precision="fp64",
    )
    losses, state = run_steps(engine, batches)
    expected, _, after = reference("padding", "momentum")
    assert losses == pytest.approx(expected, rel=1e-12)
    assert all(
        torch.allclose(state[key], value, rtol=0, atol=1e-12) for key, value in after.items()
    )


def test_the_advice_for_sparse_adam_works():
    """Adam, as on a table with dense gradients: it also moves the rows that no batch reads."""
    built, batches, _ = model("sparse")
    dense = Classifier().double()
    dense.load_state_dict(built.state_dict())
    make = partial(torch.optim.Adam, lr=0.1)
    losses, state = run_steps(
        parallelize(built, "cpu:1", batches[0], make, precision="fp64"), batches
    )
    stepping, expected = make(dense.parameters()), []
    for batch in batches:
        stepping.zero_grad()
        expected.append(dense(**batch))
        expected[-1].backward()
        stepping.step()
    assert losses == pytest.approx([loss.item() for loss in expected], rel=1e-12)
    for key, value in dense.state_dict().items():
        assert torch.allclose(state[key], value, rtol=0, atol=1e-11), key


LIMITED = {
    "limited": partial(Classifier, max_norm=1.5),
    "limited sums": partial(Classifier, max_norm=3.0, norm_type=1.0, padding_idx=3),
    "limited largest": partial(Classifier, max_norm=0.5, norm_type=float("inf")),
    "limited bag": partial(Bag, max_norm=1.5, mode="sum"),
    "limited and tied": lambda: Tied(max_norm=1.5),
}
MODELS |= LIMITED


class Tied(Classifier):
    """Reads the whole table after it looked rows up twice."""

    def look_up(self, ids: Tensor) -> Tensor:
        x = (self.table(ids) + self.table(ids.flip(1))).mean(1)
        return x + (x @ self.table.weight.T).tanh() @ self.table.weight


@captured_once()
def trained_with(rank: int, name: str, pins: list[dict]) -> list[float]:
    """On one rank: for each pin, the largest error over what is allowed."""
    built, batches, _ = model(name)
    expected, before, after = reference(name, "momentum")
    found = []
    for pin in pins:
        engine = parallelize(built, "cpu:2", batches[0], sgd, pin=pin, precision="fp64")
        losses, state = run_steps(engine, batches)
        assert losses == pytest.approx(expected, rel=1e-9)
        errors = [
            float((state[key] - value).norm())
            / max(TOLERANCE * float((value - before[key]).norm()), ABSOLUTE)
            for key, value in after.items()
        ]
        found.append(max(errors))
    return found


LIMITED_PINS = [
    {"dp": 2, "micro_batch": 2},
    {"dp": 2, "zero": 1},
    {"dp": 2, "zero": 3},
    {"tp": 2},
    {"pp": 2, "micro_batch": 4},
]


@pytest.mark.parametrize("name", every(3, LIMITED))
def test_rows_of_limited_norm_are_exact(pool2, name):
    pins = LIMITED_PINS if name == "limited" else LIMITED_PINS[:1]
    for found in pool2.run(trained_with, name, pins):
        assert max(found) <= 1, found


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ["limited sums", "limited largest"])
def test_rows_of_limited_norm_are_exact_under_any_placement(pool2, name, seed):
    traced = model(name)[2]
    plan = random_plan(traced, Annotator(traced), setting(MeshShape(tp=2)), seed)
    check(pool2, name, "momentum", plan)


def test_evaluation_rescales_rows_too():
    built, batches, _ = model("limited")
    torch.manual_seed(0)
    eager = MODELS["limited"]().double()
    eager.load_state_dict(built.state_dict())
    engine = parallelize(built, "cpu:1", batches[0], sgd, precision="fp64")
    with torch.no_grad():
        assert float(engine.eval_step(batches[0])) == pytest.approx(float(eager(**batches[0])))
    rows = engine.full_state_dict()["table.weight"]
    assert torch.allclose(rows, eager.table.weight, rtol=0, atol=1e-12)
    assert not torch.allclose(rows, built.table.weight)


class ReadBefore(Classifier):
    def look_up(self, ids: Tensor) -> Tensor:
        return self.table.weight.mean(0) + self.table(ids).mean(1)


class Computed(Classifier):
    def look_up(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.table.weight * 2, max_norm=1.0).mean(1)


class OfActivations(Classifier):
    def look_up(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.table.weight).mean(1)
        return x + self.table(x.argmax(-1))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (ReadBefore, "after reading other rows of the table"),
        (Computed, "in a table that it computes"),
        (OfActivations, "at ids that do not follow from inputs alone"),
    ],
)
def test_limits_that_would_be_others_before_forward_are_refused(kind, text):
    batch = {
        "ids": torch.zeros(ROWS, SEQ, dtype=torch.int64),
        "labels": torch.zeros(ROWS, dtype=torch.int64),
    }
    with pytest.raises(AutoparError, match=text) as error:
        trace(kind(max_norm=1.5), batch)
    paragraph(error.value)
