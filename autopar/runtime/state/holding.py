"""What a rank holds of parameters: what the plan says of all of them, how each is cut, and the tensors of each trained one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autopar.ir.mesh import COPIES
from autopar.ir.plan import Plan
from autopar.ir.sharding import AxisLayout, S
from autopar.ir.traced import ParameterSpec
from autopar.rewrite.collectives.axes import AxisGroup
from autopar.rewrite.collectives.patterns import Split, pick
from autopar.rewrite.collectives.primitives import apply_primitive
from autopar.runtime.state.pieces import local_part
from autopar.runtime.state.precision import PRECISION_DTYPES, master_dtype
from autopar.runtime.state.zero import Share, gathered, share_of

HOST = torch.device("cpu")
"""Where offloaded tensors are."""


@dataclass(frozen=True, slots=True)
class Cutting:
    """How ranks hold a tensor of `shape`: cut by tp and ep (`splits`, outermost first) to
    `local_shape`, and then by ZeRO (`share`). `layouts` are those of its master (what the optimizer
    trains) and of the master's gradient, by axis.
    """

    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    splits: tuple[tuple[AxisGroup, Split], ...]
    share: Share
    layouts: Mapping[str, AxisLayout]

    @property
    def is_cut(self) -> bool:
        """Whether ranks hold only parts of the tensor."""
        return bool(self.splits or self.share.cuts)

    def part(self, whole: Tensor, axes: Mapping[str, AxisGroup]) -> Tensor:
        """This rank's part of the whole tensor, of `shape`, as a view where that is possible."""
        for group, split in self.splits:
            whole = pick(whole, split, group.size, group.index)
        return self.share.part(whole, axes)

    def joined(self, part: Tensor, axes: Mapping[str, AxisGroup]) -> Tensor:
        """The whole tensor from every rank's part. Every rank that holds one must call it."""
        whole = gathered(part, self.share, axes).reshape(self.local_shape)
        for group, split in reversed(self.splits):
            whole = apply_primitive("all_gather", whole, group, split, None)
        return whole


@dataclass(slots=True)
class Trained:
    """The tensors of one trained parameter (see `parameters.py`). `leaf` is what graphs read, and
    `own` the part that this rank owns, cut as `share` says. `master` is what the optimizer trains.
    `total` is the gradient so far, or None if that is in `leaf.grad`.
    """

    leaf: nn.Parameter
    share: Share
    own: Tensor
    master: nn.Parameter
    total: Tensor | None = None

    @property
    def local(self) -> Tensor:
        """This rank's local tensor of the master, without a DTensor around it."""
        return local_part(self.master)

    @property
    def is_apart(self) -> bool:
        """Whether the master no longer shares memory with `own`, after `master.data = tensor`."""
        return self.master is not self.leaf and self.local.data_ptr() != self.own.data_ptr()

    def rejoin(self) -> None:
        """Copy such a master into `own`. A plain tensor shares its memory again."""
        self.own.copy_(self.local)
        if self.local is self.master:
            self.master.data = self.own

    @property
    def grad(self) -> Tensor | None:
        """The gradient so far: `total`, or if that is None, `leaf.grad`, which may be None too."""
        return self.leaf.grad if self.total is None else self.total


class Holding:
    """What a plan says about the parameters and buffers of this rank.

    `layouts` maps each name to its layouts on the axes with more than one rank.  In `axes` dp is
    divided in two if ZeRO shards within groups of ranks.

    Attributes:
        half: masters have another dtype than leaves, as in half precision.
        offloads: masters and optimizer state are in host memory.
        fetches: parameters are too, and leaves are copied from there.
        sends_each_pass: gradients are reduced in every backward, not once a step.
        by_segment: leaves have memory only while a segment runs.
        cuttings: how each parameter and buffer is cut, by name.
    """

    def __init__(
        self,
        plan: Plan,
        specs: Mapping[str, ParameterSpec],
        layouts: Mapping[str, Mapping[str, AxisLayout]],
        axes: Mapping[str, AxisGroup],
        device: torch.device,
    ) -> None:
        self.plan, self.specs, self.device = plan, specs, device
        self.layouts, self.axes = layouts, axes
        self.dtype, self.master_dtype = (
            PRECISION_DTYPES[plan.precision],
            master_dtype(plan.precision),
        )
        self.half = self.dtype != self.master_dtype
        self.offloads, self.fetches = plan.offload != "none", plan.offload == "parameters"
        self.sends_each_pass = plan.zero >= 2 and self.by_pass
        self.by_segment = self.fetches or (plan.zero == 3 and self.by_pass)
        self.cuttings = {name: self._cutting(spec) for name, spec in specs.items()}

    @property
    def by_pass(self) -> bool:
        """Whether ZeRO-2 and ZeRO-3 communicate in every forward and backward of a segment. In a
        pipeline (False) they do so once a step, as priced.
        """
        return self.plan.mesh.pp == 1

    def _cutting(self, spec: ParameterSpec) -> Cutting:
        layouts, shape, splits = self.layouts.get(spec.name, {}), list(spec.shape), []
        for axis, layout in layouts.items():
            if layout.is_shard:
                group, split = self.axes[axis], Split(layout.dim, shape[layout.dim], layout.pattern)
                splits.append((group, split))
                shape[layout.dim] = split.extent(group.size, group.index)
        shares = spec.trainable and self.plan.zero
        share = share_of(shape, layouts, self.axes) if shares else Share()
        # as the graphs', but sharded over the axes that ZeRO shares out, and from group to group as over all of dp
        of_master = {axis: S(share.dim) if axis in share.axes else x for axis, x in layouts.items()}
        if COPIES in self.axes and "dp" in layouts:
            of_master[COPIES] = layouts["dp"]
        return Cutting(tuple(spec.shape), tuple(shape), tuple(splits), share, of_master)

    def layouts_of_masters(self, names: Iterable[str]) -> dict[str, Mapping[str, AxisLayout]]:
        """For each name, the layouts by mesh axis of the master, which its gradient shares."""
        return {name: self.cuttings[name].layouts for name in names}

    def stored_dtype(self, name: str) -> torch.dtype:
        """The dtype in which a floating-point tensor is to be created: that of masters for trained
        ones, otherwise the precision's. A tensor with `keeps_dtype` keeps its own.
        """
        spec = self.specs[name]
        if spec.keeps_dtype:
            return getattr(torch, spec.dtype)
        return self.master_dtype if spec.trainable else self.dtype

    def home(self, name: str) -> torch.device:
        """The device on which a tensor is to be created: the host if it is an offloaded
        parameter.
        """
        return HOST if self.fetches and self.specs[name].trainable else self.device

    def kept(self, name: str, whole: Tensor) -> Tensor:
        """What this rank keeps of `whole`, the tensor that its graphs read: under ZeRO-3 the part
        that it owns, otherwise all.
        """
        return self.cuttings[name].share.part(whole, self.axes) if self.plan.zero == 3 else whole

    def on_host(self, tensor: Tensor) -> Tensor:
        """A copy in host memory, pinned where that makes transfers faster."""
        pinned = self.device.type == "cuda"
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=HOST, pin_memory=pinned)
        return copy.copy_(tensor.detach())
