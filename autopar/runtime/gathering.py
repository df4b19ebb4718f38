"""ZeRO 3: parameters have memory while a segment runs forward, and from its backward until their own gradients are there.

Autograd keeps the leaves and views of them, so that the tensors must stay: their storage is emptied and filled again, as FSDP does.  A leaf
is emptied when its gradient has been accumulated: every node of that backward that reads it leads to that gradient, and has run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Gather = Callable[[Sequence[str]], list[tuple[str, Tensor]]]


class Gathering:
    """Fills and empties the leaves made by `empty`.  `gather(names)` gives their wholes; all ranks ask for the same names in one order."""

    def __init__(self, gather: Gather) -> None:
        self._gather = gather
        self._leaves: dict[str, nn.Parameter] = {}
        self._names: dict[int, str] = {}
        self._present: set[str] = set()
        self.segment_of: dict[str, str] = {}

    def empty(self, name: str, shape: tuple[int, ...], like: Tensor) -> nn.Parameter:
        """A leaf without memory, of the dtype and device of `like`."""
        leaf = nn.Parameter(like.new_empty(shape))
        leaf.untyped_storage().resize_(0)
        self._leaves[name] = leaf
        return leaf

    def watch(self, root: nn.Module) -> None:
        """Fill and empty the leaves of every module under `root` around its forward and its backward."""
        names = {id(leaf): name for name, leaf in self._leaves.items()}
        for path, module in root.named_modules():
            own = list(dict.fromkeys(names[id(p)] for p in module._parameters.values() if id(p) in names))
            if not own:
                continue
            for name in own:
                self.segment_of.setdefault(name, path)
            module.register_forward_pre_hook(partial(self._before, own))
            module.register_forward_hook(partial(self._after, own))

    @torch.no_grad()
    def fill(self, names: Sequence[str]) -> None:
        """Gather those leaves that have no memory."""
        missing = [name for name in names if name not in self._present]
        if not missing:
            return
        for name, whole in self._gather(missing):
            leaf = self._leaves[name]
            leaf.untyped_storage().resize_(leaf.numel() * leaf.element_size())
            with torch.autograd._unsafe_preserve_version_counter(leaf):  # what backward has kept is the same as before
                leaf.copy_(whole)
        self._present.update(missing)

    def free(self, names: Sequence[str] | None = None) -> None:
        """Empty leaves, by default all."""
        for name in list(self._present) if names is None else names:
            if name in self._present:
                self._leaves[name].untyped_storage().resize_(0)
                self._present.discard(name)

    @contextmanager
    def holding(self, everything: bool) -> Iterator[None]:
        """A block after which no leaf has memory, and during which all have, if `everything`."""
        if everything:
            self.fill(list(self._leaves))
        try:
            yield
        finally:
            self.free()

    def _before(self, names: list[str], module: nn.Module, inputs: Any) -> None:
        self.fill(names)

    def _after(self, names: list[str], module: nn.Module, inputs: Any, outputs: Any) -> None:
        if torch._C._current_graph_task_id() != -1:  # recomputed: its backward comes next
            return
        given = {id(x) for x in tree_leaves(inputs)}
        results = [x for x in tree_leaves(outputs) if isinstance(x, Tensor)]
        for x in results:
            if x.requires_grad and x.grad_fn is not None and id(x) not in given:
                x.register_hook(partial(self._before_backward, names))
        shown = {x.untyped_storage()._cdata for x in results}  # a result may be a view of a parameter: it is freed after backward
        self.free([name for name in names if self._leaves[name].untyped_storage()._cdata not in shown])

    def _before_backward(self, names: list[str], grad: Tensor) -> None:
        self.fill(names)
