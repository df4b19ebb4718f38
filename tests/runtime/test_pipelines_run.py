"""Pipelines against one device: every schedule, recompute mode and kind of cut, tied weights, values that cross, and what must not pass."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import pytest
import torch
from support.effort import every, tried
from support.exactness import (
    Reference,
    case,
    engine_for,
    loss_of,
    reference,
    run_steps,
    sgd,
    train,
    update_error,
)
from support.pipeline_runs import check, check_carried
from support.staged_runs import annotated, at_random, pipelined, staged
from torch import Tensor

from autopar.api import trace
from autopar.errors import AutoparError
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.rewrite.program import assemble
from autopar.rewrite.shape_check import verify_program
from autopar.rewrite.stages import steady_values
from autopar.runtime.engine import Engine
from autopar.runtime.pipeline.pipeline import Pipeline
from autopar.runtime.programs.recompute import Recomputed
from autopar.runtime.state.tied_parameters import StageParameters

DP, TP, PP4 = MeshShape(pp=2, dp=2), MeshShape(pp=2, tp=2), MeshShape(pp=4)
ONES = (1, 1, 1, 1)
CASES = {  # model -> (mesh, schedule, segments of each stage, micro-batches, recompute of segments in turn)
    "llama-tiny": [
        (DP, "gpipe", (1, 3), 1, ("none",)),
        (TP, "gpipe", (2, 2), 2, ("op",)),
        (TP, "1f1b", (3, 1), 4, ("full", "selective")),
        (DP, "interleaved_1f1b", ONES, 2, ("op", "selective")),
        (TP, "interleaved_1f1b", ONES, 2, ("full",)),
        (DP, "zero_bubble", (2, 2), 4, ("selective",)),
        (TP, "zero_bubble", ONES, 2, ("none",)),
        (PP4, "1f1b", ONES, 8, ("none", "full")),
    ],
    "gpt-tiny": [  # tied: the table of tokens is in the first stage and in the last
        (TP, "gpipe", (2, 2), 4, ("full",)),
        (DP, "1f1b", (2, 2), 2, ("op",)),
        (TP, "1f1b", (1, 3), 8, ("none", "op", "selective")),
        (TP, "interleaved_1f1b", ONES, 4, ("none",)),
        (DP, "zero_bubble", (3, 1), 4, ("full",)),
        (PP4, "gpipe", ONES, 2, ("selective",)),
        (PP4, "zero_bubble", ONES, 4, ("none",)),
    ],
}
EXPERTS = [  # the loss of a router is not linear in the batch: one device runs the same micro-batches
    (TP, "1f1b", (3, 1), 2, ("op",)),
    (DP, "gpipe", (2, 2), 1, ("selective",)),
    (MeshShape(pp=2, dp=2, ep=2), "interleaved_1f1b", ONES, 1, ("none",)),
    (TP, "zero_bubble", (2, 2), 4, ("full",)),
]


@pytest.mark.parametrize("name", [pytest.param("llama-tiny", marks=pytest.mark.slow), "gpt-tiny"])
def test_schedules_cuts_and_recompute(pool4, name):
    choices = tried(CASES[name][2:5], CASES[name])  # one of each schedule but GPipe
    check(pool4, name, [pipelined(name, *choice) for choice in choices])


def trained(rank: int, name: str, text: str) -> tuple[list[float], dict[str, Tensor]]:
    return run_steps(engine_for(name, Plan.from_json(text)), case(name).batches)


@pytest.mark.parametrize(
    "choice",
    [EXPERTS[0], *(pytest.param(choice, marks=pytest.mark.slow) for choice in EXPERTS[1:])],
)
def test_experts_and_router_losses(pool4, choice):
    losses, after = trained(
        0, "moe-tiny", pipelined("moe-tiny", MeshShape(), "none", (4,), choice[3]).to_json()
    )
    expected = Reference(losses, case("moe-tiny").model.state_dict(), after)
    for found, state in pool4.run(trained, "moe-tiny", pipelined("moe-tiny", *choice).to_json()):
        assert update_error(expected, state) <= 1.0 and found == pytest.approx(losses, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hf-llama", "hf-gpt2"])
def test_hugging_face_models(pool4, name):
    count = len(case(name).traced.segments)
    cuts = (2, count - 2)
    modes = ("none", "selective", "full")
    check(
        pool4,
        name,
        [
            pipelined(name, *choice)
            for choice in [(TP, "1f1b", cuts, 2, modes), (DP, "zero_bubble", cuts, 2, ("full",))]
        ],
    )


@pytest.mark.parametrize(
    ("schedule", "cuts", "seed", "kind"),
    [
        ("gpipe", (2, 2), 6, "R/P"),
        pytest.param("interleaved_1f1b", ONES, 14, "R/P", marks=pytest.mark.slow),
        pytest.param("1f1b", (2, 2), 4, "P", marks=pytest.mark.slow),
        pytest.param("zero_bubble", ONES, 19, "P", marks=pytest.mark.slow),
    ],
)
def test_any_layouts_cross_boundaries(pool4, schedule, cuts, seed, kind):
    plan = at_random("llama-tiny", TP, schedule, cuts, 2, seed)
    crossing = {str(layout) for layout in _crossing("llama-tiny", plan)}
    assert kind in crossing and any(layout.startswith("S") for layout in crossing), crossing
    check(pool4, "llama-tiny", [plan])


def _crossing(name: str, plan: Plan) -> list:
    program = assemble(case(name).traced, plan, 0, torch.device("cpu"))
    return [
        layout
        for stage in program.stages
        for value in stage.sent
        for layout in value.layouts.values()
    ]


# ------------------------------------------------------------------------------------------------- values and buffers of other kinds


@pytest.mark.parametrize(
    ("mesh", "schedule", "cuts", "modes"),
    [
        pytest.param(PP4, "1f1b", (2, 1, 1, 1), ("none", "full"), marks=pytest.mark.slow),
        pytest.param(TP, "interleaved_1f1b", (1, 2, 1, 1), ("full", "op"), marks=pytest.mark.slow),
        (TP, "zero_bubble", (2, 3), ("none",)),
        pytest.param(
            PP4, "gpipe", (1, 1, 1, 2), ("selective", "full", "none"), marks=pytest.mark.slow
        ),
    ],
)
def test_masks_tables_positions_buffers_and_dropout(pool4, mesh, schedule, cuts, modes):
    check_carried(pool4, mesh, schedule, cuts, modes)


class Sharing(torch.nn.Module):
    """Layers read tables of constants, one of a parameter, noise and a mask of an input; with `changing` what a changing buffer gives."""

    def __init__(self, changing: bool = False) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
        self.scale, self.drop = torch.nn.Parameter(torch.ones(8)), torch.nn.Dropout(0.3)
        self.register_buffer("kept", torch.linspace(0.5, 1.5, 8))
        self.norm = torch.nn.BatchNorm1d(8, affine=False) if changing else torch.nn.Identity()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h, same, noise = x, self.kept * torch.arange(8).cos(), self.drop(torch.ones(8))
        square, learned, mask = self.norm(same[:, None] * same), self.scale.exp(), x[..., :1] > 0.0
        for layer in self.layers:
            h = (h + layer(h @ square).tanh() * same * learned * noise).masked_fill(mask, 0.5)
        return ((h - target) ** 2).mean()


@cache
def sharing() -> tuple[Sharing, object, list[dict[str, Tensor]]]:
    generator = torch.Generator().manual_seed(2)
    batches = [
        {name: torch.randn(8, 3, 8, generator=generator).double() for name in ("x", "target")}
        for _ in range(3)
    ]
    state = torch.get_rng_state()
    torch.manual_seed(0)
    model = Sharing().double()
    torch.set_rng_state(state)
    return model, trace(model, batches[0]), batches


def sharing_plan(mesh: MeshShape, schedule: str) -> Plan:
    _, traced, _ = sharing()
    plan, count = annotated(traced, mesh, 4, 8), len(traced.segments)
    if mesh.pp == 1:
        return plan
    stages = 2 * mesh.pp if schedule == "interleaved_1f1b" else mesh.pp
    return staged(plan, traced, schedule, (count - stages + 1, *(1,) * (stages - 1)))


def shared(rank: int, text: str) -> tuple[list[float], dict[str, Tensor], list[int]]:
    """Losses, the state, and the messages that each of three steps received."""
    model, traced, batches = sharing()
    engine = Engine(model, traced, Plan.from_json(text), sgd, None, None, "cpu")
    engine.step(engine.local_batch(batches[0]))
    received, losses = [], []
    for batch in batches:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            losses.append(float(engine.step(engine.local_batch(batch))))
        received.append(
            sum(event.count for event in profiler.key_averages() if event.key == "c10d::recv_")
        )
    return losses, engine.full_state_dict(), received


def test_what_micro_batches_share_is_found():
    for changing, expected in (
        (False, {"mul", "mul_1", "exp"}),
        (True, {"mul", "exp"}),
    ):
        traced = trace(Sharing(changing).double(), sharing()[2][0])
        crossing = {
            source
            for segment in traced.segments[1:]
            for source in segment.inputs
            if source.segment == 0
        }
        results = traced.classes[traced.segments[0].class_index].graph.output_node().args[0]
        assert {
            results[source.index].name for source in crossing & steady_values(traced)
        } == expected
        assert {"gt", "dropout", "matmul"} <= {results[source.index].name for source in crossing}
    program = assemble(sharing()[1], sharing_plan(PP4, "1f1b"), 0, torch.device("cpu"))
    assert [value.steady for value in program.stages[0].sent].count(
        True
    ) == 2  # what is learned has a gradient


@pytest.mark.parametrize("schedule", every(4, ["interleaved_1f1b", "1f1b", "zero_bubble", "gpipe"]))
def test_what_micro_batches_share_travels_once(pool4, schedule):
    losses, state, _ = shared(0, sharing_plan(MeshShape(), "none").to_json())
    model, *_ = sharing()
    expected = Reference(losses, {k: v.clone() for k, v in model.state_dict().items()}, state)
    plan, number = sharing_plan(PP4, schedule), 4
    for rank, (found, tensors, received) in enumerate(pool4.run(shared, plan.to_json())):
        assert update_error(expected, tensors) <= 1.0 and found == pytest.approx(losses, rel=1e-9)
        stages = assemble(sharing()[1], plan, rank, torch.device("cpu")).stages
        steady = sum(value.steady for stage in stages for value in stage.received)
        values = sum(
            len(stage.received) + sum(value.has_gradient for value in stage.sent)
            for stage in stages
        )
        assert received == [number * (values - steady) + steady] * 3 and bool(steady) == bool(
            stages[-1].stage.index
        )


# ------------------------------------------------------------------------------------------------------------- the rest of the engine


LIMIT = 0.05


def clipped(rank: int, text: str, damage: str) -> tuple[list[float], dict[str, Tensor]]:
    patch = pytest.MonkeyPatch()
    with patch.context() as change:
        for owner, name, wrong in DAMAGES.get(damage, ()):
            change.setattr(owner, name, wrong)
        limit = None if "averaged" in damage else LIMIT  # clipping would undo a wrong scale
        return run_steps(
            engine_for("gpt-tiny", Plan.from_json(text), limit), case("gpt-tiny").batches
        )


DAMAGES = {
    "tied gradients are not added up": [
        (StageParameters, "add_up_tied", lambda self, leaves: None)
    ],
    "tied gradients count on every rank": [(StageParameters, "counts", lambda self, name: True)],
    "the norm is that of one stage": [(StageParameters, "over_stages", lambda self, value: value)],
    "losses are averaged once more": [(Pipeline, "_loss", lambda self, output, target: output / 4)],
}


@pytest.mark.parametrize("damage", ["", *DAMAGES])
def test_clipping_with_tied_weights_and_damages(pool4, damage):
    found = case("gpt-tiny")
    expected = train(
        found.model, found.batches, max_grad_norm=None if "averaged" in damage else LIMIT
    )
    plan = pipelined("gpt-tiny", PP4, "1f1b", ONES, 4)
    results = pool4.run(clipped, plan.to_json(), damage)
    if not damage:
        for losses, state in results:
            assert update_error(expected, state) <= 1.0 and losses == pytest.approx(
                expected.losses, abs=1e-9
            )
    else:
        assert max(update_error(expected, state) for _, state in results) > 1e3


def wrong_and_right(
    rank: int, text: str
) -> tuple[dict[str, str], list[float], dict[str, Tensor], set[str]]:
    engine = engine_for("gpt-tiny", Plan.from_json(text))
    good = engine.local_batch(case("gpt-tiny").batches[0])
    found = {}
    for what, batch in {
        "none": {k: v[:0] for k, v in good.items()},
        "one rank's": good if rank else {"input_ids": good["input_ids"]},
        "others' rows": {k: v.roll(rank, 0) for k, v in good.items()},
    }.items():
        try:
            engine.step(batch)
            found[what] = "no error"
        except AutoparError as error:
            found[what] = str(error)
    losses = [
        float(engine.eval_step(engine.local_batch(batch))) for batch in case("gpt-tiny").batches
    ]
    return found, losses, engine.full_state_dict(), set(engine._leaves)


def test_batches_evaluation_and_state(pool4):
    found = case("gpt-tiny")
    with torch.no_grad():
        expected = [float(loss_of(found.model(**batch))) for batch in found.batches]
    results = pool4.run(
        wrong_and_right, pipelined("gpt-tiny", PP4, "1f1b", ONES, 4).to_json(), timeout_s=60
    )
    for mistakes, losses, state, _ in results:
        assert "no error" not in mistakes.values(), mistakes
        assert "no rows" in mistakes["none"] and "same rows" in mistakes["others' rows"]
        assert losses == pytest.approx(expected, abs=1e-12)
        assert all(torch.equal(state[k], v) for k, v in found.model.state_dict().items())
    held = [names for _, _, _, names in results]
    tied = held[0] & held[3]
    assert (
        len(tied) == 1
        and not held[1] & held[2]
        and set().union(*held) == set(found.traced.parameters)
    )


def from_meta(rank: int, text: str) -> dict[str, Tensor]:
    from autopar.models import parse_model

    meta = parse_model("gpt-tiny").build("meta", torch.float64)
    return Engine(
        meta, case("gpt-tiny").traced, Plan.from_json(text), sgd, None, None, "cpu", seed=5
    ).full_state_dict()


def test_a_meta_model_is_initialized_alike_in_every_pipeline(pool4):
    alone = from_meta(0, pipelined("gpt-tiny", MeshShape(), "none", (4,), 1).to_json())
    for state in pool4.run(from_meta, pipelined("gpt-tiny", TP, "1f1b", (2, 2), 2).to_json()):
        assert set(state) == set(alone) and all(torch.equal(state[k], v) for k, v in alone.items())


def test_every_rank_of_every_cut_is_verified():
    for plan in (
        pipelined("gpt-tiny", TP, "interleaved_1f1b", ONES, 2),
        pipelined("gpt-tiny", PP4, "1f1b", ONES, 4),
    ):
        for rank in range(4):
            program = assemble(case("gpt-tiny").traced, plan, rank, torch.device("cpu"))
            assert (
                verify_program(program) > 5
                and len(program.stages) == len(plan.stages) // plan.mesh.pp
            )
            assert "def program" in program.code


def test_damaged_stages_are_refused():
    found = case("gpt-tiny")
    plan = pipelined("gpt-tiny", PP4, "1f1b", ONES, 4)
    for stages in (plan.stages[:3], plan.stages[::-1], (*plan.stages[:3], ()), ()):
        with pytest.raises(AutoparError, match="stages over pp=4"):
            assemble(found.traced, replace(plan, stages=stages), 0, torch.device("cpu"))


def test_the_reference_moves():
    assert all(reference(name).losses[0] != reference(name).losses[1] for name in CASES)


class TwoWays(torch.nn.Module):
    """A second stream begins in the middle, as a decoder does, and meets the first at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(5, 5) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for first in self.layers[:2]:
            x = first(x).tanh()
        for second in self.layers[2:]:
            y = second(y).tanh()
        return ((x - y) ** 2).mean()


class Late(torch.nn.Module):
    """Its first layer has no parameters: what the second receives has no gradient.  Its loss is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            [torch.nn.Tanh(), *(torch.nn.Linear(5, 5) for _ in range(3))]
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return ((x - y) ** 2).mean(dim=(0, 1), keepdim=True).squeeze()


class Reusing(torch.nn.Module):
    """Layers have one matrix in common, which each uses twice, and read one table, which the first of them makes of a parameter as if of
    positions."""

    class Layer(torch.nn.Module):
        def __init__(self, common: torch.nn.Linear) -> None:
            super().__init__()
            self.own, self.common = torch.nn.Linear(5, 5), common

        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            return x + self.common(torch.tanh(self.own(self.common(x)))) * table

    class Making(Layer):
        def __init__(self, common: torch.nn.Linear) -> None:
            super().__init__(common)
            self.table = torch.nn.Parameter(torch.linspace(-1, 1, 5))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            table = torch.sigmoid(self.table)
            return super().forward(x, table), table

    def __init__(self) -> None:
        super().__init__()
        common = torch.nn.Linear(5, 5)
        self.layers = torch.nn.ModuleList(
            [torch.nn.Linear(5, 5), self.Making(common), *(self.Layer(common) for _ in range(3))]
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, table = self.layers[1](self.layers[0](x))
        for number in range(2, 5):
            x = self.layers[number](x, table)
        return ((x - y) ** 2).mean()


class Pooling(torch.nn.Module):
    """Layers whose attention asks the same of all: its queries are made from parameters alone."""

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.asked, self.spread = (
                torch.nn.Parameter(torch.randn(1, 1, 2, 4)),
                torch.nn.Parameter(torch.randn(5, 4)),
            )
            self.query, self.out = torch.nn.Linear(4, 4), torch.nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            keys = (x.unsqueeze(-1) * self.spread).unsqueeze(1)
            queries = self.query(self.asked).expand(x.shape[0], -1, -1, -1)
            return x + self.out(
                torch.nn.functional.scaled_dot_product_attention(queries, keys, keys).flatten(1)
            )

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(self.Layer() for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return ((x - y) ** 2).mean()


@cache
def small(kind: type[torch.nn.Module]) -> tuple[torch.nn.Module, object, list[dict[str, Tensor]]]:
    generator = torch.Generator().manual_seed(1)
    batches = [
        {name: torch.randn(8, 5, generator=generator).double() for name in "xy"} for _ in range(3)
    ]
    state = torch.get_rng_state()
    torch.manual_seed(0)
    model = kind().double()
    torch.set_rng_state(state)
    return model, trace(model, batches[0]), batches


def cut_before(
    kind: type[torch.nn.Module],
    mesh: MeshShape,
    layers: tuple[int, ...],
    modes: tuple[str, ...] = ("none",),
) -> Plan:
    """Under zero bubble, stages that begin with these layers; the first begins with the model."""
    _, traced, _ = small(kind)
    names = [segment.name for segment in traced.segments]
    starts = [0, *(names.index(f"layers.{number}") for number in layers), len(names)]
    return staged(
        annotated(traced, mesh, 4, 8),
        traced,
        "zero_bubble",
        tuple(b - a for a, b in itertools.pairwise(starts)),
        modes,
    )


def train_small(
    rank: int, kind: type[torch.nn.Module], text: str
) -> tuple[list[float], dict[str, Tensor]]:
    model, traced, batches = small(kind)
    return run_steps(Engine(model, traced, Plan.from_json(text), sgd, None, None, "cpu"), batches)


@pytest.mark.parametrize(
    ("kind", "mesh", "layers", "modes"),
    [
        (
            TwoWays,
            PP4,
            (1, 2, 3),
            ("none",),
        ),  # the third sends its layer's result, and no gradient of that flows back to what it received
        (Late, PP4, (1, 2, 3), ("none",)),  # what the second receives has no gradient
        # gradients of what layers share lead through layers
        pytest.param(Reusing, DP, (1,), ("none",), marks=pytest.mark.slow),
        (Reusing, DP, (1,), ("full",)),
        (Reusing, PP4, (1, 2, 4), ("none",)),  # the table crosses
        pytest.param(Pooling, DP, (1,), ("selective",), marks=pytest.mark.slow),
    ],
)
def test_zero_bubble_finds_every_gradient_of_a_weight(pool4, kind, mesh, layers, modes):
    model, _, batches = small(kind)
    expected = train(model, batches, call=lambda model, batch: model(**batch))
    for losses, state in pool4.run(
        train_small, kind, cut_before(kind, mesh, layers, modes).to_json()
    ):
        assert update_error(expected, state) <= 1.0 and losses == pytest.approx(
            expected.losses, rel=1e-9
        )


def who_runs_again(rank: int, text: str) -> list[bool]:
    """After steps of 8, 6 and 8 rows, whether what a segment recomputes fills slots of the last step's schedule."""
    engine, batch = engine_for("llama-tiny", Plan.from_json(text)), case("llama-tiny").batches[0]
    for rows in (8, 6, 8):
        engine.step(engine.local_batch({name: x[:rows] for name, x in batch.items()}))
    schedules = engine._passes.pipelines["training", 0]._schedules
    assert len(schedules) == 2
    stages = next(iter(schedules.values()))[1]
    return [part.again == stage.parted.again for stage in stages if stage.parted for part in stage.submod.body.children()
            if isinstance(part, Recomputed)]  # fmt: skip


def test_batches_of_other_sizes_give_back_under_zero_bubble(pool2):
    plan = pipelined("llama-tiny", MeshShape(pp=2), "zero_bubble", (2, 2), 4, ("full",))
    assert pool2.run(who_runs_again, plan.to_json()) == [[], [True, True]]
