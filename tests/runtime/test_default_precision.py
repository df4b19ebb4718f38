"""The precision of a model for which none is given: its own dtype, but bf16 on GPUs for an fp32 model; what is cast is said."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from support.captures import captured_once
from support.effort import every, slow_but
from support.exactness import moved, sgd, train, update_error
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError
from autopar.ir.plan import Plan

ROWS = 4
CPU, GPU = "cpu:1", "dgx-h100:1"


class Images(nn.Module):
    """Convolutions with and without bias, batch norm with a counter, and a table of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = (
            nn.Conv2d(3, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.Conv2d(6, 4, 3, stride=2, bias=False),
        )
        self.head = nn.Linear(4, 5)
        self.register_buffer("order", torch.tensor([2, 0, 1]))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.second(self.norm(self.first(x[:, self.order])).tanh())
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class Signals(nn.Module):
    """1-D convolutions, transposed too, and a buffer of booleans."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv1d(3, 8, 4, stride=2), nn.ConvTranspose1d(8, 5, 4, stride=2)
        self.register_buffer("audible", torch.arange(12) % 3 > 0)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.up(torch.tanh(self.down(x * self.audible)))
        return F.cross_entropy(x.mean(2), labels)


class Rows(nn.Module):
    """An embedding, a bilinear product and a norm over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(5, 6), nn.LayerNorm(6), nn.Linear(6, 5)
        self.pair = nn.Bilinear(6, 36, 6)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(
            self.head(self.norm(self.pair(self.embed(labels), x.flatten(1)))), labels
        )


SHAPES = {Images: (3, 7, 7), Signals: (3, 12), Rows: (3, 12)}


def built(kind: type, dtype: torch.dtype) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind().to(dtype)


def batches(kind: type, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "x": torch.randn(ROWS, *SHAPES[kind], generator=generator, dtype=dtype),
            "labels": torch.arange(ROWS) % 5,
        }
        for _ in range(3)
    ]


@captured_once()
def train_double(rank: int, pins: list[dict]) -> list[tuple[float, set[torch.dtype]]]:
    """Errors over the tolerance, and the dtypes of what floats afterwards, of each model under each pin, with no precision given."""
    found = []
    for kind in SHAPES:
        model, data = built(kind, torch.float64), batches(kind, torch.float64)
        result = train(model, data)
        for pin in pins:
            engine = autopar.parallelize(model, "cpu:2", data[0], sgd, pin=pin)
            losses = [float(engine.step(engine.local_batch(batch))) for batch in data]
            state = engine.full_state_dict()
            assert losses == pytest.approx(result.losses, rel=1e-9) and moved(result) > 0.01
            found.append(
                (
                    update_error(result, state),
                    {v.dtype for v in state.values() if v.is_floating_point()},
                )
            )
    return found


@pytest.mark.slow
def test_a_double_model_stays_double(pool2):
    for by_rank in pool2.run(train_double, [{"dp": 2}, {"tp": 2}], timeout_s=300):
        assert len(by_rank) == 6
        for error, dtypes in by_rank:
            assert error <= 1.0 and dtypes == {torch.float64}


@pytest.mark.parametrize("kind", slow_but([Rows], SHAPES))
@pytest.mark.parametrize(
    ("precision", "own"),
    [
        ("fp64", torch.float32),
        ("fp32", torch.float64),
        ("bf16", torch.float32),
        ("fp32", torch.bfloat16),
    ],
)
def test_a_precision_that_is_given_is_that_of_all(kind, precision, own):
    """The model, its inputs, and the loss; in fp32 and fp64 as after `model.to(dtype)`."""
    data = batches(kind, own)
    engine = autopar.parallelize(built(kind, own), CPU, data[0], sgd, precision=precision)
    losses = [engine.step(batch) for batch in data]
    wanted = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    assert {p.dtype for p in engine.program.module.parameters()} == {wanted}
    cast = [
        {name: t.to(wanted) if t.is_floating_point() else t for name, t in batch.items()}
        for batch in data
    ]
    expected = train(built(kind, own).to(wanted), cast)
    tolerance = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 0.05}[precision]
    assert [float(loss) for loss in losses] == pytest.approx(expected.losses, rel=tolerance)


@pytest.mark.parametrize(
    ("dtype", "name"),
    every(
        2,
        [(torch.float64, "fp64"), (torch.float16, "fp16"), (torch.bfloat16, "bf16")],
        unpacked=True,
    ),
)
def test_a_model_keeps_its_dtype_everywhere(dtype, name, capsys):
    model, data = built(Rows, dtype), batches(Rows, dtype)
    for cluster in (CPU, GPU):
        plan = autopar.plan(model, cluster, data[0])
        assert plan.precision == name and any(
            "fp32 master weights" in note for note in plan.notes
        ) is (name != "fp64")
    engine = autopar.parallelize(model, CPU, data[0], sgd)
    assert engine.plan.precision == name and engine.loss_scale.dynamic is (name == "fp16")
    said = capsys.readouterr().err
    assert said == (
        ""
        if name == "fp64"
        else f"autopar: the model runs in its own dtype, {name}, with fp32 master weights\n"
    )
    before = copy.deepcopy(engine.full_state_dict())
    for _ in range(8 if name == "fp16" else 1):  # steps of too large a loss scale move nothing
        assert torch.isfinite(engine.step(data[0]))
    assert any(not torch.equal(before[k], v) for k, v in engine.full_state_dict().items())


def test_an_fp32_model_is_bf16_on_gpus_and_fp32_on_cpus(capsys):
    model, data = built(Rows, torch.float32), batches(Rows, torch.float32)
    plan = autopar.plan(model, GPU, data[0])
    assert plan.precision == "bf16" and Plan.from_json(plan.to_json()).notes[0] == plan.notes[0]
    assert plan.notes[0] == ("the model is fp32 and runs in bf16 with fp32 master weights, the default on GPUs; "
                             "precision='fp32' keeps its dtype")  # fmt: skip
    kept = autopar.plan(model, GPU, data[0], precision="fp32")
    assert kept.precision == "fp32" and not any("dtype" in note for note in kept.notes)
    assert autopar.plan(model, CPU, data[0]).precision == "fp32"
    assert (
        autopar.parallelize(model, CPU, data[0], sgd).plan.precision == "fp32"
        and capsys.readouterr().err == ""
    )


def bf16_with_fp32_norm() -> nn.Module:
    model = built(Rows, torch.bfloat16)
    model.norm.float()
    return model


def fp32_with_double_buffer() -> nn.Module:
    model = built(Signals, torch.float32)
    model.register_buffer("audible", torch.linspace(0, 1, 12, dtype=torch.float64))
    return model


def fp32_adapter_of_frozen_bf16() -> nn.Module:
    model = built(Rows, torch.bfloat16).requires_grad_(False)
    model.head.float().requires_grad_(True)
    return model


@pytest.mark.parametrize(("make", "kind", "precision", "cast"), [
    (bf16_with_fp32_norm, Rows, "bf16", "cast to bf16: norm.weight (fp32), norm.bias (fp32), input x (fp32);"),
    (fp32_with_double_buffer, Signals, "fp32", "cast to fp32: audible (fp64);"),
    (fp32_adapter_of_frozen_bf16, Rows, "fp32", "cast to fp32: embed.weight (bf16), norm.weight (bf16), norm.bias (bf16) and 2 more;"),
])  # fmt: skip
def test_a_model_of_several_dtypes_says_what_is_cast(make, kind, precision, cast, capsys):
    data = batches(kind, torch.float32)
    engine = autopar.parallelize(make(), CPU, data[0], sgd)
    assert engine.plan.precision == precision
    said = capsys.readouterr().err
    assert (
        said.count("\n") == 1 and cast in said and any(cast in note for note in engine.plan.notes)
    )
    expected = train(make().to(torch.float32), data[:1]) if precision == "fp32" else None
    loss = float(engine.step(data[0]))
    assert expected is None or loss == pytest.approx(expected.losses[0], rel=1e-5)


def test_an_input_that_loses_digits_is_said(capsys):
    data = batches(Rows, torch.float64)
    autopar.parallelize(built(Rows, torch.float32), CPU, data[0], sgd)
    assert (
        "cast to fp32: input x (fp64); precision= chooses another dtype" in capsys.readouterr().err
    )
    # as it advises
    engine = autopar.parallelize(built(Rows, torch.float32), CPU, data[0], sgd, precision="fp64")
    assert capsys.readouterr().err == "" and engine.step(data[0]).dtype == torch.float64


def test_a_buffer_that_stays_is_not_said_to_be_cast(capsys):
    class Scaled(Rows):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.rand(6))

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return super().forward(x, labels) + (self.scale.float() ** 2).sum().to(x.dtype)

    model, data = built(Scaled, torch.bfloat16), batches(Rows, torch.bfloat16)
    model.scale = model.scale.float()
    engine = autopar.parallelize(model, CPU, data[0], sgd)
    assert (
        "scale" not in capsys.readouterr().err
        and engine.full_state_dict()["scale"].dtype == torch.float32
    )


def test_what_no_precision_has_is_refused():
    model, data = built(Rows, torch.float32), batches(Rows, torch.float32)
    strange = copy.deepcopy(model)
    for name, parameter in list(strange.pair.named_parameters()):
        setattr(
            strange.pair, name, nn.Parameter(parameter.to(torch.float8_e4m3fn), requires_grad=True)
        )
    for call in (autopar.plan, autopar.parallelize):
        with pytest.raises(
            AutoparError,
            match=r"most parameters of Rows are float8_e4m3fn, .*: pass precision= fp32, fp64",
        ):
            call(strange, CPU, data[0])
    found = autopar.parallelize(strange, CPU, data[0], sgd, precision="fp32").step(
        data[0]
    )  # as it advises
    assert float(found) == pytest.approx(
        train(copy.deepcopy(strange).float(), data[:1]).losses[0], rel=1e-5
    )
    plan = autopar.plan(model, CPU, data[0])
    with pytest.raises(AutoparError, match="the plan is for fp32, not precision='fp64'"):
        autopar.parallelize(model, CPU, data[0], plan=plan, precision="fp64")
