"""Writes past gradients: through `.data` and `.detach()`, in place, and by hooks. They are exact or refused by line."""

from __future__ import annotations

import copy

import pytest
import torch
from support.exactness import moved, run_steps, sgd, train_in_place, update_error
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import autopar
from autopar.api import trace
from autopar.errors import AutoparError

ROWS, WIDTH = 8, 4


class Model(nn.Module):
    """`step` gets the outputs and the model, and returns what the loss is made of."""

    def __init__(self, step) -> None:
        super().__init__()
        self.linear, self.step = nn.Linear(WIDTH, WIDTH), step
        self.register_buffer("center", torch.ones(WIDTH))
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.linear(x) * self.scale
        return (self.step(self, h) - y).square().mean()


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = lambda: torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator)  # noqa: E731
    return [{"x": made(), "y": made()} for _ in range(3)]


def of_data(m, h):
    m.center.data.mul_(0.5).add_(h.mean(0)).clamp_(-1, 1)
    return h - m.center


def of_a_part(m, h):
    m.center.data.view(2, 2)[0].copy_(h.mean(0)[:2])
    m.center.detach()[2:] = h.mean(0)[2:]
    return h * m.center


def of_lists(m, h):
    torch._foreach_add_([m.center.data, m.frozen.detach()], [h.mean(0), h[0]])
    return h - m.center * m.frozen


def from_alias_to_alias(m, h):
    kept = m.center.data
    kept.copy_(h.mean(0))
    m.frozen.data.copy_(kept)
    return h - m.center * m.frozen


def of_a_new_tensor(m, h):
    made = torch.zeros_like(m.center)
    made.detach().add_(h.mean(0))
    return h * (made + 1)


def in_place(m, h):
    target, other = h * 2, h * 3
    early = target + 1
    target.detach_()
    torch.detach_(other)
    assert not target.requires_grad
    return h + early - target * other


def assigned_and_detached(m, h):
    m.center = m.center * 0.9 + h.mean(0)
    m.center.detach_()
    return h - m.center


def frozen_for_a_while(m, h):
    m.scale.detach_()
    made = h * m.scale
    m.scale.requires_grad_(True)
    return made


EXACT = (
    of_data, of_a_part, of_lists, from_alias_to_alias, of_a_new_tensor, in_place, assigned_and_detached, frozen_for_a_while,
)  # fmt: skip


@pytest.mark.parametrize("step", EXACT, ids=lambda step: step.__name__)
def test_training_is_that_of_eager_pytorch(step):
    torch.manual_seed(0)
    model = Model(step).double()
    result = train_in_place(copy.deepcopy(model), batches())
    assert moved(result) > 1e-3
    engine = autopar.parallelize(
        model, "cpu:1", batches()[0], optimizer=sgd, pin={"micro_batch": ROWS}, precision="fp64"
    )
    losses, state = run_steps(engine, batches())
    assert losses == pytest.approx(result.losses, rel=1e-12)
    assert update_error(result, state) <= 1


def reads_the_alias(m, h):
    kept = m.center.data
    kept.copy_(h.mean(0))
    return h - kept


def reads_a_view_of_before(m, h):
    kept = m.center.detach()
    part = kept[:2]
    kept.copy_(h.mean(0))
    return h - part.sum()


def into_two_at_once(m, h):
    torch._foreach_add_([m.center.data, torch.zeros_like(h)], [h.mean(0), h])
    return h


def past_a_gradient(m, h):
    made = h * 2
    made.detach().copy_(h.sin())
    return made


def after_detach(m, h):
    made = h * 2
    made.detach_()
    made[:2].copy_(h[:2].sin())
    return made + h


def after_a_read(m, h):
    kept = m.center.data
    made = h * m.center
    kept.copy_(made.detach().mean(0))
    return made


def of_the_tensor_after_a_read_of_data(m, h):
    made = h * m.center.data
    with torch.no_grad():
        m.center[:2] = made.mean(0)[:2]
    return made


def of_a_new_tensor_that_was_read(m, h):
    other = m.center * 2
    made = h * other.data
    other.mul_(3)
    return made + other


def forever(m, h):
    m.scale.detach_()
    return h * m.scale


def squeezed(m, h):
    with saved_tensors_hooks(lambda t: t.round(), lambda t: t):
        return torch.tanh(h)


def of_a_node(m, h):
    h.grad_fn.register_prehook(lambda grads: (grads[0] * 2,))
    return h


def of_the_next_node(m, h):
    h.grad_fn.next_functions[0][0].register_hook(lambda inputs, outputs: None)
    return h


def own_backward(m, h):
    h.sum().backward(retain_graph=True)
    return h


def own_backward_of_many(m, h):
    torch.autograd.backward([h.sum()], retain_graph=True)
    return h


REFUSED = {
    reads_the_alias: "forward reads a detached tensor .*write values without one",
    reads_a_view_of_before: "forward reads a detached tensor",
    into_two_at_once: "write them one by one",
    past_a_gradient: r"through \.detach\(\) .*past its gradient",
    after_detach: r"through \.detach_\(\) .*past its gradient",
    after_a_read: "'center' through .data after an op with a gradient has read it",
    of_the_tensor_after_a_read_of_data: "'center' through .data after an op with a gradient has read",
    of_a_new_tensor_that_was_read: r"through \.data .*past its gradient",
    forever: "leaves 'scale' .*frozen",
    squeezed: "forward calls saved_tensors_hooks .*torch.autograd.Function",
    of_a_node: "forward calls grad_fn.register_prehook",
    of_the_next_node: "forward calls grad_fn.register_hook",
    own_backward: "forward runs backward .*return the sum",
    own_backward_of_many: "forward runs backward",
}


@pytest.mark.parametrize("step", REFUSED, ids=lambda step: step.__name__)
def test_what_cannot_be_followed_is_refused_by_line(step):
    with pytest.raises(AutoparError, match=REFUSED[step]) as refused:
        trace(Model(step).double(), batches()[0])
    assert "test_detached_writes.py" in str(refused.value) or "after_a_read" in step.__name__


def test_activations_kept_on_the_host_are_noted():
    def on_host(m, h):
        assert type(h.grad_fn).__name__ == "MulBackward0" and m.center.grad_fn is None
        with save_on_cpu():
            return torch.tanh(h)

    (note,) = trace(Model(on_host).double(), batches()[0]).notes
    assert "save_on_cpu), which has no effect" in note
