"""Parameters that occupy memory only while segments need them: under ZeRO-3, and if they are
offloaded to the host.

They have memory during a segment's forward, and from its backward until their own gradients are
ready. Autograd keeps the leaves and views of them, so the tensors must stay; their storage is
emptied and refilled, as in FSDP. A leaf is emptied when its gradient has been accumulated: every
backward node that reads it leads to that gradient, and has run. The last segment's leaves stay
filled from its forward, since its backward comes next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from autopar.runtime.state.zero import Moving, copied


class Gathering:
    """Fills and empties the leaves that `empty` makes: parameters that have memory only while a
    segment needs them.

    `gather(names)` starts to gather their whole tensors; all ranks request the same names in the
    same order. With `ahead`, the gather of the next segment (in forward or backward) starts when a
    segment begins, so that it overlaps with that segment's compute.
    """

    def __init__(self, gather: Callable[[Sequence[str]], Moving], ahead: bool = False) -> None:
        self._gather, self.ahead = gather, ahead
        self._leaves: dict[str, nn.Parameter] = {}
        self._present: set[str] = set()
        self._travelling: tuple[list[str], Moving] | None = None
        self.segment_of: dict[str, str] = {}
        # those of which a segment has given out a view: they stay until backward
        self._shown: set[str] = set()

    def empty(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> nn.Parameter:
        """A new parameter of this shape without memory, registered under `name`."""
        leaf = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        leaf.untyped_storage().resize_(0)
        self._leaves[name] = leaf
        return leaf

    def watch(self, root: nn.Module) -> None:
        """Register hooks that fill and empty the leaves of every module under `root` around its
        forward and backward.
        """
        segments = []
        names = {id(leaf): name for name, leaf in self._leaves.items()}
        for path, module in root.named_modules():
            own = list(
                dict.fromkeys(names[id(p)] for p in module._parameters.values() if id(p) in names)
            )
            if own:
                segments.append((module, own))
                for name in own:
                    self.segment_of.setdefault(name, path)
        for k, (module, own) in enumerate(segments):
            after = segments[k + 1][1] if k + 1 < len(segments) else []
            before = segments[k - 1][1] if k else []
            module.register_forward_pre_hook(partial(self._before, own, after))
            module.register_forward_hook(partial(self._after, own, before, not after))

    @torch.no_grad()
    def fill(self, names: Sequence[str], following: Sequence[str] = ()) -> None:
        """Gather the leaves `names` that have no memory, and wait. With `ahead`, also start to
        gather those of `following`, unless a gather is in transit.
        """
        if not self._present.issuperset(names):
            self._arrive()
            missing = [name for name in names if name not in self._present]
            if missing:
                self._travelling = missing, self._gather(missing)
                self._arrive()
        coming = [name for name in following if name not in self._present]
        if self.ahead and coming and self._travelling is None:
            self._travelling = coming, self._gather(coming)

    def _arrive(self) -> None:
        """Wait for the leaves in transit, if any, give them memory, and copy the gathered tensors
        into it.
        """
        if self._travelling is None:
            return
        (names, moving), self._travelling = self._travelling, None
        for name, whole in zip(names, moving.wait(), strict=True):
            leaf = self._leaves[name]
            leaf.untyped_storage().resize_(leaf.numel() * leaf.element_size())
            # what backward has kept is the same as before
            with torch.autograd._unsafe_preserve_version_counter(leaf):
                copied(leaf.detach(), whole)
        self._present.update(names)

    def free(self, names: Sequence[str] | None = None) -> None:
        """Take the memory of the leaves `names` that have some; by default of all."""
        if names is None:
            self._arrive()
        for name in list(self._present) if names is None else names:
            if name in self._present:
                self._leaves[name].untyped_storage().resize_(0)
                self._present.discard(name)
                self._shown.discard(name)

    @contextmanager
    def holding(self, everything: bool) -> Iterator[None]:
        """A context during which all leaves have memory, if `everything`. After it, none has."""
        if everything:
            self.fill(list(self._leaves))
        try:
            yield
        finally:
            self.free()

    def _before(
        self, names: list[str], following: list[str], module: nn.Module, inputs: Any
    ) -> None:
        recomputes = torch._C._current_graph_task_id() != -1
        self.fill(names, () if recomputes else following)

    def _after(
        self,
        names: list[str],
        following: list[str],
        last: bool,
        module: nn.Module,
        inputs: Any,
        outputs: Any,
    ) -> None:
        if torch._C._current_graph_task_id() != -1:  # recomputed: its backward comes next
            return
        given = {id(x) for x in tree_leaves(inputs)}
        results = [x for x in tree_leaves(outputs) if isinstance(x, Tensor)]
        for x in results:
            if x.requires_grad and x.grad_fn is not None and id(x) not in given:
                x.register_hook(partial(self._before_backward, names, following))
        if last and torch.is_grad_enabled():  # its backward comes next
            return
        # a result may be a view of a parameter: it is freed after backward
        shown = {x.untyped_storage()._cdata for x in results}
        self._shown.update(
            name for name in names if self._leaves[name].untyped_storage()._cdata in shown
        )
        self.free([name for name in names if name not in self._shown])

    def _before_backward(self, names: list[str], following: list[str], grad: Tensor) -> None:
        self.fill(names, following)
