"""Random losses under micro-batches: each is exact, or its batch is not split."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support import loss_check
from support.effort import examples
from support.loss_check import Run, check, naive_is_wrong, sgd
from support.loss_generator import MOVE, GeneratedLoss, generate

from autopar.errors import AutoparError
from benchmarks.exactness import loss_splitting

pytestmark = pytest.mark.filterwarnings("ignore")

IN_CI, MANY = examples(5, 10), 2000


@pytest.fixture(scope="module")
def first_losses() -> list[GeneratedLoss]:
    return [generate(seed) for seed in range(80)]


@settings(max_examples=IN_CI, phases=[Phase.generate])  # a smaller seed is no simpler loss
@given(seed=st.integers(0, 10**6))
def test_a_loss_is_exact_under_micro_batches_or_not_split(seed):
    loss = generate(seed)
    outcome = check(loss)
    assert outcome.passed, f"{outcome.kind}: {outcome.message} ({outcome.error:g})\n{loss.source}"


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_many_losses(capsys):
    assert loss_splitting.main(["--losses", str(MANY)]) == 0, capsys.readouterr().out


def test_losses_are_the_same_for_a_seed_and_differ_between_seeds(first_losses):
    first, again = first_losses[5], generate(5)
    assert first.source == again.source and first.learning_rate == again.learning_rate
    assert all(
        torch.equal(one[name], other[name])
        for one, other in zip(first.batches, again.batches, strict=True)
        for name in one
    )
    assert len({loss.source for loss in first_losses}) == len(first_losses)


def test_what_is_called_a_sum_over_rows_is_one(first_losses):
    """If a loss is called a sum over rows, outputs of other rows do not change a row's gradient."""
    independent = coupled = 0
    for loss in first_losses:
        change = change_by_other_rows(loss)
        if loss.coupling == "rows":
            assert change < 1e-11, f"seed {loss.seed}\n{loss.source}"
            independent += 1
        elif loss.coupling == "parameters":
            coupled += change > 1e-6
    assert independent > 50 and coupled > 4, (independent, coupled)


def change_by_other_rows(loss: GeneratedLoss) -> float:
    """The relative change of the first row's gradient when the first layer's outputs of other rows change."""
    layer = next(
        module for name, module in loss.model.named_modules() if name in ("embed", "inner")
    )
    gradients = []
    for shift in (0.01, 0.3):
        shifts = []

        def add(module, inputs, output, shift=shift, shifts=shifts):
            if not shifts:
                shifts.append(torch.full_like(output, shift).requires_grad_())
                shifts[0].data[0] = 0.01
            return output + shifts[0]

        hook = layer.register_forward_hook(add)
        try:
            gradients.append(torch.autograd.grad(loss.model(**loss.batches[0]), shifts[0])[0][0])
        finally:
            hook.remove()
    return float((gradients[0] - gradients[1]).norm() / gradients[0].norm().clamp(min=1e-9))


def test_the_check_has_teeth(first_losses):
    """Most losses would come out wrong if their micro-batches were added up or averaged."""
    wrong = sum(map(naive_is_wrong, first_losses))
    assert wrong > 0.6 * len(first_losses)


def split_naively(loss: GeneratedLoss, pin: dict, ranks: int) -> Run:
    """The mean over micro-batches, in eager mode; whole batches without a pin."""
    model, size = copy.deepcopy(loss.model), pin.get("micro_batch", loss.rows)
    optimizer, losses = sgd(loss, [p for p in model.parameters() if p.requires_grad]), []
    for batch in loss.batches:
        optimizer.zero_grad()
        starts = range(0, loss.rows, size)
        parts = [model(**{name: x[k : k + size] for name, x in batch.items()}) for k in starts]
        mean = torch.stack(parts).mean()
        mean.backward()
        optimizer.step()
        losses.append(float(mean))
    return Run(model.state_dict(), losses, len(parts))


def test_the_check_tells_wrong_from_exact(monkeypatch, first_losses):
    monkeypatch.setattr(loss_check, "trained", split_naively)
    for loss in first_losses[:15]:
        with contextlib.suppress(RuntimeError, IndexError, ValueError):
            split_naively(loss, {"micro_batch": loss.micro_batch}, 1)
            outcome = check(loss)
            assert outcome.kind in (("wrong",) if outcome.naive_wrong else ("exact", "wrong")), (
                outcome
            )


def test_the_check_tells_refusals_from_crashes(monkeypatch):
    loss = generate(0)

    def refuse(loss, pin, ranks, whole=1, error=None):
        if "micro_batch" in pin:
            raise error or AutoparError("no")
        return dataclasses.replace(split_naively(loss, pin, ranks), num_microbatches=whole)

    for kind, options in {
        "one micro-batch": {},
        "wrong": {"whole": 2},
        "crash": {"error": KeyError("x")},
    }.items():
        monkeypatch.setattr(loss_check, "trained", functools.partial(refuse, **options))
        assert check(loss).kind == kind
    monkeypatch.setattr(
        loss_check, "trained", lambda loss, pin, ranks: refuse(loss, {"micro_batch": 1}, 1)
    )
    assert check(loss).kind == "uncaptured"


def test_steps_move_the_weights():
    loss = generate(11)
    parameters = [p for p in loss.model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss.model(**loss.batches[0]), parameters)
    norms = [
        torch.cat([part.detach().flatten() for part in parts]).norm()
        for parts in (parameters, gradients)
    ]
    assert loss.learning_rate * norms[1] / norms[0] == pytest.approx(MOVE)


def test_the_command_counts_and_tells(monkeypatch, capsys):
    kinds = iter(["exact", "one micro-batch", "wrong", "crash"])
    outcomes = {
        seed: loss_splitting.Outcome(kind, "why", 3.0, True) for seed, kind in enumerate(kinds)
    }
    monkeypatch.setattr(
        loss_splitting,
        "result",
        lambda seed: loss_splitting.Result(seed, "rows", ("tag",), outcomes[seed]),
    )
    assert loss_splitting.main(["--losses", "2"]) == 0
    assert "50.0 % (1 of 2) recognised" in capsys.readouterr().out
    assert loss_splitting.main(["--losses", "3"]) == 1
    out = capsys.readouterr().out
    assert "wrong: 1" in out and "seed 2" in out and generate(2).source in out
