"""Batches that are filled up to a longer length, against one device that runs them as they are."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import examples, tried
from support.exactness import (
    ROWS,
    case,
    loss_of,
    run_steps,
    setting,
    sgd,
    solved_plan,
    train,
    update_error,
)
from support.padded_runs import batches_of, padding_engine
from support.staged_runs import pipelined
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.models import parse_model
from autopar.runtime.engine import Engine


def padded_steps(rank: int, name: str, texts: list[str], lengths: tuple[int, ...]):
    found = []
    for text in texts:
        engine = padding_engine(name, Plan.from_json(text))
        found.append((*run_steps(engine, batches_of(name, lengths)), engine.metrics))
    return found


def plans_of(name: str) -> list[Plan]:
    found = case(name)
    cells = (
        (MeshShape(dp=2), 2, 0),
        (MeshShape(dp=2), 1, 3),
        (MeshShape(tp=2), 1, 0),
        (MeshShape(cp=2), 2, 0),
    )
    plans = [
        replace(solved_plan(found.traced, found.annotator, setting(mesh, number)), zero=zero)
        for mesh, number, zero in cells
    ]
    return [*plans, pipelined(name, MeshShape(pp=2), "1f1b", (2, 2), 2)]


def check(pool, lengths: tuple[int, ...], plans: list[Plan]) -> None:
    found = case("llama-tiny")
    expected = train(found.model, batches_of("llama-tiny", lengths))
    for by_rank in pool.run(
        padded_steps, "llama-tiny", [plan.to_json() for plan in plans], lengths, timeout_s=300
    ):
        for plan, (losses, state, metrics) in zip(plans, by_rank, strict=True):
            assert update_error(expected, state) <= 1.0, (str(plan.mesh), plan.zero, lengths)
            assert losses == pytest.approx(expected.losses, abs=1e-9, rel=1e-9)
            assert metrics.tokens == ROWS * lengths[-1]
            assert metrics.targets == int(
                (found.batches[-1]["labels"][:, 1 : lengths[-1]] != -100).sum()
            )


def test_updates_are_those_of_the_batches_as_they_are(pool2):
    check(pool2, (5, 12, 3), plans_of("llama-tiny")[tried(4, 3) :])  # pp=2, and cp=2 with --runslow


@pytest.mark.slow
@settings(max_examples=4)
@given(lengths=st.tuples(*[st.integers(2, 12)] * 3))
def test_updates_under_every_plan(pool2, lengths):
    check(pool2, lengths, plans_of("llama-tiny"))


def uneven_steps(rank: int, text: str):
    """Each data-parallel rank has rows of a length of its own."""
    engine = padding_engine("llama-tiny", Plan.from_json(text))
    batch = engine.local_batch(case("llama-tiny").batches[0])
    loss = float(engine.step({key: value[:, : 6 + 5 * rank] for key, value in batch.items()}))
    return loss, engine.full_state_dict(), engine.metrics.tokens


def test_ranks_with_batches_of_different_lengths(pool2):
    found = case("llama-tiny")
    batch = {key: value.clone() for key, value in found.batches[0].items()}
    batch["labels"][: ROWS // 2, 6:] = batch["labels"][:, 11:] = -100
    expected = train(found.model, [batch])
    for loss, state, tokens in pool2.run(uneven_steps, plans_of("llama-tiny")[0].to_json()):
        assert update_error(expected, state) <= 1.0 and loss == pytest.approx(
            expected.losses[0], rel=1e-9
        )
        assert tokens == ROWS // 2 * (6 + 11)


# --------------------------------------------------------------------------------------------------------------------- one process


@cache
def alone(name: str) -> Engine:
    found = case(name)
    return padding_engine(name, solved_plan(found.traced, found.annotator, setting(MeshShape(), 2)))


@pytest.mark.parametrize(
    "name",
    [
        "llama-tiny",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt-tiny", "hf-gpt2")),
    ],
)
@settings(max_examples=examples(2, 4))
@given(length=st.integers(2, 12), rows=st.sampled_from([4, 8]))
def test_losses_of_any_length(name, length, rows):
    found = case(name)
    batch = {key: value[:rows, :length] for key, value in found.batches[1].items()}
    with torch.no_grad():
        expected = float(loss_of(found.model(**batch)))
    # transformers computes its loss in fp32
    assert float(alone(name).eval_step(batch)) == pytest.approx(
        expected, rel=1e-6 if name.startswith("hf") else 1e-11
    )


class Both(nn.Module):
    """Attention that sees what follows, with or without a mask."""

    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.masked, self.embed, self.head = masked, nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embed(input_ids).unsqueeze(1)
        mask = attention_mask[:, None, None, :].bool() if self.masked else None
        x = F.scaled_dot_product_attention(x, x, x, attn_mask=mask).squeeze(1)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def both(length: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(length)
    ids, labels = (torch.randint(0, 11, (4, length), generator=generator) for _ in range(2))
    return {
        "input_ids": ids,
        "labels": labels,
        "attention_mask": torch.ones(4, length, dtype=torch.long),
    }


def both_engine(masked: bool) -> tuple[nn.Module, Engine]:
    torch.manual_seed(0)
    model = Both(masked).double()
    return model, autopar.parallelize(model, "cpu:1", both(9), sgd, precision="fp64", buckets=[6])


@pytest.mark.parametrize("length", [3, 6, 7])
def test_a_mask_hides_what_is_filled_up(length):
    model, engine = both_engine(True)
    expected = train(model, [both(length)])
    assert float(engine.step(both(length))) == pytest.approx(expected.losses[0], rel=1e-11)
    assert update_error(expected, engine.full_state_dict()) <= 1.0


def test_attention_without_a_mask_is_refused():
    _model, engine = both_engine(False)
    before = engine.full_state_dict()
    for call in (engine.eval_step, engine.step):
        with pytest.raises(
            AutoparError,
            match=r"5 positions was filled up to 6, and its loss depends on .* attention_mask",
        ):
            both_engine(False)[1].step(both(5)) if call is engine.step else call(both(5))
    assert all(torch.equal(value, before[name]) for name, value in engine.full_state_dict().items())
    assert float(engine.step(both(6))) > 0  # a planned length


def test_what_counts_all_positions_is_refused():
    spec = parse_model("moe-tiny")
    engine = autopar.parallelize(
        spec.build("cpu"), "cpu:1", spec.example_inputs(4, 12, "cpu"), sgd, buckets=[12]
    )
    with pytest.raises(AutoparError, match="a router's balance"):
        engine.step(spec.example_inputs(4, 7, "cpu"))
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    batch = (torch.randn(4, 6), torch.randn(4, 6))
    with pytest.raises(AutoparError, match=r"cannot be filled up .* statistics over all positions"):
        autopar.parallelize(model, "cpu:1", batch, sgd, loss_fn=F.mse_loss, buckets=[])
    with pytest.raises(AutoparError, match="no mean over valid targets"):
        autopar.parallelize(model[0], "cpu:1", batch, sgd, loss_fn=F.mse_loss, buckets=[])


@pytest.mark.parametrize("buckets", [[0], [13], ["4"], [True]])
def test_buckets_are_lengths_of_at_most_the_example(buckets):
    spec = parse_model("llama-tiny")
    with pytest.raises(AutoparError, match="is no length of 1 to 12"):
        autopar.parallelize(
            spec.build("cpu"), "cpu:1", spec.example_inputs(4, 12, "cpu"), sgd, buckets=buckets
        )


def test_a_batch_that_is_too_long_says_what_was_planned():
    with pytest.raises(
        AutoparError, match=r"has shape \(8, 13\); the model was planned for \(batch, 12\)"
    ):
        alone("llama-tiny").step(
            {key: torch.zeros(8, 13, dtype=torch.long) for key in ("input_ids", "labels")}
        )
