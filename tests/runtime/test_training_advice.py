"""Refusals at the beginning of training that give advice: one paragraph, and the run as advised is exact."""

from __future__ import annotations

import dataclasses
import functools
import re

import pytest
import torch
import torch.nn.functional as F
from support.eager_runs import ROWS, Behind, batches, paragraph
from support.exactness import moved, run_steps, sgd, train_in_place, update_error
from support.whole_matrix_optimizers import OPTIMIZERS
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError
from autopar.files import read_text, write_text
from autopar.trace.batches import shorter_lengths


class Model(nn.Module):
    """Two layers; `end(y)` is the loss."""

    def __init__(self, end) -> None:
        super().__init__()
        self.inner, self.outer, self.end = nn.Linear(6, 8), nn.Linear(8, 6), end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.outer(self.inner(x).tanh()))


def squares(y):
    return y.square().sum()


def root(y):
    """Of rows that no micro-batch has all of."""
    return y.square().mean().sqrt()


def made(end=squares) -> nn.Module:
    torch.manual_seed(0)
    return Model(end).double()


def engine_of(pin: dict, end=squares, cluster: str = "cpu:2", optimizer=sgd, **more):
    return autopar.parallelize(
        made(end), cluster, batches()[0], optimizer, pin=pin, precision="fp64", **more
    )


def error_of(engine, end=squares) -> float:
    """The update-relative error of three steps, over the tolerance."""
    result = train_in_place(made(end), batches())
    losses, state = run_steps(engine, batches())
    assert moved(result) > 1e-3 and losses == pytest.approx(result.losses, rel=1e-9)
    return update_error(result, state)


def refusal(call, *args, **kwargs) -> str:
    with pytest.raises(AutoparError) as refused:
        call(*args, **kwargs)
    return paragraph(refused.value)


def told(call, *args) -> str:
    """As `refusal`, on a rank; '' if there is none."""
    try:
        call(*args)
    except AutoparError as error:
        return paragraph(error)
    return ""


# ------------------------------------------------------------------------------------------------------------------ optimizers


def adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.01)


@pytest.mark.parametrize(("optimizer", "words"), [
    (torch.optim.SGD(made().parameters(), 0.1), "takes a function .* such as lambda params: torch.optim.AdamW.*this is a SGD"),
    (lambda params: torch.optim.SGD(made().parameters(), 0.1), "build it from the parameters that the function is given"),
    (list, "returned a list, .*lambda parameters: torch.optim.AdamW"),
])  # fmt: skip
def test_factories_as_advised_train_exactly(optimizer, words):
    assert re.search(words, refusal(engine_of, {}, cluster="cpu:1", optimizer=optimizer))
    model = made()
    stepping, before = (
        adamw(model.parameters()),
        {k: v.clone() for k, v in model.state_dict().items()},
    )
    _, state = run_steps(engine_of({}, cluster="cpu:1", optimizer=adamw), batches())
    for batch in batches():
        stepping.zero_grad()
        model(**batch).backward()
        stepping.step()
    for name, value in model.state_dict().items():
        assert (state[name] - value).norm() <= 1e-9 * (value - before[name]).norm(), name


def prodigal_as_told(rank: int) -> tuple[str, float]:
    """The pins of the message, and how far training is from one process, relative to the update."""
    optimizer = OPTIMIZERS["prodigal"]
    pin = {"pp": 2, "dp": 1, "tp": 1, "micro_batch": 4}
    staged = functools.partial(autopar.parallelize, pin=pin, precision="fp64")
    message = told(staged, Behind(made(), 6).double(), "cpu:2", batches()[0], optimizer)
    pins = re.search(r"Pin (pp=1(?:, tp=1, ep=1 and zero=0)?), under which", message)[1]
    engine = engine_of(
        {name: int(value) for name, value in re.findall(r"(\w+)=(\d)", pins)}, optimizer=optimizer
    )
    model = made()
    stepping, before, worst = (
        optimizer(list(model.parameters())),
        {k: v.clone() for k, v in model.state_dict().items()},
        0.0,
    )
    _, state = run_steps(engine, batches())
    for batch in batches():
        stepping.zero_grad()
        model(**batch).backward()
        stepping.step()
    for name, value in model.state_dict().items():
        worst = max(worst, float((state[name] - value).norm() / (value - before[name]).norm()))
    return message, worst


def test_the_pins_for_an_optimizer_of_all_parameters_are_exact(pool2):
    for message, error in pool2.run(prodigal_as_told):
        assert (
            message.startswith("Prodigal updates a parameter by what it knows of others")
            and error <= 1e-9
        )


# --------------------------------------------------------------------------------------------------------------------- batches


def batches_given(rank: int) -> tuple[list[str], list[float]]:
    """What wrong batches are told, and the errors of training as advised."""
    [batch], parts = batches()[:1], engine_of({"dp": 2, "micro_batch": 2})
    found = [told(parts.step, {"x": batch["x"][:0]})]
    alike = engine_of({"tp": 2})
    found.append(told(alike.step, {"x": batch["x"].roll(rank, 0)}))
    return found, [error_of(parts), error_of(alike)]


def test_batches_as_advised_train_exactly(pool2):
    words = [
        "the batch has no rows",
        "given different batches.*use engine.local_batch",
    ]
    for found, errors in pool2.run(batches_given):
        assert all(map(re.search, words, found)), found
        assert max(errors) <= 1, errors


def pinned_as_told(rank: int) -> tuple[str, float]:
    message = told(functools.partial(engine_of, end=root), {"dp": 2, "micro_batch": 2})
    pin = {"dp": 2, "micro_batch": int(re.search(r"Pin micro_batch=(\d+)", message)[1])}
    return message, error_of(engine_of(pin, root), root)


def test_the_pinned_rows_of_a_rank_are_exact(pool2):
    for message, error in pool2.run(pinned_as_told):
        assert (
            "autopar does not split" in message
            and "test_training_advice.py:" in message
            and error <= 1
        )


class Tokens(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, 6), nn.Linear(6, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.embed(tokens)).flatten(0, 1), tokens.flatten())


def test_a_model_as_large_as_its_values_need_trains_exactly():
    """Or a batch that is corrected."""
    good, bad = ({"tokens": torch.arange(24).reshape(4, 6) % size} for size in (11, 12))
    for size, batch in ((11, good), (12, bad)):
        torch.manual_seed(0)
        model = Tokens(size).double()
        engine = autopar.parallelize(model, "cpu:1", good, sgd, precision="fp64")
        if size == 11:
            message = refusal(engine.step, bad)
            assert (
                "'tokens' holds 11 in row 1 at 5" in message
                and "correct the batch, or make the model as large" in message
            )
        losses, state = run_steps(engine, [batch] * 3)
        result = train_in_place(model, [batch] * 3)
        assert losses == pytest.approx(result.losses, rel=1e-9) and update_error(result, state) <= 1


def test_dense_tensors_and_longer_examples_are_taken():
    x = batches()[0]["x"]
    assert "'x' is a torch.sparse_coo tensor; autopar takes dense ones: pass its dense form" in refusal(
        autopar.plan, made(), "cpu:1", {"x": x.to_sparse()})  # fmt: skip
    assert autopar.plan(made(), "cpu:1", {"x": x.to_sparse().to_dense()}).global_batch == ROWS
    assert "give an example of the longest length" in refusal(
        shorter_lengths, {"x": torch.ones(4, 12).long()}, [9, 13]
    )
    assert shorter_lengths({"x": torch.ones(4, 13).long()}, [9, 13]) == [9]


# ----------------------------------------------------------------------------------------------------------------- plans, files


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_plan_for_gpus_is_made_for_cpus():
    assert "plan for cpu:N to run on CPU processes" in refusal(engine_of, {}, cluster="h100:1")
    assert error_of(engine_of({}, cluster="cpu:1")) <= 1


def test_a_damaged_plan_is_made_again():
    make = functools.partial(autopar.plan, made(), "cpu:1", batches()[0], precision="fp64")
    block = make().blocks[0]
    damaged = dataclasses.replace(
        make(), blocks=(dataclasses.replace(block, ops=dict(list(block.ops.items())[1:])),)
    )
    assert (
        "lacks op" in (message := refusal(engine_of, None, cluster="cpu:1", plan=damaged))
        and "plan again" in message
    ), message
    assert error_of(engine_of(None, cluster="cpu:1", plan=make())) <= 1


def test_the_name_of_a_file_is_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("", "a\0b"):
        assert (
            "the path of the plan" in (message := refusal(write_text, path, "text", "plan"))
            and "give the name of a file" in message
        )
    write_text("plan.json", "text", "plan")
    assert read_text("plan.json", "plan") == "text"
