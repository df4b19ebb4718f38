"""Buffers that forward reads as Python numbers: flags that decide between two paths, and steps."""

from __future__ import annotations

import functools

import pytest
import torch
from support.eager_runs import paragraph
from support.state_runs import PINS, WIDTH, Stateful, batches, engine, error, made
from torch import nn

from autopar.api import trace
from autopar.errors import AutoparError
from autopar.planning.notes import notes


def with_flag(value) -> functools.partial:
    """A setup: a buffer `ready`, and a parameter `scale` that the first batch sets."""

    def setup(m: nn.Module) -> None:
        m.register_buffer("ready", torch.tensor(value))
        m.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    return setup


def initialize(m, y) -> None:
    with torch.no_grad():
        m.scale.copy_(1 / (y.std(0) + 1e-6))
        m.ready.fill_(1)


def by_item(m, x, y):
    if m.ready.item() == 0:
        initialize(m, y)
    return y * m.scale


def by_truth(m, x, y):
    if not m.ready:
        initialize(m, y)
    return y * m.scale


def by_comparison(m, x, y):
    if m.ready == 0:
        initialize(m, y)
    return y * m.scale


def by_all(m, x, y):
    if m.training and not torch.all(m.ready > 0):
        initialize(m, y)
    return y * m.scale


FLAGS = (by_item, by_truth, by_comparison, by_all)


def model(change, value) -> nn.Module:
    return made(functools.partial(Stateful, change, with_flag(value)))


@pytest.mark.parametrize("change", FLAGS, ids=lambda change: change.__name__)
def test_a_flag_that_the_first_batch_sets_is_refused_until_it_is_set(change):
    fresh = model(change, 0)
    with pytest.raises(
        AutoparError, match=r"'ready' as a Python number \(test_known.*no_grad"
    ) as e:
        trace(fresh, batches()[0])
    paragraph(e.value)
    with torch.no_grad():
        fresh(**batches()[0])  # what the text asks for
    assert any("'ready' as a Python number" in note for note in notes(trace(fresh, batches()[0])))


@pytest.mark.parametrize("pin", ["one device", "two micro-batches"])
def test_a_set_flag_trains_as_in_eager_pytorch(pin):
    assert error(model(by_item, 1), PINS[pin], 1) <= 1


def test_lists_of_numbers_are_read():
    def change(m, x, y):
        first, second = m.ready.tolist()
        return y * first + second * m.scale

    assert error(model(change, [2.0, 3.0]), PINS["one device"], 1) <= 1


def test_numbers_that_depend_on_the_batch_or_on_chance_are_not_known():
    def of_the_batch(m, x, y):
        return y * int(m.ready + x.sum())

    def of_chance(m, x, y):
        return y * int(torch.rand_like(m.ready) > 2)

    def of_a_changed_copy(m, x, y):
        count = m.ready.clone()
        count += 1
        return y * int(count)

    for change in (of_the_batch, of_chance, of_a_changed_copy):
        with pytest.raises(AutoparError, match="reads a number out of a tensor"):
            trace(model(change, 1.0), batches()[0])


def test_a_flag_that_was_changed_before_is_not_known():
    def change(m, x, y):
        m.ready.add_(1)
        return y if m.ready > 1 else y * m.scale

    with pytest.raises(AutoparError, match="reads a number out of a tensor"):
        trace(model(change, 1), batches()[0])


def test_the_engine_refuses_another_value():
    running = engine(model(by_item, 1), {}, 1)
    running.set("ready", 1)
    state = running.full_state_dict()
    assert "ready" in state
    running.load_state_dict(state)
    with pytest.raises(AutoparError, match="ready was 1 when the model was captured"):
        running.set("ready", 0)
    with pytest.raises(AutoparError, match=r"ready was 1 .*call parallelize after"):
        running.load_state_dict(state | {"ready": torch.tensor(0)})


def test_a_checkpoint_with_another_value_is_refused(tmp_path):
    def change(m, x, y):
        return y * m.scale if m.ready.item() else y - m.scale

    engine(model(change, 0), {}, 1).save(tmp_path)
    other = engine(model(change, 1), {}, 1)
    with pytest.raises(AutoparError, match="ready was 1 when the model was captured"):
        other.load(tmp_path)
