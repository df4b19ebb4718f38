"""State that forward reaches by variables, weak references and attributes of tensors; modes of batch norms; complex buffers."""

from __future__ import annotations

import functools
import weakref

import pytest
import torch
import torch.nn.functional as F
from support.eager_runs import paragraph
from support.effort import every, tried
from support.state_runs import PINS, WIDTH, Stateful, batches, eager, engine, error, made
from torch import Tensor, nn

import autopar
from autopar.api import trace
from autopar.errors import AutoparError


def build(change, setup=None) -> nn.Module:
    return made(functools.partial(Stateful, change, setup))


def centred(m, x, y):
    return y - m.center


def moved(center: Tensor, output: Tensor) -> Tensor:
    return center * 0.5 + output.detach().mean(0)


# -------------------------------------------------------------------------------------------------------------- variables


def with_closure(m: nn.Module) -> None:
    def hook(module, inputs, output) -> None:
        m.center = moved(m.center, output)
        m.seen = output  # an attribute that forward does not read

    m.child.register_forward_hook(hook)


def with_weak_reference(m: nn.Module) -> None:
    reference = weakref.ref(m)

    def hook(module, inputs, output) -> None:
        reference().center = moved(reference().center, output)

    m.child.register_forward_hook(hook)


def with_method(m: nn.Module) -> None:
    keep = m.register_buffer

    def hook(module, inputs, output) -> None:
        keep("center", moved(m.center, output))

    m.child.register_forward_hook(hook)


@pytest.mark.parametrize("setup", every(2, [with_closure, with_weak_reference, with_method]))
def test_hooks_that_hold_the_model_change_the_captured_one(setup):
    model = build(centred, setup)
    names = [[*vars(module)] for module in model.modules()]
    before = {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    trace(model, batches()[0])
    assert names == [[*vars(module)] for module in model.modules()]
    assert before == {n: id(tensor) for n, tensor in model.state_dict(keep_vars=True).items()}
    fresh = build(centred, setup)  # a copy's hooks would change the model that it was copied from
    assert error(model, PINS["one device"], 1, eager(fresh)) <= 1


def test_a_loss_that_reads_the_model_by_a_variable_trains_it():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)).double()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) + 0.1 * model[0].weight.square().sum()

    x, y = torch.randn(8, WIDTH).double(), torch.randn(8, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    running = autopar.parallelize(
        model, "cpu:1", (x, y), loss_fn=loss, optimizer=lambda ps: torch.optim.SGD(ps, 0.1)
    )
    running.step((x, y))
    loss(model(x), y).backward()
    optimizer.step()
    for name, value in running.full_state_dict().items():
        assert torch.allclose(value, model.state_dict()[name], rtol=1e-12, atol=1e-14), name


HELD: list[nn.Module] = []


def test_a_change_of_the_model_by_another_object_is_refused_and_undone():
    def change(m, x, y):
        HELD[0].center = moved(HELD[0].center, y)
        return y

    model = build(change)
    HELD[:] = [model]
    before = id(model.center)
    with pytest.raises(
        AutoparError, match="changes 'center' of the model through an object outside"
    ):
        trace(model, batches()[0])
    assert id(model.center) == before
    HELD.clear()


# -------------------------------------------------------------------------------------------------- attributes of tensors


def test_attributes_of_tensors_are_read():
    def setup(m: nn.Module) -> None:
        m.child.weight.scale = 0.5

    def change(m, x, y):
        return y * m.child.weight.scale

    expected = eager(build(change, setup))  # a copy of a parameter has no such attributes
    assert error(build(change, setup), PINS["one device"], 1, expected) <= 1


def test_attributes_of_tensors_that_forward_sets_are_refused():
    def change(m, x, y):
        y = y - getattr(m.child.weight, "average", 0.0)
        m.child.weight.average = x.mean(0)
        return y

    with pytest.raises(AutoparError, match=r"'average' of the tensor 'child.weight'.*buffer") as e:
        trace(build(change), batches()[0])
    paragraph(e.value)


def test_a_tensor_that_one_call_leaves_to_the_next_is_refused_as_that():
    def change(m, x, y):
        y = y if m.last is None else y + 0.1 * m.last
        m.last = y.detach()
        return y

    model = build(change, lambda m: setattr(m, "last", None))
    with pytest.raises(AutoparError, match=r"changes 'last'.*the tensor that this one left") as e:
        trace(model, batches()[0])
    paragraph(e.value)


# ------------------------------------------------------------------------------------------------- batch norms, complex


def with_norm(m: nn.Module) -> None:
    m.norm, m.second = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)


def test_a_norm_in_evaluation_and_then_in_training_is_refused():
    def change(m, x, y):
        m.norm.eval()
        y = m.norm(y)
        m.norm.train()
        return m.norm(y)

    with pytest.raises(AutoparError, match=r"'norm.running_mean' in training after") as e:
        trace(build(change, with_norm), batches()[0])
    paragraph(e.value)


def test_the_advice_about_norms_is_exact():
    def copies(m, x, y):
        mean, var = m.norm.running_mean.clone(), m.norm.running_var.clone()
        return m.norm(F.batch_norm(y, mean, var, m.norm.weight, m.norm.bias))

    def two(m, x, y):
        m.second.eval()
        return m.norm(m.second(y))

    def training_first(m, x, y):
        y = m.norm(y)
        m.norm.eval()
        y = m.norm(y)
        m.norm.train()
        return y

    for change in tried((training_first,), (copies, two, training_first)):
        assert error(build(change, with_norm), PINS["one device"], 1) <= 1


def test_a_complex_buffer_is_refused_and_its_parts_are_exact():
    def change(m, x, y):
        y = y - m.wave.real
        m.wave = torch.complex(x.mean(0), x.std(0))
        return y

    def advised(m, x, y):
        y = y - torch.view_as_complex(m.wave).real
        m.wave = torch.view_as_real(torch.complex(x.mean(0), x.std(0)))
        return y

    def with_wave(m: nn.Module) -> None:
        m.register_buffer("wave", torch.zeros(WIDTH, dtype=torch.complex128))

    def with_parts(m: nn.Module) -> None:
        m.register_buffer("wave", torch.zeros(WIDTH, 2, dtype=torch.float64))

    with pytest.raises(AutoparError, match=r"'wave', which is complex.*view_as_real"):
        trace(build(change, with_wave), batches()[0])
    assert error(build(advised, with_parts), PINS["one device"], 1) <= 1


def test_a_parameter_that_the_first_call_alone_sets():
    def change(m, x, y):
        if not m.ready:
            m.head.bias.data.copy_(y.detach().mean(0)[:3])
            m.ready = True
        return y

    model = build(change, lambda m: setattr(m, "ready", False))
    with pytest.raises(
        AutoparError, match=r"'head.bias' in place \(test_state_past_self.*call the"
    ) as e:
        trace(model, batches()[0])
    paragraph(e.value)
    with torch.no_grad():
        model(**batches()[0])
    assert error(model, PINS["one device"], 1) <= 1
    assert engine(model, {}, 1)
