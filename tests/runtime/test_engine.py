"""The engine against one device: steps, clipping, micro-batches, evaluation, state dicts, meta models, and models of many shapes."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.effort import every, slow_but, tried
from support.exactness import (
    HF,
    Reference,
    case,
    engine_for,
    loss_of,
    random_plan,
    reference,
    run_steps,
    setting,
    sgd,
    solved_plan,
    token_batches,
    train,
    update_error,
)
from torch import Tensor, nn

from autopar.annotate.annotator import Annotator
from autopar.api import trace
from autopar.errors import AutoparError
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.models import parse_model
from autopar.rewrite.collectives import primitives, transitions
from autopar.runtime.engine import Engine
from autopar.runtime.state.weights import Weights

TP2DP2, TP4, DP4, DP2, ONE = (
    MeshShape(dp=2, tp=2),
    MeshShape(tp=4),
    MeshShape(dp=4),
    MeshShape(dp=2),
    MeshShape(),
)


def plan_for(
    name: str, mesh: MeshShape, num_microbatches: int = 1, recompute: str = "none"
) -> Plan:
    found = case(name)
    return solved_plan(found.traced, found.annotator, setting(mesh, num_microbatches, recompute))


def exact(result: Reference, losses: list[float], state: dict[str, Tensor]) -> None:
    error = update_error(result, state)
    assert error <= 1.0, f"update error {error:g} times the tolerance"
    assert losses == pytest.approx(result.losses, abs=1e-9, rel=1e-9)


# ----------------------------------------------------------------------------------------------------- steps on the reference models


def step_three_times(rank: int, name: str, text: str, max_grad_norm: float | None):
    return run_steps(engine_for(name, Plan.from_json(text), max_grad_norm), case(name).batches)


@pytest.mark.parametrize("name", every(2, ["gpt-tiny", "llama-tiny"]))
def test_clipping_by_global_norm(pool4, name):
    found, limit = case(name), 0.05
    expected = train(found.model, found.batches, max_grad_norm=limit)
    assert update_error(expected, reference(name).after) > 1e6, "the limit must bite"
    for losses, state in pool4.run(step_three_times, name, plan_for(name, TP2DP2).to_json(), limit):
        exact(expected, losses, state)


@pytest.mark.parametrize(
    ("name", "number", "recompute"),
    every(
        3,
        [("gpt-tiny", 4, "full"), ("llama-tiny", 2, "none"), ("llama-tiny", 1, "full")],
        unpacked=True,
    ),
)
def test_micro_batches_and_recompute(pool4, name, number, recompute):
    plan = plan_for(name, TP2DP2, number, recompute)
    assert any(block.recompute == recompute for block in plan.blocks)
    for losses, state in pool4.run(step_three_times, name, plan.to_json(), None):
        exact(reference(name), losses, state)


def test_micro_batches_with_clipping_on_dp(pool4):
    found = case("gpt-tiny")
    expected = train(found.model, found.batches, max_grad_norm=0.05)
    for losses, state in pool4.run(
        step_three_times, "gpt-tiny", plan_for("gpt-tiny", DP4, 2).to_json(), 0.05
    ):
        exact(expected, losses, state)


def evaluate(rank: int, name: str, text: str) -> tuple[list[float], dict, dict]:
    engine = engine_for(name, Plan.from_json(text))
    before = engine.full_state_dict()
    return (
        [float(engine.eval_step(engine.local_batch(b))) for b in case(name).batches],
        before,
        engine.full_state_dict(),
    )


@pytest.mark.parametrize("number", [1, 2])
def test_eval_step(pool4, number):
    found = case("gpt-tiny")
    with torch.no_grad():
        expected = [float(loss_of(found.model(**b))) for b in found.batches]
    for losses, before, after in pool4.run(
        evaluate, "gpt-tiny", plan_for("gpt-tiny", TP2DP2, number).to_json()
    ):
        assert losses == pytest.approx(expected, abs=1e-12)
        assert all(torch.equal(before[k], after[k]) for k in before)


def sums_of_a_step(rank: int, name: str, text: str) -> list[int]:
    """Elements of what is added up over ranks in a step."""
    engine, sums = engine_for(name, Plan.from_json(text)), []
    batch, start = engine.local_batch(case(name).batches[0]), primitives.start_primitive

    def counted(primitive: str, x: Tensor, *rest):
        if primitive == "all_reduce":
            sums.append(x.numel())
        return start(primitive, x, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(primitives, "start_primitive", counted)
        patch.setattr(transitions, "start_primitive", counted)
        engine.step(batch)
    return sums


@pytest.mark.parametrize(
    ("name", "inside"), every(2, [("moe-tiny", 2), ("gpt-tiny", 0)], unpacked=True)
)
def test_the_loss_is_added_up_once_a_step(pool4, name, inside):
    """A micro-batch adds up over dp only the share of each expert, which its loss multiplies: once a layer, and no gradient of it."""
    for number in (1, 2):
        for sums in pool4.run(sums_of_a_step, name, plan_for(name, DP4, number).to_json()):
            assert sums.count(1) == 1
            assert len([size for size in sums if 1 < size <= 8]) == inside * number


def state_names(rank: int, name: str, text: str):
    engine = engine_for(name, Plan.from_json(text))
    return {k: v for k, v in engine.full_state_dict().items()}


@pytest.mark.parametrize(
    "name", slow_but(["gpt-tiny", "llama-tiny"], ["gpt-tiny", "llama-tiny", "hf-gpt2"])
)
def test_full_state_dict_is_the_models_own(pool4, name):
    expected = case(name).model.state_dict()
    for state in pool4.run(state_names, name, plan_for(name, TP4).to_json()):
        assert set(state) == set(expected)
        assert all(torch.equal(state[k], v) for k, v in expected.items())


def local_rows(rank: int, name: str, text: str):
    engine = engine_for(name, Plan.from_json(text))
    batch = case(name).batches[0]
    cut = engine.local_batch(batch)
    fewer = engine.local_batch({k: v[:5] for k, v in batch.items()})
    share = slice(3) if rank < 2 else slice(3, 5)
    return [
        {
            k: torch.equal(v, batch[k][4 * (rank // 2) : 4 * (rank // 2) + 4])
            for k, v in cut.items()
        },
        {k: torch.equal(v, batch[k][share]) for k, v in fewer.items()},
    ]


def test_local_batch(pool4):
    for found in pool4.run(local_rows, "llama-tiny", plan_for("llama-tiny", TP2DP2).to_json()):
        assert found == [{"input_ids": True, "labels": True}] * 2


# ------------------------------------------------------------------------------------------------------------------- wrong batches


def wrong_batches(rank: int, name: str, text: str) -> dict[str, str]:
    engine = engine_for(name, Plan.from_json(text))
    good = engine.local_batch(case(name).batches[0])
    dp = engine.axes["dp"].index
    ids, labels = good["input_ids"], good["labels"]
    wrong = {
        "keys": {"input_ids": ids},
        "extra": {**good, "mask": ids},
        "dtype": {"input_ids": ids.double(), "labels": labels},
        "length": {"input_ids": ids[:, :5], "labels": labels[:, :5]},
        "rank": {"input_ids": ids[0], "labels": labels[0]},
        "rows differ": {"input_ids": ids, "labels": labels[:1]},
        "none": {k: v[:0] for k, v in good.items()},
        "not a tensor": {"input_ids": ids, "labels": labels.tolist()},
        "one rank's keys": good if dp == 0 else {"input_ids": ids},
        "meta": {k: v.to("meta") for k, v in good.items()},
        "one rank's dtype": good if dp == 1 else {"input_ids": ids.double(), "labels": labels},
    }
    found = {}
    for what, batch in wrong.items():
        try:
            engine.step(batch)
            found[what] = "no error"
        except AutoparError as error:
            found[what] = str(error)
    engine.step(good)  # the engine goes on
    return found


def test_wrong_batches_raise_on_every_rank_and_never_hang(pool4):
    results = pool4.run(
        wrong_batches, "llama-tiny", plan_for("llama-tiny", TP2DP2, 2).to_json(), timeout_s=60
    )
    for found in results:
        assert "no error" not in found.values(), found
    assert results[0]["one rank's keys"].startswith("rank 2: the batch has input_ids;")


# -------------------------------------------------------------------------------------------------------------------- meta models


def meta_engines(rank: int, name: str, text: str, path: str) -> tuple[dict, dict]:
    found, plan = case(name), Plan.from_json(text)
    meta = _meta(name)
    weights = Weights(path, meta, found.traced.parameters)
    loaded = Engine(meta, found.traced, plan, sgd, None, weights, "cpu").full_state_dict()
    own = Engine(meta, found.traced, plan, sgd, None, None, "cpu", seed=5).full_state_dict()
    assert all(p.is_meta for p in meta.parameters())
    return loaded, own


def _meta(name: str) -> nn.Module:
    from autopar.models.hf import HFSpec

    spec = HFSpec.from_dict(name, HF[name]) if name in HF else parse_model(name)
    return spec.build("meta", torch.float64)


@pytest.mark.parametrize("name", slow_but(["gpt-tiny"], ["llama-tiny", "gpt-tiny", "hf-llama"]))
def test_meta_models_from_weights_and_from_their_initializers(pool4, name, tmp_path):
    from safetensors.torch import save_file

    found = case(name)
    seen: set[int] = set()
    tensors = {
        k: v
        for k, v in found.model.state_dict().items()
        if not (v.data_ptr() in seen or seen.add(v.data_ptr()))
    }
    save_file(tensors, path := str(tmp_path / "model.safetensors"))
    alone = Engine(
        _meta(name), found.traced, plan_for(name, ONE), sgd, None, None, "cpu", seed=5
    ).full_state_dict()
    assert all(torch.isfinite(v).all() for v in alone.values())
    for mesh in (TP4, TP2DP2) if name == "gpt-tiny" else (TP4,):
        for loaded, own in pool4.run(meta_engines, name, plan_for(name, mesh).to_json(), path):
            assert all(torch.equal(loaded[k], v) for k, v in found.model.state_dict().items())
            assert set(own) == set(alone) and all(torch.equal(own[k], v) for k, v in alone.items())


def test_parallelize_does_not_change_the_model():
    import autopar

    model = copy.deepcopy(case("gpt-tiny").model)
    before, ids = (
        {k: v.clone() for k, v in model.state_dict().items()},
        [id(p) for p in model.parameters()],
    )
    batch = case("gpt-tiny").batches[0]
    engine = autopar.parallelize(
        model, "cpu:1", example_inputs=batch, optimizer=sgd, precision="fp64"
    )
    first = float(engine.step(batch))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()) and ids == [
        id(p) for p in model.parameters()
    ]
    assert all(p.grad is None for p in model.parameters())
    assert first == pytest.approx(float(loss_of(model(**batch))), abs=1e-12)
    assert float(engine.step(batch)) < first


def test_one_process_without_a_process_group():
    assert not dist.is_initialized()
    for name in ("llama-tiny", "hf-gpt2"):
        for number, recompute in ((1, "none"), (2, "full")):
            losses, state = run_steps(
                engine_for(name, plan_for(name, ONE, number, recompute)), case(name).batches
            )
            exact(reference(name), losses, state)


# ------------------------------------------------------------------------------------------------- models that differ from transformers


class Base(nn.Module):
    """A small stack over x (b, 6, 10) with a target; subclasses change one thing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(10, 12)
        self.outer = nn.Linear(12, 10)

    def body(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x)))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss(self.body(x), target)

    def loss(self, y: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(y, target)


class SumLoss(Base):
    def loss(self, y, target):
        return F.mse_loss(y, target, reduction="sum") * 0.01


class PlainMean(Base):
    def loss(self, y, target):
        return ((y - target) ** 2).mean()


class MaskedMean(Base):
    """Over what a mask leaves, of which each rank and micro-batch has another number."""

    def loss(self, y, target):
        mask = (target > 0.7).double()
        return ((y - target) ** 2 * mask).sum() / mask.sum().clamp(min=1) + y.pow(2).mean()


class BatchArithmetic(Base):
    def loss(self, y, target):
        return ((y - target) ** 2).sum() / y.shape[0]


class BatchReciprocal(Base):
    def loss(self, y, target):
        return ((y - target) ** 2).sum() * (1.0 / y.shape[0])


class MeanOfRows(Base):
    def loss(self, y, target):
        return (y - target).abs().mean(dim=(1, 2)).mean()


class FlippedBatch(Base):
    """flip has no rule: the batch is gathered."""

    def body(self, x):
        return super().body(torch.flip(torch.tanh(self.inner(x) @ self.inner.weight), (0,)))


class SortedBatch(Base):
    def body(self, x):
        return super().body(x).sort(dim=0).values


class Regularized(Base):
    def loss(self, y, target):
        return (
            super().loss(y, target)
            + 0.1 * self.inner.weight.pow(2).sum()
            + 0.1 * self.outer.bias.norm()
        )


class Tied(Base):
    def __init__(self):
        super().__init__()
        self.again = nn.Linear(10, 12)
        self.again.weight = self.inner.weight

    def body(self, x):
        return super().body(x) + F.linear(torch.sigmoid(self.again(x)), self.again.weight.t())


class Unused(Base):
    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(3, 3)
        self.inner.weight.requires_grad_(False)  # and a frozen one
        self.register_buffer("scale", torch.linspace(0.5, 2.0, 10))
        self.register_buffer("shift", torch.linspace(-1.0, 1.0, 10), persistent=False)

    def body(self, x):
        return super().body(x * self.scale + self.shift)


class Padded(Base):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 10, padding_idx=2)

    def body(self, x):
        return super().body(x + self.embed(x.detach().abs().mul(3).long().clamp(max=8)[..., 0]))


class Squeezed(Base):
    """squeeze of a dim that only a shard makes 1, flattening with a batch of several dims, and splits."""

    def body(self, x):
        a, b, c = torch.split(self.inner(x), [4, 4, 4], dim=-1)
        wide = (
            torch.stack([a, b, c], dim=2)
            .squeeze(2)
            .flatten(0, 1)
            .transpose(1, 2)
            .reshape(x.shape[0], x.shape[1], 12)
        )
        return self.outer(F.gelu(wide))


class Repeated(Base):
    """One layer several times: a parameter in several segments of one class."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(10, 10), nn.Tanh())] * 1
            + [nn.Sequential(nn.Linear(10, 10), nn.Tanh())]
        )
        self.layers[1][0].weight = self.layers[0][0].weight

    def body(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return super().body(x)


class Flattened(Base):
    """Blocks over (b * s, h): the batch is never a dim of its own inside a block, whose reshapes need its size."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Base() for _ in range(2))

    def body(self, x):
        x = x.flatten(0, 1)
        for layer in self.layers:
            wide = (
                layer.inner(x)
                .reshape(x.shape[0] // 6, 6, 3, 4)
                .transpose(1, 2)
                .reshape(x.shape[0], 12)
            )
            x = x + layer.outer(torch.tanh(wide))
        return super().body(x.view(-1, 6, 10))


class Attention(Base):
    """A learned causal mask, cumulative sums, var, max and where."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1, 6, 6))

    def body(self, x):
        q = self.inner(x).unflatten(-1, (3, 4)).transpose(1, 2)
        scores = q @ q.transpose(-1, -2) / 2 + self.bias
        scores = scores.masked_fill(
            torch.ones(6, 6, dtype=torch.bool, device=x.device).triu(1), float("-inf")
        )
        y = (scores.softmax(-1) @ q).transpose(1, 2).flatten(2)
        y = (y - y.mean(-1, keepdim=True)) / (y.var(-1, keepdim=True) + 1e-3).sqrt()
        return self.outer(torch.where(y > 0, y, torch.maximum(y * 0.1, y.cumsum(1) * 0.01)))


CLASSES = {
    c.__name__: c
    for c in (
        Base,
        SumLoss,
        PlainMean,
        MaskedMean,
        BatchArithmetic,
        MeanOfRows,
        FlippedBatch,
        SortedBatch,
        Regularized,
        Tied,
        Unused,
        Padded,
        Squeezed,
        Repeated,
        Flattened,
        Attention,
    )
}
NEVER_CUT = (
    "FlippedBatch",
    "SortedBatch",
)  # not linear in the batch: micro-batches are another function


def vectors(rows: int = 8) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            k: torch.randn(rows, 6, 10, generator=generator, dtype=torch.float64)
            for k in ("x", "target")
        }
        for _ in range(3)
    ]


def small(name: str) -> nn.Module:
    torch.manual_seed(2)
    return CLASSES[name]().double()


@cache
def traced_small(name: str):
    traced = trace(small(name), vectors()[0])
    return traced, Annotator(traced)


def train_small(rank: int, names: tuple[str, ...], texts: list[str]) -> list:
    found = []
    for name, text in zip(names, texts, strict=True):
        traced, _ = traced_small(name)
        found.append(
            run_steps(
                Engine(small(name), traced, Plan.from_json(text), sgd, None, None, "cpu"), vectors()
            )
        )
    return found


def check_small(pool, name: str, plans: list[Plan]) -> None:
    result = train(small(name), vectors())
    for by_rank in zip(
        *pool.run(train_small, (name,) * len(plans), [p.to_json() for p in plans], timeout_s=300),
        strict=True,
    ):
        for losses, state in by_rank:
            exact(result, losses, state)
            assert set(state) == set(small(name).state_dict())


@pytest.mark.parametrize("name", slow_but(["MaskedMean", "Tied"], CLASSES))
def test_small_models(pool4, name):
    traced, annotator = traced_small(name)
    cut = 1 if name in NEVER_CUT else 2
    plans = [
        solved_plan(traced, annotator, setting(mesh, k))
        for mesh, k in ((TP2DP2, cut), (TP4, 1), (DP4, cut))
    ]
    plans += [random_plan(traced, annotator, setting(mesh), seed=0) for mesh in (TP2DP2, TP4)]
    plans = tried([plans[0], plans[-2]], plans)
    check_small(pool4, name, plans)


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_small_models_under_many_plans(pool4, name):
    traced, annotator = traced_small(name)
    check_small(
        pool4,
        name,
        [
            random_plan(traced, annotator, setting(mesh), seed)
            for mesh in (TP2DP2, TP4, DP4)
            for seed in range(10)
        ],
    )


class Logits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(F.silu(self.embed(input_ids)))


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def logits_model() -> nn.Module:
    torch.manual_seed(4)
    return Logits().double()


def train_logits(rank: int, texts: list[str]) -> list:
    traced = trace(logits_model(), token_batches(11)[0], token_loss)
    return [
        run_steps(
            Engine(logits_model(), traced, Plan.from_json(t), sgd, None, None, "cpu"),
            token_batches(11),
        )
        for t in texts
    ]


def test_loss_fn_on_a_logits_model(pool4):
    batches = token_batches(11)
    result = train(
        logits_model(),
        batches,
        call=lambda model, batch: token_loss(model(batch["input_ids"]), batch["labels"]),
    )
    traced = trace(logits_model(), batches[0], token_loss)
    annotator = Annotator(traced)
    plans = [
        solved_plan(traced, annotator, setting(mesh, cut))
        for mesh in (TP2DP2, TP4, DP4)
        for cut in tried((2,), (1, 2))
    ]
    for by_rank in zip(*pool4.run(train_logits, [p.to_json() for p in plans]), strict=True):
        for losses, state in by_rank:
            exact(result, losses, state)


# -------------------------------------------------------------------------------------------------------------------------- dropout


class Dropped(Base):
    def body(self, x):
        x = F.dropout(x, 0.4, self.training)
        q = self.inner(F.dropout(x, 0.3, self.training)).unflatten(-1, (3, 4)).transpose(1, 2)
        q = F.scaled_dot_product_attention(q, q, q, dropout_p=0.2)
        return F.dropout(
            self.outer(F.dropout(torch.tanh(q.transpose(1, 2).flatten(2)), 0.5, self.training)),
            0.1,
            self.training,
        )


def dropped() -> nn.Module:
    torch.manual_seed(2)
    return Dropped().double()


@cache
def traced_dropped():
    return trace(dropped(), vectors()[0])


def train_dropped(rank: int, texts: list[str]) -> list:
    found = []
    for text in texts:
        torch.manual_seed(1000 + rank)  # users' processes need not share a seed
        engine = Engine(dropped(), traced_dropped(), Plan.from_json(text), sgd, None, None, "cpu")
        batches = [engine.local_batch(b) for b in vectors()]
        state = torch.get_rng_state()
        losses = [float(engine.step(b)) for b in batches]
        assert torch.equal(state, torch.get_rng_state()), (
            "a step must leave the user's generator alone"
        )
        replicated = {
            k: v.clone()
            for k, v in engine._leaves.items()
            if not any(x.is_shard for x in engine._layouts.get(k, {}).values())
        }
        found.append(
            (
                losses,
                replicated,
                [float(engine.eval_step(b)) for b in batches],
                engine.full_state_dict(),
            )
        )
    return found


def test_dropout_keeps_replicated_values_equal(pool4):
    traced = traced_dropped()
    annotator = Annotator(traced)
    plans = [solved_plan(traced, annotator, setting(mesh)) for mesh in (TP2DP2, TP4, DP4)]
    plans += [
        random_plan(traced, annotator, setting(mesh), seed)
        for mesh in (TP2DP2, TP4)
        for seed in range(tried(1, 2))
    ]
    for by_rank in zip(*pool4.run(train_dropped, [p.to_json() for p in plans]), strict=True):
        losses, replicated, evaluated, state = by_rank[0]
        for other in by_rank[1:]:
            assert other[0] == pytest.approx(losses, rel=1e-12)
            for name, value in replicated.items():
                torch.testing.assert_close(other[1][name], value, rtol=1e-12, atol=1e-12)
            assert other[2] == pytest.approx(evaluated, rel=1e-12)
        model = dropped().eval()
        model.load_state_dict(state)
        assert evaluated == pytest.approx(
            [float(_without_dropout(model, b)) for b in vectors()], rel=1e-9
        )


def _without_dropout(model: nn.Module, batch: dict) -> Tensor:
    q = model.inner(batch["x"]).unflatten(-1, (3, 4)).transpose(1, 2)
    q = F.scaled_dot_product_attention(q, q, q)
    return F.mse_loss(model.outer(torch.tanh(q.transpose(1, 2).flatten(2))), batch["target"])
