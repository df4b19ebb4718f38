"""Batch norm in training, and other buffers that forward changes: parameters and buffers as on one device with the same micro-batches."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from support.effort import tried
from support.exactness import (
    ABSOLUTE,
    TOLERANCE,
    Reference,
    random_plan,
    run_steps,
    setting,
    sgd,
    solved_plan,
    update_error,
)
from support.meshes import DP2, DP2TP2, DP4, ONE, TP2
from torch import Tensor, nn

from autopar.annotate.annotator import Annotator
from autopar.api import trace
from autopar.errors import AutoparError
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.planning.notes import notes
from autopar.runtime.engine import Engine

ROWS = 8


class Mlp(nn.Module):
    """Two equal blocks with BatchNorm1d, one norm on (b, c, length) that averages over all batches, and buffers of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 12)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Tanh()) for _ in range(2)
        )
        self.sequence, self.plain = (
            nn.BatchNorm1d(3, momentum=None, affine=False),
            nn.BatchNorm1d(12, track_running_stats=False),
        )
        self.outer = nn.Linear(12, 4)
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("largest", torch.tensor(0.0))
        self.register_buffer("calls", torch.tensor(0), persistent=False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.inner(x)
        for layer in self.layers:
            x = layer(x)
        x = self.outer(self.plain(self.sequence(x.unflatten(1, (3, 4))).flatten(1)))
        if self.training:
            with torch.no_grad():
                self.average.mul_(0.5).add_(x.mean(0) * 0.5)
                self.largest.copy_(torch.maximum(self.largest, x.abs().max()))
                self.calls += 1
        return F.mse_loss(x + self.average, target)


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(6, 4, 3)
        self.norm0, self.norm1 = nn.BatchNorm2d(2), nn.BatchNorm2d(6)
        self.norm2, self.norm3 = nn.BatchNorm2d(4, eps=1e-3), nn.BatchNorm3d(2)
        self.norm4 = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.first(self.norm0(x))))
        x = torch.relu(self.norm2(self.second(x)))
        x = self.norm3(x.unflatten(1, (2, 2))).flatten(1, 2)
        return F.mse_loss(self.head(self.norm4(x).square().mean((2, 3))), target)


class Mixed(nn.Module):
    """Batch norm and dropout together: functionalization rewrites dropout, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(5, 12), nn.BatchNorm1d(12), nn.Linear(12, 4)
        self.drop, self.channels = nn.Dropout(0.3), nn.Dropout2d(0.3)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = (
            self.channels(self.drop(self.norm(self.inner(x).transpose(1, 2)).unflatten(2, (2, 3))))
            .flatten(2)
            .transpose(1, 2)
        )
        q = x.view(x.shape[0], 6, 3, 4).transpose(1, 2)
        x = x + F.scaled_dot_product_attention(q, q, q, dropout_p=0.2).transpose(1, 2).flatten(2)
        return F.mse_loss(self.outer(x).mean(1), target)


MODELS = {"mlp": (Mlp, (6,)), "conv": (Convolutional, (2, 6, 5)), "mixed": (Mixed, (6, 5))}
EAGER = ("mlp", "conv")


@cache
def model(name: str) -> tuple[nn.Module, object, Annotator]:
    state = torch.get_rng_state()
    torch.manual_seed(0)
    built = MODELS[name][0]().double()
    torch.set_rng_state(state)
    for parameter in built.parameters():
        if parameter.dim() == 1:
            with torch.no_grad():
                parameter += 0.1 * torch.sin(torch.arange(parameter.numel()).double())
    traced = trace(built, batches(name)[0])
    return built, traced, Annotator(traced)


@cache
def batches(name: str) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(3):
        x = torch.randn(ROWS, *MODELS[name][1], generator=generator).double() * 2 + 1
        x = x * torch.arange(1, ROWS + 1).view(-1, *[1] * (x.dim() - 1))
        made.append({"x": x, "target": torch.randn(ROWS, 4, generator=generator).double()})
    return made


@cache
def reference(name: str, dp: int, number: int) -> tuple[list[float], Reference, dict[str, Tensor]]:
    """Eager PyTorch on one device: micro-batch m is the union of the ranks' m-th micro-batches.  Also the losses in evaluation after."""
    built = copy.deepcopy(model(name)[0])
    before = all_tensors(built)
    optimizer, losses = sgd(built.parameters()), []
    rows = torch.arange(ROWS).view(dp, number, -1).transpose(0, 1).flatten(1)
    for batch in batches(name):
        optimizer.zero_grad()
        total = 0.0
        for chosen in rows:
            loss = built(**{k: v[chosen] for k, v in batch.items()}) / number
            loss.backward()
            total += float(loss)
        optimizer.step()
        losses.append(total)
    after = all_tensors(built)
    with torch.no_grad():
        built.eval()
        evaluated = [
            sum(float(built(**{k: v[r] for k, v in batch.items()})) for r in rows) / number
            for batch in batches(name)
        ]
    return losses + evaluated, Reference(losses, before, after), after


def all_tensors(built: nn.Module) -> dict[str, Tensor]:
    return {k: v.detach().clone() for k, v in (*built.named_parameters(), *built.named_buffers())}


def engine(name: str, plan: Plan) -> Engine:
    """Micro-batches of a loss that reads a buffer which forward changes are for the user to allow."""
    return Engine(
        model(name)[0],
        model(name)[1],
        replace(plan, micro_batch_mean=name == "mlp"),
        sgd,
        None,
        None,
        "cpu",
    )


def solved(name: str, mesh: MeshShape, number: int = 1, recompute: str = "none") -> Plan:
    return solved_plan(model(name)[1], model(name)[2], setting(mesh, number, recompute, ROWS))


def train(rank: int, name: str, plans: list[str]) -> list[tuple[list[float], dict[str, Tensor]]]:
    found = []
    for text in plans:
        made = engine(name, Plan.from_json(text))
        made._state_names |= set(made.parameters.holding.specs)  # non-persistent buffers too
        losses, state = run_steps(made, batches(name))
        evaluated = [float(made.eval_step(made.local_batch(batch))) for batch in batches(name)]
        again = made.full_state_dict()
        assert all(torch.equal(again[k], v) for k, v in state.items()), (
            "evaluation changed a buffer"
        )
        found.append((losses + evaluated, state))
    return found


def check(name: str, plan: Plan, losses: list[float], state: dict[str, Tensor]) -> None:
    expected, result, after = reference(name, plan.mesh.dp, plan.num_microbatches)
    assert losses == pytest.approx(expected, rel=1e-9), plan.mesh
    assert set(state) == set(after)
    assert update_error(result, state) <= 1.0, plan.mesh
    for key, value in after.items():
        if not value.is_floating_point():
            assert torch.equal(state[key], value), key
        elif "running" in key or key in ("average", "largest"):
            update = (value - result.before[key]).norm()
            assert (state[key] - value).norm() <= max(ABSOLUTE, TOLERANCE * update), key


def test_one_device():
    for name in EAGER:
        plans = [
            *tried((), (solved(name, ONE), solved(name, ONE, 2))),
            solved(name, ONE, 4, "full"),
        ]
        for plan, found in zip(
            plans, train(0, name, [plan.to_json() for plan in plans]), strict=True
        ):
            check(name, plan, *found)


def test_a_batch_is_not_split_where_the_loss_reads_a_buffer_that_forward_changes():
    with pytest.raises(
        AutoparError, match=r"add \(test_batch_norm.py:\d+: return F.mse_loss.*combines rows"
    ):
        Engine(*model("mlp")[:2], solved("mlp", ONE, 2), sgd, None, None, "cpu").step(
            batches("mlp")[0]
        )
    assert model("conv")[1].split.by_convention == ("batch statistics",)


def choices_of(plan: Plan, start: str, axis: str) -> set[str]:
    return {
        str(c[axis].outputs[0])
        for block in plan.blocks
        for name, c in block.ops.items()
        if name.startswith(start) and axis in c
    }


@pytest.mark.parametrize("name", [pytest.param("mlp", marks=pytest.mark.slow), "conv"])
def test_two_devices(pool2, name):
    plans = [
        solved(name, DP2),
        *tried((), (solved(name, DP2, 2, "full"), solved(name, TP2))),
        solved(name, TP2, 2, "full"),
    ]
    plans += [
        random_plan(model(name)[1], model(name)[2], setting(TP2, 2, rows=ROWS), seed)
        for seed in range(tried(1, 3))
    ]
    assert "P" in choices_of(plans[0], "sum", "dp"), "statistics are partial sums"
    for results in pool2.run(train, name, [plan.to_json() for plan in plans]):
        for plan, found in zip(plans, results, strict=True):
            check(name, plan, *found)


@pytest.mark.parametrize("name", ["mlp", pytest.param("conv", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_four_devices(pool4, name):
    plans = [solved(name, DP4), solved(name, DP4, 2), solved(name, DP2TP2, 2)]
    plans += [
        random_plan(model(name)[1], model(name)[2], setting(DP2TP2, 2, rows=ROWS), seed)
        for seed in range(3)
    ]
    for results in pool4.run(train, name, [plan.to_json() for plan in plans]):
        for plan, found in zip(plans, results, strict=True):
            check(name, plan, *found)


@pytest.mark.slow
def test_with_dropout(pool2):
    """Against the engine on one device, which draws the same masks."""
    ops = {
        str(n.target)
        for block in model("mixed")[1].classes
        for n in block.graph.nodes
        if n.op == "call_function"
    }
    assert "aten.dropout.default" in ops and not {
        o for o in ops if "native" in o or "bernoulli" in o
    }, ops
    losses, state = run_steps(engine("mixed", solved("mixed", ONE)), batches("mixed"))
    result = Reference(losses, all_tensors(model("mixed")[0]), state)
    plans = [solved("mixed", DP2), solved("mixed", TP2, 1, "full")]
    plans += [
        random_plan(model("mixed")[1], model("mixed")[2], setting(TP2, 1, rows=ROWS), seed)
        for seed in range(3)
    ]
    for results in pool2.run(train, "mixed", [plan.to_json() for plan in plans]):
        for plan, (found, after) in zip(plans, results, strict=True):
            assert found[:3] == pytest.approx(losses, rel=1e-9), plan.mesh
            assert update_error(result, {k: after[k] for k in state}) <= 1.0


def test_a_model_in_eval_mode_is_traced_with_running_statistics():
    built = copy.deepcopy(model("conv")[0]).eval()
    made = Engine(
        built, trace(built, batches("conv")[0]), solved_eval(built), sgd, None, None, "cpu"
    )
    before = {k: v for k, v in made.full_state_dict().items() if "running" in k}
    with torch.no_grad():
        expected = float(built(**batches("conv")[0]))
    assert float(made.step(batches("conv")[0])) == pytest.approx(expected, rel=1e-12)
    assert all(torch.equal(made.full_state_dict()[k], v) for k, v in before.items())


def solved_eval(built: nn.Module) -> Plan:
    traced = trace(built, batches("conv")[0])
    return solved_plan(traced, Annotator(traced), setting(ONE, 1, "none", ROWS))


def test_the_notes_say_what_a_micro_batch_means():
    assert any(
        "running statistics) x5" in note and "micro-batch" in note
        for note in notes(model("conv")[1])
    )
    assert any("average, largest, calls" in note for note in notes(model("mlp")[1]))
    assert not any(
        "without a rule" in note and "batch_norm" in note for note in notes(model("mlp")[1])
    )


class Scaled(nn.Module):
    """Changes a parameter in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5)
        return (x * self.weight).sum()


def test_a_parameter_changed_in_place_is_refused():
    with pytest.raises(AutoparError, match=r"in place|capture"):
        trace(Scaled(), {"x": torch.ones(4, 3)})
