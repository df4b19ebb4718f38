"""What forward assigns to buffers and parameters: exact, or refused by name with advice that is exact."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from support.captures import captured_once
from support.eager_runs import paragraph
from support.effort import every
from support.state_runs import PINS, WIDTH, Stateful, batches, error, made
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autopar.api import trace
from autopar.errors import AutoparError
from autopar.planning.notes import notes

Model = nn.Module


def pairs(m: Model) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Parameters of the teacher, each with that of the student."""
    return list(zip(m.teacher.parameters(), m.child.parameters(), strict=True))


def moved(m: Model, x: Tensor) -> Tensor:
    return m.center * 0.9 + 0.1 * x.mean(0)


# ------------------------------------------------------------------------------------------------------------------ exact


def assigned_before(m, x, y):
    m.center = moved(m, x)
    return y - m.center


def assigned_after(m, x, y):
    y = y - m.center
    m.center = moved(m, x)
    return y


def detached(m, x, y):
    m.center = (m.center * 0.9 + y.mean(0)).detach()
    return y - m.center


def without_gradient(m, x, y):
    with torch.no_grad():
        m.center = m.center * 0.9 + y.mean(0)
    return y - m.center


def no_gradient_of_a_buffer(m, x, y):
    m.center.grad = None
    return y - m.center


def a_buffer_that_requires_a_gradient(m, x, y):
    m.center.requires_grad_(True)
    return y - m.center


def never_read(m, x, y):
    m.center = m.center * 0.9 + y.mean(0)
    return y


def by_setattr(m, x, y):
    setattr(m, "center", moved(m, x))  # noqa: B010 (on purpose)
    return y - m.center


def by_module_setattr(m, x, y):
    nn.Module.__setattr__(m, "center", moved(m, x))
    return y - m.center


def by_buffers(m, x, y):
    m._buffers["center"] = moved(m, x)
    return y - m.center


def registered_again(m, x, y):
    m.register_buffer("center", moved(m, x))
    return y - m.center


def deleted_and_registered(m, x, y):
    y = y - m.center
    del m.center
    m.register_buffer("center", x.mean(0))
    return y


def of_a_child(m, x, y):
    m.child.kept = m.child.kept * 0.5 + x.mean(0)
    return y * m.child.kept


def of_a_child_registered(m, x, y):
    m.child.register_buffer("kept", m.child.kept * 0.5 + x.mean(0))
    return y * m.child.kept


def by_data(m, x, y):
    m.center.data = moved(m, x)
    return y - m.center


def by_data_in_place(m, x, y):
    m.center.data.mul_(0.9).add_(x.mean(0))
    return y - m.center


def by_set(m, x, y):
    m.center.set_(moved(m, x))
    return y - m.center


def swapped(m, x, y):
    m.center, m.other = m.other, m.center
    return y - m.center


def shifted(m, x, y):
    y = y - m.other
    m.other, m.center = m.center, x.mean(0)
    return y


def turned(m, x, y):
    m.other = m.other.flip(0)
    return y - m.other


def in_training(m, x, y):
    if m.training:
        m.center = moved(m, x)
    return y - m.center


def not_in_training(m, x, y):
    if not m.training:
        m.center = moved(m, x)
    return y - m.center


def queue(m, x, y):
    y = y - m.queue.mean(0)
    m.queue = torch.cat([m.queue[1:], x.mean(0, keepdim=True)])
    return y


def pointer(m, x, y):
    place = m.place
    m.queue[place] = x.mean(0)
    m.place = (place + 1) % 4
    return y - m.queue.mean(0)


def teacher_data(m, x, y):
    for teacher, student in pairs(m):
        teacher.data = teacher.data * 0.9 + student.data * 0.1
    return y + m.teacher(x)


def teacher_data_in_place(m, x, y):
    for teacher, student in pairs(m):
        teacher.data.mul_(0.9).add_(student.data, alpha=0.1)
    return y + m.teacher(x)


def teacher_copied(m, x, y):
    with torch.no_grad():
        for teacher, student in pairs(m):
            teacher.copy_(teacher * 0.9 + student * 0.1)
        return_value = m.teacher(x)
    return y + return_value


def teacher_of_lists(m, x, y):
    with torch.no_grad():
        teachers, students = map(list, zip(*pairs(m), strict=True))
        torch._foreach_mul_(teachers, 0.9)
        torch._foreach_add_(teachers, students, alpha=0.1)
    return y + m.teacher(x)


def teacher_after(m, x, y):
    with torch.no_grad():
        y = y + m.teacher(x)
        for teacher, student in pairs(m):
            teacher.lerp_(student, 0.1)
    return y


def teacher_loaded(m, x, y):
    state = {k: v for k, v in m.child.state_dict().items() if k != "kept"}
    m.teacher.load_state_dict(state)
    return y + m.teacher(x)


def teacher_parameter(m, x, y):
    value = m.teacher.weight * 0.9 + m.child.weight.detach() * 0.1
    m.teacher.weight = nn.Parameter(value, requires_grad=False)
    return y + m.teacher(x)


def teacher_vector(m, x, y):
    utils = nn.utils
    value = utils.parameters_to_vector(m.teacher.parameters()) * 0.9
    value = value + utils.parameters_to_vector(m.child.parameters()).detach() * 0.1
    utils.vector_to_parameters(value, m.teacher.parameters())
    return y + m.teacher(x)


def teacher_normalized(m, x, y):
    m.teacher.weight.data = F.normalize(m.teacher.weight.data + 0.1 * x.mean(0))
    return y + m.teacher(x)


def teacher_that_requires_a_gradient(m, x, y):
    with torch.no_grad():
        for teacher, student in pairs(m):
            teacher.data = teacher.data * 0.9 + student.data * 0.1
        return_value = m.teacher(x)
    return y + return_value


def frozen_for_a_while(m, x, y):
    y = m.child(y)
    m.child.requires_grad_(False)
    y = m.child(torch.tanh(y))
    m.child.requires_grad_(True)
    return y


def spectral(m, x, y):
    return m.spectral(y)


def batch_norm_assigned(m, x, y):
    m.norm.running_mean = m.norm.running_mean * 0.5
    return m.norm(y)


def a_flag(m, x, y):
    y = y * (1 + m.flag.to(y.dtype))
    m.flag = torch.tensor(True)
    return y


def a_buffer_object(m, x, y):
    m.center = nn.Buffer(moved(m, x))
    return y - m.center


def in_a_dictionary(m, x, y):
    m.held["q"] = nn.Parameter(m.held["q"] * 0.5 + x.mean(0), requires_grad=False)
    return y - m.held["q"]


def parametrized(m, x, y):
    m.teacher.weight = m.teacher.weight * 0.9 + m.child.weight.detach() * 0.1
    return y + m.teacher(x)


def codes(m, x, y):
    chosen = torch.cdist(y.detach(), m.codes.weight).argmin(1)
    code = m.codes(chosen)
    hits = F.one_hot(chosen, 4).to(y.dtype)
    m.hits.data.mul_(0.9).add_(hits.sum(0), alpha=0.1)
    m.codes.weight.data.copy_(m.codes.weight * 0.9 + 0.1 * (hits.T @ y.detach()))
    return y + (code - y).detach()


def codes_that_require_a_gradient(m, x, y):
    return codes(m, x, y)


def by_state_dict(m, x, y):
    state = m.teacher.state_dict()
    for name, value in m.child.state_dict().items():
        if name in state:
            state[name].mul_(0.9).add_(value, alpha=0.1)
    return y + m.teacher(x)


def in_a_hook(m, x, y):
    return y - m.child.kept


def old_one_kept(m, x, y):
    old = m.center
    m.center = m.center * 0.5
    m.center.add_(1.0)
    return y - old - m.center


def assigned_twice(m, x, y):
    m.center = m.center * 0.5
    y = y - m.center
    m.center = m.center + x.mean(0)
    return y - m.center


def by_out(m, x, y):
    torch.mul(m.center, 0.9, out=m.center)
    return y - m.center


def in_inference_mode(m, x, y):
    with torch.inference_mode():
        m.center = moved(m, x)
    return y - m.center.clone()


def flagged(m: Model) -> None:
    m.register_buffer("flag", torch.tensor(False))


def with_dictionary(m: Model) -> None:
    ones = torch.ones(WIDTH, dtype=torch.float64)
    m.held = nn.ParameterDict({"q": nn.Parameter(ones, requires_grad=False)})


class Halved(nn.Module):
    """A parametrization that can be assigned."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * 0.5

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight * 2


def with_parametrization(m: Model) -> None:
    nn.utils.parametrize.register_parametrization(m.teacher, "weight", Halved())


def with_trained_codes(m: Model) -> None:
    m.codes = nn.Embedding(4, WIDTH)
    m.register_buffer("hits", torch.ones(4, dtype=torch.float64))


def with_codes(m: Model) -> None:
    with_trained_codes(m)
    m.codes.requires_grad_(False)


def with_hook(m: Model) -> None:
    def hook(module, inputs, output) -> None:
        module.kept = module.kept * 0.5 + output.detach().mean(0)

    m.child.register_forward_hook(hook)


def queued(m: Model) -> None:
    m.register_buffer("queue", torch.ones(4, WIDTH, dtype=torch.float64))
    m.register_buffer("place", torch.zeros(1, dtype=torch.long))


def unfrozen(m: Model) -> None:
    m.teacher.requires_grad_(True)


def with_spectral_norm(m: Model) -> None:
    m.spectral = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))


def with_batch_norm(m: Model) -> None:
    m.norm = nn.BatchNorm1d(WIDTH)


SETUPS = {
    a_flag: flagged,
    in_a_dictionary: with_dictionary,
    parametrized: with_parametrization,
    codes: with_codes,
    codes_that_require_a_gradient: with_trained_codes,
    in_a_hook: with_hook,
    queue: queued,
    pointer: queued,
    teacher_that_requires_a_gradient: unfrozen,
    spectral: with_spectral_norm,
    batch_norm_assigned: with_batch_norm,
}
EXACT = (
    assigned_before, teacher_data, teacher_copied, swapped, queue, assigned_after, detached, without_gradient, never_read, by_setattr,
    by_module_setattr, by_buffers, registered_again, deleted_and_registered, of_a_child, of_a_child_registered, by_data,
    by_data_in_place, by_set, shifted, turned, in_training, not_in_training, pointer, teacher_data_in_place, teacher_of_lists,
    teacher_after, teacher_loaded, teacher_parameter, teacher_vector, teacher_normalized, teacher_that_requires_a_gradient,
    frozen_for_a_while, spectral, batch_norm_assigned, a_flag, a_buffer_object, in_a_dictionary, parametrized, codes,
    codes_that_require_a_gradient, by_state_dict, in_a_hook, old_one_kept, assigned_twice, by_out, in_inference_mode,
    no_gradient_of_a_buffer, a_buffer_that_requires_a_gradient,
)  # fmt: skip
APART = ("swapped", "shifted", "teacher_of_lists", "teacher_vector")
"""Changes that tie several segments together, which a pipeline would separate."""


def build(change) -> nn.Module:
    return made(functools.partial(Stateful, change, SETUPS.get(change)))


@pytest.mark.parametrize("change", every(12, EXACT), ids=lambda change: change.__name__)
def test_it_trains_as_in_eager_pytorch(change):
    for pin in ("one device", "two micro-batches"):
        assert error(build(change), PINS[pin], 1) <= 1, pin


@captured_once()
def errors(rank: int, change, pins: list[str]) -> list[float]:
    return [error(build(change), PINS[pin], 2) for pin in pins]


@pytest.mark.parametrize("change", every(len(EXACT), EXACT), ids=lambda change: change.__name__)
def test_it_trains_so_under_every_axis(pool2, change):
    pins = [pin for pin in PINS if "dp" in PINS[pin]]
    if change.__name__ in APART or SETUPS.get(change) in (with_spectral_norm, with_batch_norm):
        pins.remove("pp=2")
    for found in pool2.run(errors, change, pins):
        assert max(found) <= 1, dict(zip(pins, found, strict=True))


def test_the_notes_name_what_changes_and_the_model_keeps_its_own():
    model = build(teacher_data)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    ids = [id(t) for t in (*model.parameters(), *model.buffers())]
    traced = trace(model, batches()[0])
    assert set(traced.updates) == {"teacher.weight", "teacher.bias"}
    assert any("teacher.weight, teacher.bias: after every micro-batch" in n for n in notes(traced))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert ids == [id(t) for t in (*model.parameters(), *model.buffers())]


# ---------------------------------------------------------------------------------------------------------------- refused


def carried_gradient(m, x, y):
    m.center = m.center * 0.9 + y.mean(0)
    return y - m.center


def carried_gradient_in_place(m, x, y):
    m.center.mul_(0.9).add_(y.mean(0))
    return y - m.center


def longer(m, x, y):
    y = y - m.center.mean()
    m.center = torch.cat([m.center, x.mean(0)])
    return y


def of_the_batch(m, x, y):
    y = y - m.center.mean()
    m.center = x[:, 0].clone()
    return y


def narrower(m, x, y):
    y = y - m.center
    m.center = m.center.float()
    return y


def to_nothing(m, x, y):
    y = y - m.center
    m.center = None
    return y


def deleted(m, x, y):
    y = y - m.center
    del m.center
    return y


def tied_to_another(m, x, y):
    m.other = m.center
    return y - m.other


def tied_by_data(m, x, y):
    m.other.data = m.center.data
    return y - m.other


def part_of_the_batch(m, x, y):
    y = y - m.center
    m.center = x[0]
    return y


def a_constant(m, x, y):
    y = y - m.center
    m.center = m.table
    return y


def held_elsewhere(m, x, y):
    y = y - m.held[0]
    m.center = moved(m, x)
    return y


def one_of_two_names(m, x, y):
    y = y - m.twin
    m.center = moved(m, x)
    return y


def both_names(m, x, y):
    m.center.mul_(0.5)
    return y - m.twin


def another_module(m, x, y):
    m.teacher = nn.Linear(WIDTH, WIDTH)
    return y + m.teacher(x)


def swapped_modules(m, x, y):
    m.child, m.teacher = m.teacher, m.child
    return y + m.teacher(x)


def new_parameter(m, x, y):
    m.scale = nn.Parameter(torch.ones(WIDTH, dtype=x.dtype))
    return y * m.scale


def new_buffer(m, x, y):
    m.register_buffer("late", x.mean(0))
    return y - m.late


def from_none(m, x, y):
    y = y if m.empty is None else y - m.empty
    m.empty = x.mean(0)
    return y


def trained_data(m, x, y):
    m.head.weight.data = F.normalize(m.head.weight.data)
    return y


def trained_parameter(m, x, y):
    m.child.weight = nn.Parameter(m.child.weight * 0.9)
    return y + m.child(x)


def frozen_to_trained(m, x, y):
    m.teacher.weight = nn.Parameter(m.teacher.weight * 0.9)
    return y + m.teacher(x)


def freezes(m, x, y):
    m.child.requires_grad_(False)
    return y + m.child(x)


def unfreezes(m, x, y):
    m.teacher.weight.requires_grad = True
    return y + m.teacher(x)


def read_then_changed(m, x, y):
    y = m.teacher(y)
    m.teacher.weight.data.mul_(0.5)
    return y


def read_then_replaced(m, x, y):
    y = m.teacher(y)
    m.teacher.weight.data = m.teacher.weight * 0.5
    return y


def read_then_a_view_changed(m, x, y):
    y = m.teacher(y)
    m.teacher.weight.data[0].zero_()
    return y


def checkpointed(m, x, y):
    def inner(y: Tensor) -> Tensor:
        m.center = moved(m, x)
        return torch.sin(y * m.center)

    return checkpoint(inner, y, use_reentrant=False)


def checkpointed_in_place(m, x, y):
    def inner(y: Tensor) -> Tensor:
        m.center.mul_(0.5)
        return torch.sin(y)

    return checkpoint(inner, y, use_reentrant=True)


def checkpointed_statistics(m, x, y):
    def inner(y: Tensor) -> Tensor:
        return torch.sin(F.batch_norm(y, m.center, m.other, training=True))

    return checkpoint(inner, y, use_reentrant=False)


def changed_after_a_checkpoint(m, x, y):
    y = checkpoint(lambda y: torch.tanh(y * m.center), y, use_reentrant=False)
    m.center = moved(m, x)
    return y


def shadowed(m, x, y):
    object.__setattr__(m, "center", moved(m, x))
    return y - m.center


def resized(m, x, y):
    m.center.resize_(WIDTH + 1)
    return y


def gradient_read(m, x, y):
    return y * (2 if m.child.weight.grad is not None else 1)


def gradients_dropped(m, x, y):
    m.zero_grad()
    return y


def hook_on_a_parameter(m, x, y):
    m.child.weight.register_post_accumulate_grad_hook(print)
    return y


def hook_on_a_module(m, x, y):
    m.child.register_full_backward_hook(print)
    return y


def deep_copy(m, x, y):
    return y + copy.deepcopy(m.child)(x)


def not_kept(m, x, y):
    y = y - m.center
    m.register_buffer("center", moved(m, x), persistent=False)
    return y


def swapped_by_utils(m, x, y):
    torch.utils.swap_tensors(m.center, m.other)
    return y - m.center


def tabled(m: Model) -> None:
    m.table = torch.ones(WIDTH, dtype=torch.float64)


def held(m: Model) -> None:
    m.held = [m.center]


def twins(m: Model) -> None:
    m.register_buffer("twin", m.center)


def emptied(m: Model) -> None:
    m.register_buffer("empty", None)


SETUPS |= {a_constant: tabled, held_elsewhere: held, one_of_two_names: twins, both_names: twins, from_none: emptied}  # fmt: skip
REFUSED = {
    carried_gradient: "'center'.*detach", carried_gradient_in_place: "'center'.*detach", longer: r"'center'.*\(12\), not \(6\)",
    of_the_batch: r"'center'.*\(batch\), not \(6\)", narrower: "'center'.*float32, not torch.float64", to_nothing: "'center' by nothing",
    deleted: "'center' by nothing", tied_to_another: "'other' by memory of.*clone", tied_by_data: "'other' by memory of.*clone",
    part_of_the_batch: "'center' by memory of an input.*clone", a_constant: "'center' by memory of a tensor from outside.*clone",
    held_elsewhere: "'center' alone.*copy_", one_of_two_names: "'twin' alone.*'center'", both_names: "'twin'.*'center'",
    another_module: "replaces module 'teacher'", swapped_modules: "replaces module '(child|teacher)'",
    new_parameter: "registers parameter 'scale'", new_buffer: "'late'.*register it in __init__",
    from_none: "'empty'", trained_data: r"'head.weight' in place.*clamp", trained_parameter: r"'child.weight' in place.*clamp",
    frozen_to_trained: "'teacher.weight' by a parameter that requires a gradient.*requires_grad=False", freezes: "'child.weight'.*detach",
    unfreezes: r"'teacher.weight'.*test_assigned_state.py:", read_then_changed: "'teacher.weight' through .data.*clone",
    read_then_replaced: "'teacher.weight' through .data", read_then_a_view_changed: "'teacher.weight' through .data",
    checkpointed: "'center' inside of torch.utils.checkpoint", checkpointed_in_place: "'center' inside of torch.utils.checkpoint",
    checkpointed_statistics: "'(center|other)' inside of torch.utils.checkpoint", not_kept: "'center' with another `persistent`",
    changed_after_a_checkpoint: "'center' after torch.utils.checkpoint", shadowed: "'center' by an attribute of Python",
    resized: r"'center' by its resized self", gradient_read: r"gradient of 'child.weight' \(test_assigned", deep_copy: "functional_call",
    gradients_dropped: r"gradient of 'layers.0.0.weight' \(test_assigned",
    hook_on_a_parameter: r"register_post_accumulate_grad_hook \(test_assigned",
    hook_on_a_module: r"register_full_backward_hook \(test_assigned",
    swapped_by_utils: "swap_tensors.*self.a, self.b",
}  # fmt: skip


@pytest.mark.parametrize("change", every(3, REFUSED), ids=lambda change: change.__name__)
def test_what_differs_from_a_change_in_place_is_refused_by_name(change):
    model = build(change)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(AutoparError, match=REFUSED[change]) as refused:
        trace(model, batches()[0])
    paragraph(refused.value)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def behind_data(m, x, y):
    y = y * 1
    y.data.clamp_(-0.1, 0.1)
    return y


def of_new_data(m, x, y):
    y = y * 1
    y.data = y.data.clamp(-0.1, 0.1)
    return y


@pytest.mark.parametrize("change", [behind_data, of_new_data], ids=lambda change: change.__name__)
def test_values_changed_past_autograd_are_refused_by_line(change):
    with pytest.raises(AutoparError, match=r"\.data \(test_assigned_state.py:\d+: .*new tensor"):
        trace(build(change), batches()[0])


# ----------------------------------------------------------------------------------------------------------------- advice


def advised_copy(m, x, y):
    y = y - m.center
    m.center, m.other = x[0].clone(), m.center.clone()
    return y


def advised_part(m, x, y):
    m.center[:3] = x.mean(0)[:3]
    return y - m.center


def advised_copy_in(m, x, y):
    y = y - m.held[0]
    m.center.copy_(moved(m, x))
    return y


def advised_clone_before(m, x, y):
    y = F.linear(y, m.teacher.weight.clone(), m.teacher.bias)
    m.teacher.weight.data.mul_(0.5)
    return y


def advised_straight_through(m, x, y):
    return y + (y.clamp(-0.1, 0.1) - y).detach()


def advised_new_tensor(m, x, y):
    return F.linear(y, F.normalize(m.child.weight), m.child.bias)


def advised_outside_of_checkpoint(m, x, y):
    m.center = moved(m, x)
    return checkpoint(lambda y: torch.sin(y * m.center), y, use_reentrant=False)


def advised_registration(m, x, y):
    m.late = x.mean(0)
    return y - m.late


def advised_detached_weight(m, x, y):
    return y + F.linear(x, m.child.weight.detach(), m.child.bias.detach())


def late(m: Model) -> None:
    m.register_buffer("late", torch.zeros(WIDTH, dtype=torch.float64))


SETUPS |= {advised_copy_in: held, advised_registration: late}
ADVISED = (
    advised_copy, advised_part, advised_copy_in, advised_clone_before, advised_straight_through, advised_new_tensor,
    advised_outside_of_checkpoint, advised_registration, advised_detached_weight,
)  # fmt: skip


@pytest.mark.parametrize("change", every(5, ADVISED), ids=lambda change: change.__name__)
def test_the_advice_is_exact(change):
    assert error(build(change), PINS["two micro-batches"], 1) <= 1


def test_a_batch_norm_inside_of_a_checkpoint_is_noted():
    def change(m, x, y):
        return checkpoint(lambda y: torch.sin(m.norm(y) * 2), y, use_reentrant=False)

    found = notes(trace(made(lambda: Stateful(change, with_batch_norm)), batches()[0]))
    assert any("'norm' inside of torch.utils.checkpoint" in note for note in found)
