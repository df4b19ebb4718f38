"""The part of the engine that updates parameters: reduction, hooks, clipping and the optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autopar.errors import AutoparError
from autopar.ir.plan import Plan
from autopar.rewrite.collectives.ranges import named
from autopar.runtime.batches.meeting import CallRecord
from autopar.runtime.checkpoint.engine_methods import Durable
from autopar.runtime.observe.metrics import Meter
from autopar.runtime.ranks.agreement import from_all, lost_ranks
from autopar.runtime.ranks.calls import CALLS
from autopar.runtime.ranks.common_options import by_name, checksum, options, raise_difference
from autopar.runtime.ranks.process_groups import call_group, file_group
from autopar.runtime.state.averages import Averages
from autopar.runtime.state.clipping import Clip, Norms, apply_rules, rules_of
from autopar.runtime.state.factories import OptimizerFactory
from autopar.runtime.state.gradient_hooks import GradientHooks
from autopar.runtime.state.gradients import global_norm, partial_axes
from autopar.runtime.state.names import TensorNames
from autopar.runtime.state.optimizers import (
    Updating,
    is_elementwise,
    make_optimizer,
    step,
    step_hooks,
)
from autopar.runtime.state.precision import LossScale
from autopar.runtime.state.samples import Samples
from autopar.runtime.state.user_changes import UserChanges, check_masters

_OF_WEIGHTS = ("save", "load", "set", "load_state_dict", "average")
_DOING = {"save": "while saving", "load": "while loading", "export": "while exporting"}


class Updates(Durable):
    """The methods of an Engine around the update of a step."""

    plan: Plan
    device: torch.device
    rank: int
    steps: int
    seed: int
    max_grad_norm: float | None
    optimizer: torch.optim.Optimizer
    averages: Averages | None
    loss_scale: LossScale
    _meter: Meter
    _layouts: Mapping[str, Any]
    _stage_group: Any

    def check_numbers(self) -> None:
        """Raise AutoparError, on every rank, if a buffer of which forward has read a number has
        another value than when it was captured.
        """
        leaves = self.parameters.leaves

        def check() -> None:
            for name in self._names.numbers.keys() & leaves.keys():
                self._names.check_number(name, leaves[name].detach())

        if self._names.numbers:
            from_all(file_group(), check)

    def _begin_updates(
        self, model: nn.Module, factory: OptimizerFactory, clip: Clip | Sequence[Clip] | None
    ) -> None:
        """Make the optimizer, and what else an update needs. Every rank must call it."""
        own, holding = self.parameters, self.parameters.holding
        self._names = TensorNames(model, self._all_specs)
        self._rules: tuple[Any, ...] = ()

        def alike(build: Callable[[], Updating]) -> Updating:
            return self._built_alike(build, clip)

        self._updating = make_optimizer(factory, own, self.plan, self._all_specs, model, alike)
        self.optimizer = self._updating.optimizer
        self._hooks = GradientHooks(own, self._updating.hooks)
        self._frozen: set[str] = set()
        self.averages = None
        self._user_changes = UserChanges(model)
        self._norms = Norms(
            holding.layouts_of_masters,
            holding.axes,
            self._shared.counts,
            self.axes["pp"],
            self.device,
        )
        self._note_masters()
        self._master_names = {id(one.master): name for name, one in own.trained.items()}
        self._step_hooks = set(step_hooks(self.optimizer))
        for mode in ("train", "eval"):  # of schedule-free optimizers: they move weights
            if callable(getattr(self.optimizer, mode, None)):
                setattr(self.optimizer, mode, self._noted(getattr(self.optimizer, mode)))
        self.batches.meeting.differ = self._refuse_different
        self.check_numbers()

    def _noted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            self._modes_changed = True
            return method(*args, **kwargs)

        return called

    def _built_alike(
        self, build: Callable[[], Updating], clip: Clip | Sequence[Clip] | None
    ) -> Updating:
        """What `build()` makes. Raises AutoparError on every rank if it fails on one, or if ranks were
        given different arguments.
        """
        found: list[Updating] = []

        def own() -> dict[str, Any]:
            self._rules = rules_of(clip, self._names)
            found.append(made := build())
            return {
                "max_grad_norm": self.max_grad_norm,
                "seed": self.seed,
                "clip": [rule.told for rule in self._rules],
                "optimizers": type(made.optimizer).__name__,
                "parameter groups": made.groups,
            } | by_name(options(made.optimizer.param_groups, ()))

        ranks = from_all(call_group(), own)
        raise_difference(ranks, "Every rank calls parallelize with the same arguments")
        return found[0]

    # ------------------------------------------------------------------------------------------------------- calls of methods

    def _call(self, method: str) -> CallRecord:
        """What this rank tells the others when it calls `method`: see `BatchSplitter.meet`."""
        alike = 0 if self.plan.mesh.num_devices == 1 else checksum(self._alike_in_calls())
        return CALLS.index(method), self.steps, alike, float(self._masters_changed())

    def _alike_in_calls(self) -> tuple[Any, ...]:
        """What all ranks must have alike in each call: the values of `_refuse_different`."""
        groups = options(self.optimizer.param_groups, self._updating.moving)
        return self.max_grad_norm, self.seed, self._hooks.numbers, self._samplers, groups

    def _refuse_different(self) -> None:
        """Raise AutoparError for the first option that differs between ranks. Every rank calls it."""
        limit, seed, hooks, samplers, groups = self._alike_in_calls()
        own = {
            "max_grad_norm": limit,
            "seed": seed,
            "gradient hooks": hooks,
            "samplers (rows, shuffle, drop_last)": samplers,
        } | by_name(groups)
        raise_difference(
            from_all(call_group(), lambda: own),
            "Ranks must not differ in it: set it alike on every rank, from values that all ranks know, such as the loss that step returns",
        )

    @contextlib.contextmanager
    def _together(self, method: str) -> Any:
        """A context for a method that every rank calls: it waits for the call of all ranks."""
        with lost_ranks(_DOING.get(method, f"in {method}")):
            self.batches.meet(self._call(method))
            if method in _OF_WEIGHTS:
                self._check_own_weights(method)
            self._publish_changed()
            yield

    def _note_masters(self) -> None:
        self._versions = [one.master._version for one in self.parameters.trained.values()]
        self._modes_changed = False
        self._samples = Samples(self._sampled())

    def _sampled(self) -> list[torch.Tensor]:
        """This rank's masters if graphs do not read their memory, for writes through `.data`."""
        own = self.parameters
        if not own.publishes:
            return []
        return [one.local for name, one in own.trained.items() if own.has_master(name)]

    def _check_own_weights(self, method: str) -> None:
        """Raise AutoparError inside of `averaged()`, where `method` would mistake averages for the
        weights.
        """
        if self.averages is not None and self.averages.active:
            raise AutoparError(
                f"engine.averaged() has put averages in place of the weights: leave its block before engine.{method}"
            )

    def _masters_changed(self) -> bool:
        """Whether masters were written into since graphs last read them: by a mode of the optimizer,
        or by the user.
        """
        own = self.parameters.trained.values()
        return (
            self._modes_changed
            or any(o.master._version != old for o, old in zip(own, self._versions, strict=True))
            or bool(self._samples.changed(self._sampled()))
            or (not self.parameters.publishes and any(one.is_apart for one in own))
        )

    def _publish_changed(self) -> None:
        """Let graphs read changed masters, if any rank has some. `batches` has heard of all."""
        if self.batches.meeting.changed:
            self.parameters.publish()
            self._note_masters()

    def _check_changes(self, trains: bool = False) -> None:
        """Raise AutoparError if the user has changed the model or the optimizer's parameters without
        effect. `trains`: before a step, which needs something to train.
        """
        self._user_changes.check(self._trains, trains)
        if self.optimizer is not self._updating.optimizer:
            raise AutoparError(
                "engine.optimizer was replaced, and the new one may not train what the engine holds: call parallelize again with the new "
                "optimizer's factory, after engine.export or with engine.full_state_dict()"
            )
        check_masters(self.optimizer.param_groups, self._master_names)
        if self.plan.mesh.num_devices > 1 and set(step_hooks(self.optimizer)) - self._step_hooks:
            raise AutoparError(
                "a step hook was set on engine.optimizer, where it would see this rank's parts of parameters. Set it in the optimizer's "
                "factory: it then sees whole ones"
            )
        if trains and len(self._frozen) == len(self._names.trained):
            raise AutoparError(
                "all parameters are frozen, so that a step has nothing to train: engine.unfreeze some; eval_step runs the model"
            )
        if trains:
            self._check_own_weights("step")

    def _trains(self, name: str) -> bool | None:
        """Whether the engine trains a parameter now; None for one that it never trains."""
        first = self._names.first(name) if name not in self._names.unread else name
        spec = self._all_specs.get(first)
        return None if spec is None or not spec.trainable else first not in self._frozen

    # ------------------------------------------------------------------------------------------------------------- the update

    def _trained(self, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run a step's passes and its update. `run()` runs forward and backward and returns the loss.
        Returns the loss of the first pass.
        """
        if self._updating.closure:
            return self._trained_by_closure(run)
        total = run()
        with named("update"):
            self._update()
        return total

    def _trained_by_closure(self, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        """As `_trained`, for an optimizer whose step takes a closure: it runs the model again."""
        losses: list[torch.Tensor] = []

        def closure() -> torch.Tensor:
            if losses:
                with lost_ranks("in a second pass of a step"):
                    self.batches.meet(self._call("a second pass of step"))
                self.parameters.publish()
                self.parameters.gradients.clear()
            with torch.enable_grad():
                losses.append(run())
            self._prepare_gradients()
            self.parameters.hand_over()
            return losses[-1].detach().clone()

        if self._updating.gradients_first:
            closure()
        with named("update"), self._randomness(update=True):
            step(self.optimizer, closure)
        self._after_update()
        return losses[0]

    def _update(self) -> None:
        """Reduce and clip the gradients and run the optimizer, unless the gradients overflowed
        under the loss scale. In both cases count the step and drop the gradients.
        """
        if self._prepare_gradients():
            self.parameters.hand_over()
            elementwise = is_elementwise(self.optimizer)
            with contextlib.nullcontext() if elementwise else self._randomness(update=True):
                step(self.optimizer)
            self._after_update()
            return
        self.steps += 1
        self.parameters.gradients.clear()

    def _after_update(self) -> None:
        self.parameters.publish()
        self.steps += 1
        self.parameters.gradients.clear()
        if self.averages is not None:
            self.averages.after_step(self.steps)
        self._note_masters()

    def _prepare_gradients(self) -> bool:
        """Reduce the gradients, run hooks on them, and clip them. Returns whether they count: False
        if they overflowed under the loss scale, and nothing else was done.
        """
        self.reduce_gradients()
        if self._frozen:
            self.parameters.gradients.drop(self._frozen)
        if not self.loss_scale.unscale(self._gradients(), self.axes.values(), self.device):
            return False
        self._hooks.run()
        if self._rules:
            self._meter.norm = apply_rules(self._rules, self._norms, self._gradients)
        if self.max_grad_norm is not None:
            self._clip(self.max_grad_norm)
        return True

    # ----------------------------------------------------------------------------------------------------------- gradients

    def gradient_axes(self, name: str) -> tuple[str, ...]:
        """The axes over which the gradient of a parameter is a partial sum after backward; () if it
        is complete.
        """
        return partial_axes(self._layouts.get(name, {}))

    def _gradients(self) -> dict[str, torch.Tensor]:
        return self.parameters.gradients.so_far()

    def reduce_gradients(self) -> None:
        """Sum this step's partial gradients over ranks, in place: tied parameters over stages, then
        all over their axes. Under ZeRO each rank keeps only the parts that it owns.
        """
        self._shared.add_up_tied(self.parameters)
        self.parameters.gradients.reduce()

    def gradient_norm(self) -> torch.Tensor:
        """The global 2-norm of the reduced gradients: a scalar that is equal on every rank. Every
        rank must call it.
        """
        with self._together("gradient_norm"):
            return self._norm_of_gradients()

    def _norm_of_gradients(self) -> torch.Tensor:
        counted = {
            name: grad for name, grad in self._gradients().items() if self._shared.counts(name)
        }
        holding = self.parameters.holding
        norm = global_norm(counted, holding.layouts_of_masters(counted), holding.axes, self.device)
        return (
            norm
            if self._stage_group is None
            else self._shared.over_stages(norm.double().square()).sqrt()
        )

    def _clip(self, limit: float) -> None:
        """Scale gradients in place, like torch.nn.utils.clip_grad_norm_ with max_norm `limit` on
        one device. Stores their norm for the metrics.
        """
        self._meter.norm = self._norm_of_gradients()
        scale = (limit / (self._meter.norm + 1e-6)).clamp(max=1.0)
        for grad in self._gradients().values():
            grad.mul_(scale)

    @contextlib.contextmanager
    def _randomness(self, update: bool = False) -> Any:
        """A context for random numbers: in a step every rank draws the same ones, so that
        replicated values stay equal; in an update, different ones than in the step. A single
        device uses the user's generator.
        """
        if self.plan.mesh.num_devices == 1:
            yield
            return
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            seed = (self.seed << 32) + self.steps
            torch.manual_seed(~seed if update else seed)
            yield
