"""Modules that hypothesis generates: steps of forward that read and write buffers and parameters, in every way that users write."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from support.exactness import run_steps, setting, solved_plan, update_error
from support.meshes import ONE
from support.state_runs import ROWS, WIDTH, batches, eager, made, sgd
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autopar.annotate.annotator import Annotator
from autopar.api import trace
from autopar.errors import AutoparError
from autopar.runtime.engine import Engine

VECTORS = ("center", "other", "child.kept", "teacher.bias")
MATRICES = ("table", "teacher.weight")
TRAINED = ("head.weight", "child.bias")
TARGETS = (*VECTORS, *MATRICES, *TRAINED)


def _holder(m: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, key = name.rpartition(".")
    return m.get_submodule(path), key


def _get(m: nn.Module, name: str) -> Tensor:
    holder, key = _holder(m, name)
    return getattr(holder, key)


def _like(name: str) -> str:
    """Another tensor of the same shape."""
    return {
        "center": "other", "other": "child.kept", "child.kept": "teacher.bias", "teacher.bias": "child.bias", "table": "teacher.weight",
        "teacher.weight": "child.weight", "head.weight": "second.weight", "child.bias": "center",
    }[name]  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------- values


def _statistic(old: Tensor, batch: Tensor) -> Tensor:
    """The mean of a batch in the shape of `old`."""
    mean = batch.mean(0)
    return mean if old.dim() == 1 else mean.expand(*old.shape[:-1], mean.shape[-1])


VALUES: dict[str, Callable[[nn.Module, str, Tensor, Tensor], Tensor]] = {
    "decayed": lambda m, name, x, y: _get(m, name) * 0.5 + 0.1,
    "mean of inputs": lambda m, name, x, y: _get(m, name) * 0.9 + 0.1 * _statistic(_get(m, name), x),
    "mean of outputs": lambda m, name, x, y: _get(m, name) * 0.9 + 0.1 * _statistic(_get(m, name), y),
    "detached mean": lambda m, name, x, y: (0.1 * _statistic(_get(m, name), y) + _get(m, name)).detach(),
    "moved to another": lambda m, name, x, y: _get(m, name) * 0.9 + 0.1 * _get(m, _like(name)).detach(),
    "another": lambda m, name, x, y: _get(m, _like(name)),
    "a copy of another": lambda m, name, x, y: _get(m, _like(name)).detach().clone(),
    "rolled": lambda m, name, x, y: torch.roll(_get(m, name), 1, 0),
    "itself": lambda m, name, x, y: _get(m, name),
    "zeros": lambda m, name, x, y: torch.zeros_like(_get(m, name)),
    "normalized": lambda m, name, x, y: F.normalize(_get(m, name) + 1.0, dim=0),
    "largest": lambda m, name, x, y: torch.maximum(_get(m, name), _statistic(_get(m, name), x.abs())),
    "a row of the batch": lambda m, name, x, y: x[0].expand_as(_get(m, name)),
    "longer": lambda m, name, x, y: torch.cat([_get(m, name), _get(m, name)]),
    "in fp32": lambda m, name, x, y: _get(m, name).float(),
}  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------- writes


def _by_setattr(m, name, value):
    holder, key = _holder(m, name)
    setattr(
        holder, key, value if key in holder._buffers else nn.Parameter(value, requires_grad=False)
    )


def _as_parameter(m, name, value):
    holder, key = _holder(m, name)
    setattr(holder, key, nn.Parameter(value))


def _by_registry(m, name, value):
    holder, key = _holder(m, name)
    registry = holder._buffers if key in holder._buffers else holder._parameters
    registry[key] = value if key in holder._buffers else nn.Parameter(value, requires_grad=False)


def _by_register(m, name, value):
    holder, key = _holder(m, name)
    if key in holder._buffers:
        holder.register_buffer(key, value)
    else:
        holder.register_parameter(key, nn.Parameter(value, requires_grad=False))


def _by_deletion(m, name, value):
    holder, key = _holder(m, name)
    value = value.clone()
    delattr(holder, key)
    holder.register_buffer(key, value)


def _by_data(m, name, value):
    _get(m, name).data = value


def _copied(m, name, value):
    _get(m, name).copy_(value)


def _copied_to_data(m, name, value):
    _get(m, name).data.copy_(value)


def _added_to_detached(m, name, value):
    _get(m, name).detach().add_(value)


def _part_of_data(m, name, value):
    part = _get(m, name).data[:3]
    part.copy_(value[:3])


def _detached_in_place(m, name, value):
    setattr(*_holder(m, name), value)
    _get(m, name).detach_()


def _copied_without_gradient(m, name, value):
    with torch.no_grad():
        _get(m, name).copy_(value)


def _by_set(m, name, value):
    with torch.no_grad():
        _get(m, name).set_(value.detach())


def _by_lerp(m, name, value):
    with torch.no_grad():
        _get(m, name).lerp_(value, 0.5)


def _of_lists(m, name, value):
    with torch.no_grad():
        torch._foreach_mul_([_get(m, name)], 0.5)
        torch._foreach_add_([_get(m, name)], [value], alpha=0.5)


def _scaled(m, name, value):
    target = _get(m, name).data
    target.mul_(0.5).add_(value, alpha=0.5)


def _augmented(m, name, value):
    with torch.no_grad():
        target = _get(m, name)
        target += value


def _part(m, name, value):
    with torch.no_grad():
        _get(m, name)[:3] = value[:3]


def _loaded(m, name, value):
    holder, key = _holder(m, name)
    holder.load_state_dict({key: value}, strict=False)


def _swapped(m, name, value):
    first, second = _holder(m, name), _holder(m, _like(name))
    one, other = getattr(*first), getattr(*second)
    setattr(*first, other)
    setattr(*second, one)


def _frozen_for_a_while(m, name, value):
    before = _get(m, name).requires_grad
    _get(m, name).requires_grad_(False)
    m.extra = (_get(m, name) * value).sum()
    _get(m, name).requires_grad_(before)


def _unfrozen(m, name, value):
    _get(m, name).requires_grad_(not _get(m, name).requires_grad)


WRITES = {
    function.__name__.strip("_"): function
    for function in (
        _by_setattr, _as_parameter, _by_registry, _by_register, _by_deletion, _by_data, _copied, _copied_to_data,
        _added_to_detached, _part_of_data, _detached_in_place,
        _copied_without_gradient, _by_set, _by_lerp, _of_lists, _scaled, _augmented, _part, _loaded, _swapped, _unfrozen,
    )
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------------------ reads


def _combined(y: Tensor, state: Tensor, how: str) -> Tensor:
    if state.dim() == 2:
        return torch.tanh(y @ state) if state.shape[0] == y.shape[1] else y + state.mean()
    if how == "product":
        return torch.tanh(y * state)
    return y - state


READS: dict[str, Callable[[nn.Module, str, Tensor], Tensor]] = {
    "difference": lambda m, name, y: _combined(y, _get(m, name), "difference"),
    "product": lambda m, name, y: _combined(y, _get(m, name), "product"),
    "detached": lambda m, name, y: _combined(y, _get(m, name).detach(), "product"),
    "copied": lambda m, name, y: _combined(y, _get(m, name).clone(), "product"),
    "detached in place": lambda m, name, y: _combined(y, (_get(m, name) * 2).detach_(), "product"),
    "data": lambda m, name, y: _combined(y, _get(m, name).data, "difference"),
    "module": lambda m, name, y: y + m.teacher(y),
}


@dataclass(frozen=True)
class Step:
    """A read or a write of one tensor. `write` is '' for a read; `read` is '' for a write. `where` says in which context it runs."""

    target: str
    write: str = ""
    value: str = ""
    read: str = ""
    where: str = "plainly"

    def __call__(self, m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if self.where == "in training" and not m.training:
            return y
        if self.where == "in evaluation" and m.training:
            return y
        if self.where == "if a flag is set" and not m.flag:
            return y
        if self.where == "unless a number is set" and int(m.number.sum()) > 1:
            return y
        if self.where == "without gradients":
            with torch.no_grad():
                found = self._run(m, x, y)
            return found if self.write else y + found
        if self.where == "checkpointed":
            return checkpoint(lambda y: self._run(m, x, y), y, use_reentrant=False)
        return self._run(m, x, y)

    def _run(self, m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if self.write:
            WRITES[self.write](m, self.target, VALUES[self.value](m, self.target, x, y))
            return y
        return READS[self.read](m, self.target, y)


class Generated(nn.Module):
    """A model that runs `steps` in its forward, those after `inner` in a child's."""

    def __init__(self, steps: tuple[Step, ...]) -> None:
        super().__init__()
        self.child, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.teacher, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.teacher.requires_grad_(False)
        self.double()
        ramp = torch.linspace(0.1, 1, WIDTH, dtype=torch.float64)
        self.register_buffer("center", ramp)
        self.register_buffer("other", ramp + 1)
        self.register_buffer("table", torch.outer(ramp, 1 - ramp))
        self.child.register_buffer("kept", ramp * 2)
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("number", torch.tensor([1, 0]))
        self.steps = steps

    def forward(self, x: Tensor) -> Tensor:
        y = self.child(x)
        for step in self.steps:
            y = step(self, x, y)
        return (self.head(y) + self.second(y)).square().mean()


_PLACES = st.sampled_from(
    [
        "plainly",
        "plainly",
        "plainly",
        "without gradients",
        "in training",
        "in evaluation",
        "checkpointed",
        "if a flag is set",
        "unless a number is set",
    ]
)
_TARGETS = st.sampled_from([*VECTORS, *VECTORS, *MATRICES, *MATRICES, *TRAINED])
_WRITES = st.builds(Step, target=_TARGETS, write=st.sampled_from([*WRITES]), value=st.sampled_from([*VALUES]), where=_PLACES)  # fmt: skip
_READS = st.builds(Step, target=_TARGETS, read=st.sampled_from([*READS]), where=_PLACES)


@st.composite
def steps(draw) -> tuple[Step, ...]:
    """One to four steps, of which one writes; reads tend to be of what is written."""
    found = draw(st.lists(st.one_of(_WRITES, _READS), max_size=3))
    write = draw(_WRITES)
    place = draw(st.integers(0, len(found)))
    found.insert(place, write)
    if draw(st.booleans()):
        read = replace(draw(_READS), target=write.target)
        found.insert(draw(st.integers(0, len(found))), read)
    return tuple(found)


def outcome(program: tuple[Step, ...], number: int = 1) -> str:
    """'exact', 'refused', or 'fails in eager PyTorch', with `number` micro-batches. AssertionError if it trains otherwise than eager
    PyTorch, or if a refusal names nothing that forward writes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = eager(made(lambda: Generated(program)), 1, number)
        except Exception:
            result = None
        model = made(lambda: Generated(program))
        before = {k: v.clone() for k, v in model.state_dict().items()}
        try:
            traced = trace(model, batches()[0])
            plan = solved_plan(traced, Annotator(traced), setting(ONE, number, "none", ROWS))
            plan = replace(plan, micro_batch_mean=True)
            engine = Engine(copy.deepcopy(model), traced, plan, sgd, None, None, "cpu")
            losses, state = run_steps(engine, batches())
        except AutoparError as refused:
            names = {n.rpartition(".")[2] for s in program for n in (s.target, _like(s.target))}
            message = str(refused)
            assert result is None or any(name in message for name in names) or ".py:" in message, (
                message
            )
            return "refused" if result is not None else "fails in eager PyTorch"
        finally:
            after = model.state_dict()
            assert all(torch.equal(after[k], v) for k, v in before.items()), "the model changed"
    if result is None:
        return "fails in eager PyTorch"
    assert set(state) == set(result.after), (set(state), set(result.after))
    for one, other in zip(losses, result.losses, strict=True):
        assert abs(one - other) <= 1e-9 * max(1.0, abs(other)), (losses, result.losses)
    assert all(
        state[k].shape == v.shape and state[k].dtype == v.dtype for k, v in result.after.items()
    )
    assert update_error(result, state) <= 1
    return "exact"
