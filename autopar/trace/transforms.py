"""Captures function transforms (`torch.vmap`, `torch.func`) and `torch.autograd.grad` as plain ops."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._functorch import apis, eager_transforms
from torch.fx.experimental import proxy_tensor

from autopar.errors import AutoparError
from autopar.trace.python_state import Snapshot
from autopar.trace.recorded_ops import plainly
from autopar.trace.refused_hooks import replaced
from autopar.trace.run_inputs import NotPlain, Strided, below_transforms, functions_in
from autopar.trace.traced_part import TracedNodes, TracedPart
from autopar.trace.user_lines import DATA_DEPENDENT, line_now

_CHUNKS = "forward calls vmap with chunk_size{}: all rows are computed at once, and micro-batches bound the memory"
_GRAD = "torch.autograd.grad"
_READS = ("data-dependent control flow", "calling .item() on a Tensor")
"""Parts of the errors that vmap raises if Python asks for the value of a tensor."""


@contextlib.contextmanager
def plain_transforms(notes: list[str], state: Callable[[], Snapshot]) -> Iterator[None]:
    """A context in which transforms and gradients that forward computes are captured as plain ops.
    `notes` gets what is computed in another way than written. `state` takes the Python state of
    the model.

    Raises AutoparError, which names the user's line, where that fails.
    """
    running = _Running(notes, state)
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in (
            (apis, "vmap_impl", running.vmap),
            (eager_transforms, "grad_impl", running.named("torch.func.grad")),
            (eager_transforms, "grad_and_value_impl", running.named("torch.func.grad_and_value")),
            (eager_transforms, "_jvp_with_argnums", running.named("torch.func.jvp")),
            (eager_transforms, "_vjp_with_argnums", running.vjp),
            (eager_transforms, "linearize", running.linearize),
            (torch.func, "linearize", running.linearize),
            (torch.autograd.forward_ad, "enter_dual_level", running.dual_level),
            (torch._vmap_internals, "_vmap", running.batched),
            (torch.autograd, "_engine_run_backward", running.backward),
            (proxy_tensor, "set_proxy_slot", running.nodes.recording),
        ):
            stack.enter_context(replaced(owner, name, replacement(vars(owner)[name])))
        yield


@dataclass(slots=True)
class _Running:
    """Replacements of torch's functions. Each takes the function and returns what is called
    instead.

    `inside`: an outer transform runs, which records the ops of the inner ones too. `batched_over`:
    torch.autograd.grad computes several gradients at once.
    """

    notes: list[str]
    state: Callable[[], Snapshot]
    inside: bool = False
    batched_over: bool = False
    nodes: TracedNodes = field(default_factory=TracedNodes)

    def plainly(self, what: str, function: _Of, *args: Any, **kwargs: Any) -> Any:
        """The result of a call, computed by plain ops. `what` names it in errors."""
        if self.inside:
            return function(*args, **kwargs)
        where = line_now()
        self.inside = True
        try:
            effects = self._effects(function)
            try:
                return plainly(function, args, kwargs, effects)
            except Strided as error:
                if not isinstance(function, _OfPart):
                    raise
                function = replace(function, func=torch.func.functionalize(function.func))
                with _or_else(error):
                    return plainly(function, args, kwargs, effects)
        except AutoparError:
            raise
        except NotPlain as error:
            raise _refusal(what, where, error) from error
        except Exception as error:  # torch has many types for what a transform cannot do
            reason = " ".join(str(error).split())[:250].rstrip(". ")
            found = NotPlain(f"{type(error).__name__}: {reason}")
            if type(error).__name__ in DATA_DEPENDENT or any(e in reason for e in _READS):
                found = NotPlain(
                    "it reads a number out of a tensor, or writes one into a part of one",
                    "Choose by torch.where in it",
                )
            raise _refusal(what, where, found) from error
        finally:
            self.inside = False

    def _effects(self, function: _Of) -> CallEffects:
        """What a call changes in Python state of the model, and of what a user's function names."""
        if isinstance(function, _OfPart):
            return CallEffects(list)
        own = list(functions_in(function.func))
        return CallEffects(lambda: [self.state(), Snapshot.of_values(own)])

    def named(self, what: str) -> Callable[[Callable], Callable]:
        def make(plain: Callable) -> Callable:
            return lambda func, *args, **kwargs: self.plainly(
                what, _Of(plain, func), *args, **kwargs
            )

        return make

    def vmap(self, plain: Callable) -> Callable:
        def mapped(
            func: Callable,
            in_dims: Any,
            out_dims: Any,
            randomness: str,
            chunk_size: int | None,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            if chunk_size is not None and not self.inside:
                note = _CHUNKS.format(line_now())
                self.notes += [] if note in self.notes else [note]
            options = (in_dims, out_dims, randomness, None)
            return self.plainly("torch.vmap", _Of(plain, func), *options, *args, **kwargs)

        return mapped

    def vjp(self, plain: Callable) -> Callable:
        def transposed(func: Callable, *primals: Any, **options: Any) -> tuple:
            if self.inside:
                return plain(func, *primals, **options)

            def results(func: Callable, *primals: Any) -> tuple:
                output, _, *auxiliary = plain(func, *primals, **options)
                return output, *auxiliary

            def gradients(func: Callable, cotangents: Any, more: dict, *primals: Any) -> Any:
                return plain(func, *primals, **options)[1](cotangents, **more)

            def vjp_fn(cotangents: Any, **more: Any) -> Any:
                call = _Of(gradients, func)
                effects = self._effects(call)
                try:
                    return self.plainly(what, call, cotangents, more, *primals)
                finally:
                    effects.restore()

            what = "torch.func.vjp"
            output, *auxiliary = self.plainly(what, _Of(results, func), *primals)
            return output, vjp_fn, *auxiliary

        return transposed

    def linearize(self, plain: Callable) -> Callable:
        def refused(func: Callable, *primals: Any) -> NoReturn:
            raise AutoparError(
                f"forward calls torch.func.linearize{line_now()}, whose result has no gradient with respect to parameters in eager "
                "PyTorch, and torch.export cannot follow it; use torch.func.jvp(f, primals, tangents), which trains them"
            )

        return refused

    def dual_level(self, plain: Callable) -> Callable:
        def entered() -> Any:
            if self.inside:  # torch.func.jvp is written so
                return plain()
            raise AutoparError(
                f"forward uses torch.autograd.forward_ad{line_now()}, which torch.export cannot follow: use torch.func.jvp(f, "
                "primals, tangents)"
            )

        return entered

    def batched(self, plain: Callable) -> Callable:
        def mapped(func: Callable, *args: Any, **kwargs: Any) -> Callable:
            def run(*inputs: Any) -> Any:
                if self.inside:
                    return plain(func, *args, **kwargs)(*inputs)
                self.batched_over = True
                try:
                    return func(*inputs)
                finally:
                    self.batched_over = False

            return run

        return mapped

    def backward(self, plain: Callable) -> Callable:
        def run(
            outputs: Sequence[Any],
            cotangents: Sequence[Tensor],
            keep_graph: bool,
            create_graph: bool,
            inputs: Sequence[Any],
            allow_unused: bool = False,
            accumulate_grad: bool = False,
            **more: Any,
        ) -> Any:
            rest = (keep_graph, create_graph, inputs, allow_unused, accumulate_grad)
            if accumulate_grad:  # refused
                return plain(outputs, cotangents, *rest[:-1], accumulate_grad=True, **more)
            if self.inside:
                return plain(outputs, cotangents, *rest, **more)
            if create_graph and not torch.is_grad_enabled():
                raise AutoparError(
                    f"forward calls torch.autograd.grad with create_graph=True under no_grad{line_now()}: call it outside of no_grad, or "
                    "without create_graph if its result shall not train"
                )
            with below_transforms():  # which inputs are used, and what autograd refuses
                ones = tuple(torch.ones_like(output) for output in outputs)
                found = plain(outputs, ones, *rest, **more)
            used = [place for place, each in enumerate(found) if each is not None]
            gradients = self._gradients(outputs, cotangents, [inputs[place] for place in used])
            for place, gradient in zip(used, gradients, strict=True):
                found = (*found[:place], gradient, *found[place + 1 :])
            if create_graph:
                return found
            return tuple(None if each is None else each.detach() for each in found)

        return run

    def _gradients(
        self, outputs: Sequence[Any], cotangents: Sequence[Tensor], inputs: Sequence[Any]
    ) -> Sequence[Tensor]:
        """Gradients of `outputs` times `cotangents` with respect to `inputs`."""
        where = line_now()
        try:
            part = TracedPart.between(self.nodes, inputs, outputs)
        except NotPlain as error:
            raise _refusal(_GRAD, where, error) from error
        arguments = (tuple(cotangents), tuple(inputs), tuple(part.others))
        return self.plainly(_GRAD, _OfPart(self._transposed, part.run), *arguments)

    def _transposed(
        self,
        run: Callable,
        cotangents: tuple[Tensor, ...],
        inputs: tuple[Tensor, ...],
        others: tuple[Tensor, ...],
    ) -> Any:
        """The gradients of `run(inputs, others)` times `cotangents` with respect to `inputs`."""
        outputs = lambda *inputs: run(inputs, others)  # noqa: E731
        of = lambda each: torch.func.vjp(outputs, *inputs)[1](tuple(each))  # noqa: E731
        return torch.vmap(of)(cotangents) if self.batched_over else of(cotangents)


@dataclass(frozen=True, slots=True)
class _Of:
    """A call of `transform` of a user's function. Its variables are found by `func`."""

    transform: Callable
    func: Callable

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.transform(self.func, *args, **kwargs)


class _OfPart(_Of):
    """A call of `transform` of a part of the graph, which changes nothing in Python."""


@contextlib.contextmanager
def _or_else(error: Exception) -> Iterator[None]:
    """A context that raises `error` in the place of another one."""
    try:
        yield
    except Exception:
        raise error from None


def _refusal(what: str, where: str, error: NotPlain) -> AutoparError:
    return AutoparError(
        f"forward calls {what}{where}, and autopar cannot write it as plain ops: {error}. {error.remedy}"
    )


@dataclass(slots=True)
class CallEffects:
    """The state that `take` returns: before all runs, and after the first."""

    take: Callable[[], list[Snapshot]]
    before: list[Snapshot] = field(init=False)
    first: list[Snapshot] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.before = self.take()

    def restore(self) -> None:
        """Put the state before all runs back."""
        for snapshot in self.before:
            snapshot.restore()

    def check(self, tracked: set[int]) -> None:
        """Raise NotPlain if the state differs from that after the first run, or if it has a new
        tensor that forward does not know. `tracked` are the ids of those that it knows.
        """
        found = self.take()
        self.first = self.first or found
        for before, first, now in zip(self.before, self.first, found, strict=True):
            for path, tensor in now.tensors.items():
                if before.tensors.get(path) is not tensor and id(tensor) not in tracked:
                    raise NotPlain(
                        f"it stores a tensor outside of itself, in {path!r}",
                        "Return that tensor, as by has_aux=True in torch.func.grad",
                    )
            differing = first.differing(now)
            if differing:
                raise NotPlain(
                    f"what it stores in {differing[0]!r} depends on the number of rows",
                    "Store that before or after it",
                )
