"""Refuses hooks on gradients that forward sets, and models inside of wrappers that run on several
processes themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from autopar.errors import AutoparError
from autopar.trace.user_lines import line_now

_HOOKS: tuple[tuple[type, str], ...] = (
    (Tensor, "register_hook"),
    (Tensor, "register_post_accumulate_grad_hook"),
    (nn.Module, "register_backward_hook"),
    (nn.Module, "register_full_backward_hook"),
    (nn.Module, "register_full_backward_pre_hook"),
)
_WRAPPERS = (
    "DataParallel",
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "FSDPModule",
    "DeepSpeedEngine",
)


@contextlib.contextmanager
def hooks_refused() -> Iterator[None]:
    """A context in which setting a hook on gradients raises AutoparError."""
    with contextlib.ExitStack() as stack:
        for owner, name in _HOOKS:
            stack.callback(setattr, owner, name, vars(owner)[name])
            setattr(owner, name, _refusing(f"{owner.__name__}.{name}"))
        yield


def _refusing(name: str) -> Callable:
    def refused(*args: Any, **kwargs: Any) -> NoReturn:
        raise AutoparError(
            f"forward calls {name}{line_now()}, which torch.export drops; write the gradient as an op of its own "
            "(torch.library.custom_op and register_autograd)"
        )

    return refused


def refuse_wrappers(model: nn.Module) -> None:
    """Raise AutoparError if a module of the model runs on several processes or devices itself."""
    for name, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        found = next((wrapper for wrapper in _WRAPPERS if wrapper in kinds), "")
        if found:
            inner = isinstance(module, (DataParallel, DistributedDataParallel))
            raise AutoparError(
                f"{name or 'the model'} is wrapped in {found}, which shares out the batch or the parameters itself: pass "
                f"{'its .module' if inner else 'the plain module'}, since autopar does that"
            )
