"""Random losses under micro-batches: each is exact, or its batch is not split (`support/loss_generator.py` writes them)."""

from __future__ import annotations

import warnings

import loss_splitting
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.loss_check import check, naive_is_wrong
from support.loss_generator import MOVE, generate

IN_CI, MANY = 40, 2000


@pytest.mark.filterwarnings("ignore")
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
    assert all(torch.equal(one[name], other[name]) for one, other in zip(first.batches, again.batches, strict=True) for name in one)
    assert len({generate(seed).source for seed in range(60)}) == 60


def test_what_is_called_a_sum_over_rows_is_one():
    """Off the diagonal of rows, second derivatives by what the first layer makes are zero where no row reads another one's outputs."""
    found = {"rows": 0, "parameters": 0}
    with warnings.catch_warnings(action="ignore"):
        for seed in range(150):
            loss = generate(seed)
            if loss.coupling == "rows":
                assert coupled_by_outputs(loss) < 1e-12, f"seed {seed}\n{loss.source}"
            found[loss.coupling] = found.get(loss.coupling, 0) + (loss.coupling == "rows" or coupled_by_outputs(loss) > 1e-12)
    assert found["rows"] > 100 and found["parameters"] > 10, found


def coupled_by_outputs(loss) -> float:
    """The largest second derivative of the loss by values of different rows, relative to the gradient."""
    layer = next(module for name, module in loss.model.named_modules() if name in ("embed", "inner"))
    shift = None

    def add(module, inputs, output):
        nonlocal shift
        shift = torch.full_like(output, 0.01).requires_grad_() if shift is None else shift
        return output + shift

    hook = layer.register_forward_hook(add)
    try:
        gradient = torch.autograd.grad(loss.model(**loss.batches[0]), shift, create_graph=True)[0]
    finally:
        hook.remove()
    if not gradient.requires_grad:
        return 0.0
    direction = torch.linspace(0.5, 1.5, gradient[0].numel(), dtype=torch.float64).view_as(gradient[0])
    second = torch.autograd.grad((gradient[0] * direction).sum(), shift, allow_unused=True)[0]
    return 0.0 if second is None else float(second[1:].abs().max() / gradient.abs().max())


def test_the_check_has_teeth():
    """Most losses would come out wrong if their micro-batches were added up or averaged."""
    with warnings.catch_warnings(action="ignore"):
        wrong = sum(naive_is_wrong(generate(seed)) for seed in range(100))
    assert wrong > 60


def test_steps_move_the_weights():
    loss = generate(11)
    parameters = [p for p in loss.model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss.model(**loss.batches[0]), parameters)
    norms = [torch.cat([part.detach().flatten() for part in parts]).norm() for parts in (parameters, gradients)]
    assert loss.learning_rate * norms[1] / norms[0] == pytest.approx(MOVE)


def test_the_command_counts_and_tells(monkeypatch, capsys):
    kinds = iter(["exact", "one micro-batch", "wrong", "crash"])
    outcomes = {seed: loss_splitting.Outcome(kind, "why", 3.0, True) for seed, kind in enumerate(kinds)}
    monkeypatch.setattr(loss_splitting, "result", lambda seed: loss_splitting.Result(seed, "rows", ("tag",), outcomes[seed]))
    assert loss_splitting.main(["--losses", "2"]) == 0
    assert "50.0 % (1 of 2) recognised" in capsys.readouterr().out
    assert loss_splitting.main(["--losses", "3"]) == 1
    out = capsys.readouterr().out
    assert "wrong: 1" in out and "seed 2" in out and generate(2).source in out
