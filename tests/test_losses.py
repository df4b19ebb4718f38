"""Random losses under micro-batches: each is exact, or its batch is not split."""

from __future__ import annotations

import loss_splitting
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.loss_check import check, naive_is_wrong
from support.loss_generator import MOVE, GeneratedLoss, generate

pytestmark = pytest.mark.filterwarnings("ignore")

IN_CI, MANY = 40, 2000


@settings(max_examples=IN_CI)
@given(seed=st.integers(0, 10**6))
def test_a_loss_is_exact_under_micro_batches_or_not_split(seed):
    loss = generate(seed)
    outcome = check(loss)
    assert outcome.passed, f"{outcome.kind}: {outcome.message} ({outcome.error:g})\n{loss.source}"


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_many_losses(capsys):
    assert loss_splitting.main(["--losses", str(MANY)]) == 0, capsys.readouterr().out


def test_losses_are_the_same_for_a_seed_and_differ_between_seeds():
    first, again = generate(5), generate(5)
    assert first.source == again.source and first.learning_rate == again.learning_rate
    assert all(
        torch.equal(one[name], other[name])
        for one, other in zip(first.batches, again.batches, strict=True)
        for name in one
    )
    assert len({generate(seed).source for seed in range(60)}) == 60


def test_what_is_called_a_sum_over_rows_is_one():
    """If a loss is called a sum over rows, outputs of other rows do not change a row's gradient."""
    independent = coupled = 0
    for seed in range(120):
        loss = generate(seed)
        change = change_by_other_rows(loss)
        if loss.coupling == "rows":
            assert change < 1e-11, f"seed {seed}\n{loss.source}"
            independent += 1
        elif loss.coupling == "parameters":
            coupled += change > 1e-6
    assert independent > 80 and coupled > 10, (independent, coupled)


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


def test_the_check_has_teeth():
    """Most losses would come out wrong if their micro-batches were added up or averaged."""
    wrong = sum(naive_is_wrong(generate(seed)) for seed in range(60))
    assert wrong > 36


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
