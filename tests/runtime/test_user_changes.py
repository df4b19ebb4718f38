"""What users do to parameters, gradients, weights and optimizers between steps: exact against one device, or refused by name."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from support.effort import tried
from support.exactness import Reference, moved, update_error
from support.updated_models import (
    CELLS,
    PAIRS,
    STEPS,
    Updated,
    adamw,
    case,
    eager,
    eager_by_closure,
    engine_of,
    go,
    plan_of,
    sgd,
)
from support.wrapping_optimizers import SAM, Lookahead, clipped_in_hook
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim.optimizer import register_optimizer_step_post_hook

import autopar
from autopar.errors import AutoparError
from autopar.runtime.engine import Engine


@pytest.fixture(autouse=True, scope="module")
def plans() -> None:
    """Made here, so that ranks which are forked from now on have them."""
    for cell in CELLS:
        plan_of(cell)


@dataclass(frozen=True)
class Scenario:
    """What happens before each step: to an engine, and to a model in eager mode. `clip` clips eager gradients."""

    factory: Callable = sgd
    engine: Callable[[int, Engine], Any] = lambda step, engine: None
    eager: Callable[[int, nn.Module, torch.optim.Optimizer], Any] = lambda *_: None
    clip: Callable[[nn.Module], Any] | None = None
    options: Any = None
    closure: bool = False
    named: bool = False


def at(step: int, change: Callable) -> Callable:
    """`change`, before this step alone."""
    return lambda now, *others: change(*others) if now == step else None


@torch.no_grad()
def other_weights() -> dict[str, torch.Tensor]:
    state = case().model.state_dict()
    return {name: torch.cos(value) for name, value in state.items()}


WEIGHTS = torch.tensor([0.5, 1.0, 1.5, 2.5], dtype=torch.float64)


def set_engine(engine: Engine) -> None:
    engine.set("weights", WEIGHTS)
    engine.set("scale", 1.5)
    engine.set("layers.1.up.weight", other_weights()["layers.1.up.weight"])
    engine.set("layers.2.down.bias", 0.25)


@torch.no_grad()
def set_eager(model: Updated, optimizer: Any) -> None:
    model.weights.copy_(WEIGHTS)
    model.scale.fill_(1.5)
    model.layers[1].up.weight.copy_(other_weights()["layers.1.up.weight"])
    model.layers[2].down.bias.fill_(0.25)


def frozen(model: Updated, trains: bool) -> None:
    for module in (model.layers[1], model.head):
        module.requires_grad_(trains)
    model.layers[3].up.bias.requires_grad_(trains)


FROZEN = ("layers.1", "head.*", "layers.3.up.bias")


def scaled(name: str, grad: torch.Tensor) -> torch.Tensor:
    return grad / (0.1 + grad.norm())


def halved(name: str, grad: torch.Tensor) -> None:
    grad.mul_(0.5)


def hooks_engine(engine: Engine) -> None:
    engine.register_gradient_hook("layers.*.up.weight", scaled)
    engine.register_gradient_hook("layers.*.up.*", halved, whole=False)
    engine.register_gradient_hook("head.weight", halved).remove()
    engine.register_gradient_hook("head", halved)


def hooks_eager(model: Updated, optimizer: Any) -> None:
    for layer in model.layers:
        layer.up.weight.register_hook(lambda grad: grad / (0.1 + grad.norm()) * 0.5)
        layer.up.bias.register_hook(lambda grad: grad * 0.5)
    for parameter in model.head.parameters():
        parameter.register_hook(lambda grad: grad * 0.5)


def hooked(params: Any) -> torch.optim.Optimizer:
    params = list(params)
    for parameter in params[:6]:
        parameter.register_hook(lambda grad: grad / (0.1 + grad.norm()))
    params[2].register_hook(lambda grad: grad * 2).remove()
    return sgd(params)


class Quantile:
    """The median of the norms so far, of this step's too."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def __call__(self, norm: float) -> float:
        self.norms.append(norm)
        return sorted(self.norms)[(len(self.norms) - 1) // 2]


def quantile_clip() -> Callable:
    """Clips as `Quantile`, whose steps get smaller here; the first step starts anew."""
    own = Quantile()

    def clip(model: nn.Module) -> None:
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        clip_grad_norm_(model.parameters(), own(float(norm)))

    return clip


def clip_groups(model: Updated) -> None:
    clip_grad_norm_(model.layers.parameters(), 0.2)
    clip_grad_norm_([*model.head.parameters(), *model.begin.parameters()], 0.1)


def clip_each(model: Updated) -> None:
    for parameter in model.parameters():
        clip_grad_norm_([parameter], 0.05)


def by_names(named_parameters: Any) -> torch.optim.Optimizer:
    """A rate for each layer, and no decay of vectors."""
    groups: dict[tuple[str, bool], list] = {}
    for name, parameter in named_parameters:
        layer = name.split(".")[1] if name.startswith("layers") else name.split(".")[0]
        groups.setdefault((layer, name.endswith("bias") or "norm" in name), []).append(
            (name, parameter)
        )
    return torch.optim.AdamW(
        [
            {
                "params": members,
                "lr": 0.02 / (1 + len(layer)),
                "weight_decay": 0.0 if plain else 0.1,
            }
            for (layer, plain), members in groups.items()
        ]
    )


def only_head(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(params)[-2:], 0.05, momentum=0.9)


class AssignsData(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p.data - group["lr"] * p.grad * p.grad.norm()


@cache
def saved_state() -> dict:
    model = copy.deepcopy(case().model)
    optimizer = adamw(model.parameters())
    model(**case().batches[4]).backward()
    optimizer.step()
    return optimizer.state_dict()


def with_state(params: Any) -> torch.optim.Optimizer:
    optimizer = adamw(params)
    optimizer.load_state_dict(copy.deepcopy(saved_state()))
    return optimizer


def clamp(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.data.clamp_(-0.2, 0.2)


SCENARIOS = {
    "set": Scenario(sgd, at(1, set_engine), at(1, set_eager)),
    "load_state_dict": Scenario(
        adamw,
        at(2, lambda engine: engine.load_state_dict(other_weights())),
        at(2, lambda model, _: model.load_state_dict(other_weights())),
    ),
    "freeze": Scenario(
        adamw,
        lambda step, engine: [lambda: None, lambda: engine.freeze(*FROZEN), lambda: engine.unfreeze("*")][step](),
        lambda step, model, _: step and frozen(model, step == 2),
        lambda model: clip_grad_norm_(model.parameters(), 0.3),
        lambda: {"max_grad_norm": 0.3},
    ),
    "gradient hooks": Scenario(sgd, at(0, hooks_engine), at(0, hooks_eager)),
    "hooks of the factory": Scenario(hooked),
    "clip by value": Scenario(
        sgd, clip=lambda model: clip_grad_value_(model.parameters(), 0.01),
        options=lambda: {"clip": autopar.ClipValue(0.01)},
    ),
    "clip by group": Scenario(
        sgd, clip=clip_groups,
        options=lambda: {"clip": [autopar.ClipNorm(0.2, "layers"), autopar.ClipNorm(0.1, ("head", "begin.*"))]},
    ),
    "clip each": Scenario(
        sgd, clip=clip_each, options=lambda: {"clip": autopar.ClipNorm(0.05, each=True)}
    ),
    "clip by the largest": Scenario(
        sgd, clip=lambda model: clip_grad_norm_(model.parameters(), 0.05, norm_type=math.inf),
        options=lambda: {"clip": autopar.ClipNorm(0.05, norm_type=math.inf)},
    ),
    "clip by the sum": Scenario(
        sgd, clip=lambda model: clip_grad_norm_(model.parameters(), 1.0, norm_type=1),
        options=lambda: {"clip": [autopar.ClipNorm(1.0, norm_type=1)]},
    ),
    "clip by a quantile": Scenario(sgd, options=lambda: {"clip": autopar.ClipNorm(Quantile())}),
    "clip_grad_value_ in a hook": Scenario(clipped_in_hook(lambda held: clip_grad_value_(held, 0.01))),
    "groups by name": Scenario(by_names, named=True),
    "a group added": Scenario(
        only_head,
        at(1, lambda engine: engine.add_param_group("begin", "layers.0.*", lr=0.02)),
        at(1, lambda model, optimizer: optimizer.add_param_group(
            {"params": [*model.begin.parameters(), *model.layers[0].parameters()], "lr": 0.02}
        )),
    ),
    "lookahead": Scenario(lambda params: Lookahead(sgd(params))),
    "data assigned": Scenario(AssignsData),
    "state loaded by the factory": Scenario(with_state),
    "masters clamped": Scenario(
        adamw, lambda step, engine: clamp(engine.optimizer), lambda step, model, optimizer: clamp(optimizer)
    ),
}  # fmt: skip
WHOLE = {
    "clip_grad_norm_ in a hook": Scenario(clipped_in_hook(lambda held: clip_grad_norm_(held, 0.1))),
    "sam": Scenario(
        lambda params: SAM(params, torch.optim.SGD, 0.1, lr=0.05, momentum=0.9), closure=True
    ),
    "lbfgs": Scenario(lambda params: torch.optim.LBFGS(params, 0.2, max_iter=3), closure=True),
}
"""Optimizers that look at all parameters, which no stage of a pipeline has."""
SCENARIOS |= WHOLE


def run(rank: int, items: list[tuple[str, str]]) -> list[tuple[list[float], dict]]:
    found = []
    for name, cell in items:
        scenario, losses = SCENARIOS[name], []
        options = scenario.options() if scenario.options else {}
        engine, _ = engine_of(cell, scenario.factory, **options)
        for step in range(STEPS):
            scenario.engine(step, engine)
            losses += go(engine, 1, step)
        found.append((losses, engine.full_state_dict()))
    return found


def expected(name: str) -> Reference:
    scenario = SCENARIOS[name]
    if scenario.closure:
        return eager_by_closure(scenario.factory, first=name == "sam")
    clip = quantile_clip() if name == "clip by a quantile" else scenario.clip
    return eager(scenario.factory, clip, scenario.eager, scenario.named)


def check(pool, items: list[tuple[str, str]]) -> None:
    for by_rank in pool.run(run, items, timeout_s=300):
        for (name, cell), (losses, state) in zip(items, by_rank, strict=True):
            reference = expected(name)
            assert losses == pytest.approx(reference.losses, rel=1e-9), (name, cell)
            error = update_error(reference, state)
            assert error <= 1.0, (name, cell, error)


def test_scenarios_move_weights():
    """And differ from training without them, so that none can pass by doing nothing."""
    plain = {"adamw": eager(adamw), "sgd": eager(sgd)}
    for name in SCENARIOS:
        found = expected(name)
        assert name == "a group added" or moved(found) > 0.001, name
        assert all(update_error(found, other.after) > 1e3 for other in plain.values()), name


def test_changes_are_exact(pool2):
    """Each on two ranks, in one of three cells; `--runslow` runs all cells."""
    cells = ("zero3", "pp2", "tp2")
    check(
        pool2,
        [
            *(
                (name, "zero3" if name in WHOLE else cells[place % 3])
                for place, name in enumerate(SCENARIOS)
            ),
            ("data assigned", "tp2"),
            ("masters clamped", "zero1"),
        ],
    )


@pytest.mark.slow
@pytest.mark.parametrize("cell", PAIRS)
def test_changes_are_exact_in_all_cells(pool2, cell):
    check(pool2, [(name, cell) for name in SCENARIOS if cell != "pp2" or name not in WHOLE])


@pytest.mark.slow
def test_changes_are_exact_on_one_device():
    for name in SCENARIOS:
        [(losses, state)] = run(0, [(name, "one")])
        assert update_error(expected(name), state) <= 1.0, name
        assert losses == pytest.approx(expected(name).losses, rel=1e-9)


@pytest.mark.parametrize(
    "name", ["sam", *(pytest.param(name, marks=pytest.mark.slow) for name in WHOLE)]
)
def test_what_needs_all_parameters_is_refused_in_a_pipeline(pool2, name):
    with pytest.raises(AutoparError, match=r"in other stages of the pipeline \(pp=2\). Pin pp=1,"):
        pool2.run(run, [(name, "pp2")])


# ------------------------------------------------------------------------------------------------------- what has no effect

LOST: dict[str, tuple[Callable[[Engine, Updated], Any], str]] = {
    "fill": (lambda engine, model: model.weights.fill_(3), r'weights was changed.*engine.set\("weights"'),
    "copy": (lambda engine, model: model.head.weight.mul_(2), r"head.weight was changed"),
    "load": (lambda engine, model: model.load_state_dict(other_weights()), "engine.load_state_dict"),
    "replace": (lambda engine, model: setattr(model.head, "weight", nn.Parameter(model.head.weight * 2)),
                "head.weight was changed"),
    "buffer": (lambda engine, model: setattr(model, "scale", torch.tensor(2.0).double()), "scale was changed"),
    "data": (lambda engine, model: setattr(model.head.bias, "data", torch.ones(4).double()), "head.bias was changed"),
    "through data": (lambda engine, model: model.head.weight.data.mul_(0.5), "head.weight was changed"),
    "one element": (lambda engine, model: model.layers[1].up.weight.data[3].zero_(), "layers.1.up.weight was changed"),
    "freeze": (lambda engine, model: model.layers[0].requires_grad_(False), r"engine.freeze\(.layers.0.up.weight.\)"),
    "module": (lambda engine, model: setattr(model, "head", nn.Linear(8, 4).double()), "module head was replaced"),
    "group": (lambda engine, model: engine.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
              "engine.add_param_group"),
    "hook of a parameter": (lambda engine, model: model.head.weight.register_hook(lambda g: 2 * g),
                            r"engine.register_gradient_hook\(.head.weight., hook\) sets one"),
    "forward": (lambda engine, model: setattr(model, "forward", lambda x, labels: x.sum()), "forward of the model was replaced"),
    "class": (lambda engine, model: setattr(model.head, "__class__", nn.Bilinear), "forward of head was replaced"),
    "optimizer": (lambda engine, model: setattr(engine, "optimizer", sgd(model.parameters())), "engine.optimizer was replaced"),
    "master": (lambda engine, model: engine.optimizer.param_groups[0]["params"][0].requires_grad_(False),
               "engine.freeze"),
    "hook": (lambda engine, model: engine.optimizer.param_groups[0]["params"][0].register_hook(lambda g: g),
             "engine.register_gradient_hook"),
}  # fmt: skip


@pytest.mark.parametrize("name", LOST)
def test_changes_without_effect_are_refused(name):
    change, words = LOST[name]
    engine, model = engine_of("one", sgd)
    go(engine, 1)
    with torch.no_grad():
        change(engine, model)
    for method in (engine.step, engine.eval_step):
        with pytest.raises(AutoparError, match=words):
            method(case().batches[1])
    if name in (
        "fill",
        "copy",
        "load",
        "replace",
        "buffer",
        "data",
        "through data",
        "one element",
    ):  # the advice works
        engine.load_state_dict(model.state_dict())
        reference = copy.deepcopy(model)
        assert float(engine.step(case().batches[1])) == pytest.approx(
            float(reference(**case().batches[1])), rel=1e-12
        )
    if name == "freeze":
        engine.freeze("layers.0")
        go(engine, 1)


def test_what_keeps_the_model_as_the_engine_has_it_is_no_change():
    engine, model = engine_of("one", sgd)
    go(engine, 1)
    model.load_state_dict(engine.full_state_dict())  # to generate with it, say
    go(engine, 1)
    model.eval(), model.float(), model.zero_grad()
    go(engine, 1)
    engine.forget_model()
    model.load_state_dict(other_weights())
    go(engine, 1)


def test_attributes_of_python_are_told_once(capsys):
    engine, model = engine_of("one", sgd)
    model.temperature = 2.0
    go(engine, 2)
    assert capsys.readouterr().err.count("temperature was 1.0 when") == 1
    with pytest.raises(AutoparError, match="temperature is an attribute of Python"):
        engine.set("temperature", 2.0)


def test_modes_and_gradients_are_told_once(capsys):
    engine, model = engine_of("one", sgd)
    model(**case().batches[0]).backward()
    model.eval()
    engine.eval_step(case().batches[0])
    assert "training is" not in capsys.readouterr().err
    go(engine, 2)
    told = capsys.readouterr().err
    assert told.count("model.training is False, and was True when") == 1
    engine, model = engine_of("one", sgd)
    model.head.weight.grad = torch.ones(4, 8).double()
    go(engine, 2)
    assert capsys.readouterr().err.count("head.weight.grad was set") == 1


def decaying(params: Any) -> torch.optim.Optimizer:
    """A hook that reads its parameter."""
    params = list(params)
    for p in params:
        p.register_hook(lambda grad, p=p: grad + 0.01 * p.detach() * p.detach().norm())
    return sgd(params)


def decaying_in_a_step_hook(params: Any) -> torch.optim.Optimizer:
    """The same, as the refusal of `decaying` advises."""
    params = list(params)
    optimizer = sgd(params)

    def decay(*_: Any) -> None:
        for p in params:
            if p.grad is not None:
                p.grad.add_(p.detach() * p.detach().norm(), alpha=0.01)

    optimizer.register_step_pre_hook(decay)
    return optimizer


def read_in_hooks(rank: int, cells: list[str]) -> list[Any]:
    found: list[Any] = []
    for cell in cells:
        try:
            engine, _ = engine_of(cell, decaying)
        except AutoparError as error:
            assert "optimizer.register_step_pre_hook" in str(error)
            engine, _ = engine_of(cell, decaying_in_a_step_hook)
            found.append("refused")
        go(engine)
        found.append(engine.full_state_dict())
    return found


def test_a_hook_that_reads_parts_is_refused_with_a_way_that_is_exact(pool2):
    reference = eager(decaying)
    for found in pool2.run(
        read_in_hooks, tried(["zero3", "tp2"], ["dp2", "zero3", "pp2", "tp2"]), timeout_s=200
    ):
        assert [one for one in found if one == "refused"] == ["refused"] * 2
        for state in found:
            assert state == "refused" or update_error(reference, state) <= 1.0


class Normed(nn.Module):
    """Under tensor parallelism the scale of the norm is whole on each rank, as a DTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8, bias=False)
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.norm(x)).relu()).square().mean()


def hook_of_the_norm(rank: int) -> str:
    def factory(params: Any) -> torch.optim.Optimizer:
        scale, *others = params
        scale.register_hook(lambda grad: grad + 0.01 * scale.detach())
        return sgd([scale, *others])

    with pytest.raises(AutoparError) as refused:
        autopar.parallelize(
            Normed(), "cpu:2", {"x": torch.ones(4, 8)}, optimizer=factory, pin={"tp": 2, "zero": 0}
        )
    return str(refused.value)


def test_a_hook_that_reads_a_dtensor_is_refused(pool2):
    for text in pool2.run(hook_of_the_norm):
        assert "reads norm.weight, of which this rank holds a DTensor. Set a step hook" in text


class Keeps(torch.optim.SGD):
    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.1)


class Delegates(Lookahead):
    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)


class Both:
    def __init__(self, params: Any) -> None:
        self.all = [sgd(list(params)[:2])]

    def step(self) -> None:
        self.all[0].step()


REFUSED: dict[str, tuple[Callable, str]] = {
    "keeps gradients": (lambda params: Keeps(params, 0.05), "Keeps.zero_grad keeps gradients"),
    "no optimizer": (Both, "a Both, not a torch.optim.Optimizer: derive a class"),
    "list": (lambda params: [sgd(params)], "a list, not a torch.optim.Optimizer: derive a class"),
    "none": (lambda params: None, "returned a NoneType.*pass, for example"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_that_cannot_run(name):
    factory, words = REFUSED[name]
    with pytest.raises(AutoparError, match=words):
        engine_of("one", factory)


def test_zero_grad_of_a_wrapper_is_no_obstacle():
    engine, _ = engine_of("one", lambda params: Delegates(sgd(params)))
    go(engine, 1)


WRONG: dict[str, tuple[Callable[[Engine], Any], str]] = {
    "unknown": (lambda engine: engine.set("head.weigh", 1.0), "no parameter or buffer 'head.weigh'; near are head.weight"),
    "shape": (lambda engine: engine.set("head.bias", torch.ones(3)), r"has shape \(4,\), and the value \(3,\)"),
    "kind": (lambda engine: engine.set("head.bias", "one"), "takes a tensor or a number"),
    "missing": (lambda engine: engine.load_state_dict({"head.bias": torch.ones(4)}), "names are missing"),
    "extra": (lambda engine: engine.load_state_dict(other_weights() | {"x": torch.ones(1)}), "unknown: x"),
    "no state": (lambda engine: engine.load_state_dict([1]), "mapping from names to tensors"),
    "no name": (lambda engine: engine.freeze(), "at least one name"),
    "no match": (lambda engine: engine.freeze("layer.*"), "no parameter matches 'layer"),
    "buffers": (lambda engine: engine.freeze("weights"), "buffers alone"),
    "all": (lambda engine: (engine.freeze("*"), go(engine, 1)), "all parameters are frozen"),
    "twice": (lambda engine: engine.add_param_group("head"), "in a parameter group already"),
    "no function": (lambda engine: engine.register_gradient_hook("head", 3), "not a function"),
    "hook's shape": (lambda engine: (engine.register_gradient_hook("head.bias", lambda n, g: g[:1]), go(engine, 1)),
                     r"a gradient hook of head.bias returned a tensor of \(1,\)"),
    "averages": (lambda engine: engine.averaged().__enter__(), "call engine.average"),
    "decay": (lambda engine: engine.average(1.5), "decay=1.5"),
    "groups": (lambda engine: engine.load_optimizer_state_dict({"state": {}, "param_groups": []}), r"groups of \[\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_told(name):
    call, words = WRONG[name]
    engine, _ = engine_of("one", sgd)
    with pytest.raises(AutoparError, match=words):
        call(engine)


def after_accumulation(params: Any) -> torch.optim.Optimizer:
    params = list(params)
    params[0].register_post_accumulate_grad_hook(lambda p: None)
    return sgd(params)


FACTORIES: dict[str, tuple[Callable, str]] = {
    "after accumulation": (after_accumulation, "engine.register_gradient_hook"),
    "names": (lambda params: sgd([p for _, p in params]), "call its argument named_parameters"),
    "sparse": (torch.optim.SparseAdam, "SparseAdam takes sparse gradients alone"),
    "differentiable": (lambda p: torch.optim.Adam(p, differentiable=True), "differentiable=True"),
    "capturable": (lambda p: torch.optim.Adam(p, capturable=True), "capturable=True"),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_factories_that_cannot_run(name):
    factory, words = FACTORIES[name]
    with pytest.raises(AutoparError, match=words):
        engine_of("one", factory)


def hook_after(rank: int) -> list[str]:
    found = []
    for register in (
        torch.optim.Optimizer.register_step_pre_hook,
        lambda _, hook: register_optimizer_step_post_hook(hook),
    ):
        engine, _ = engine_of("dp2", sgd)
        handle = register(engine.optimizer, lambda *_: None)
        try:
            go(engine, 1)
        except AutoparError as error:
            found.append(str(error))
        handle.remove()
    return found


def test_a_step_hook_set_later_is_refused(pool2):
    for found in pool2.run(hook_after):
        assert len(found) == 2
        assert all("Set it in the optimizer's factory" in text for text in found)


# ---------------------------------------------------------------------------------------------- attributes of parameters


def by_attribute(params: Any) -> torch.optim.Optimizer:
    params = list(params)
    slow = [p for p in params if getattr(p, "_slow", False)]
    return torch.optim.SGD(
        [{"params": slow, "lr": 0.01}, {"params": [p for p in params if p not in set(slow)]}], 0.05
    )


class Scaled(torch.optim.Optimizer):
    """A class that reads attributes of parameters in its step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * p.grad.norm(), alpha=group["lr"] * p._factor)


def with_attributes(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter._factor = 2.0 if "up" in name else 1.0
        if "down" in name:
            parameter._slow = True
    return model


def by_attributes_here(rank: int, cells: list[str]) -> list[dict]:
    found = []
    for cell in cells:
        for factory in (by_attribute, Scaled):
            engine = Engine(
                with_attributes(copy.deepcopy(case().model)), case().traced, plan_of(cell), factory, None, None, "cpu"
            )  # fmt: skip
            go(engine)
            found.append(engine.full_state_dict())
    return found


@pytest.mark.parametrize("cells", [["zero3"], pytest.param(list(PAIRS), marks=pytest.mark.slow)])
def test_a_factory_sees_attributes_of_parameters(pool2, cells):
    wanted = []
    for factory in (by_attribute, Scaled):
        model = with_attributes(copy.deepcopy(case().model))
        optimizer = factory(list(model.parameters()))
        before = {k: v.clone() for k, v in model.state_dict().items()}
        for batch in case().batches[:STEPS]:
            optimizer.zero_grad()
            model(**batch).backward()
            optimizer.step()
        wanted.append(Reference([], before, model.state_dict()))
    for by_rank in pool2.run(by_attributes_here, cells, timeout_s=200):
        for place, state in enumerate(by_rank):
            assert update_error(wanted[place % 2], state) <= 1.0


@pytest.mark.parametrize("limit", [0, -1, "a", None, True])
def test_limits_of_clipping(limit):
    for kind in (autopar.ClipNorm, autopar.ClipValue):
        with pytest.raises(AutoparError, match="limit"):
            kind(limit)
