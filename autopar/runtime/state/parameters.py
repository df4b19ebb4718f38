"""The trained parameters of one rank: what its graphs read, what it owns, what the optimizer
updates, and where gradients accumulate.

- leaf: the tensor that graphs read, whole over dp, in the precision's dtype. Under ZeRO-3, and if
  the plan offloads parameters, it has memory only while a segment runs.
- own: this rank's part of the leaf (`zero.py`): the leaf itself, a view (ZeRO-1, ZeRO-2), or a
  separate tensor (ZeRO-3). It is in host memory if the plan offloads parameters.
- master: what the optimizer trains: a DTensor over `own`, or over its copy. The copy is in fp32
  for half precision, and in host memory if the plan offloads only the optimizer. For a parameter
  that is updated whole, it is the whole tensor, on its owner (`whole_matrices.py`).
- total: the gradient so far, if that is not `leaf.grad`: a part (ZeRO-2, ZeRO-3), or fp32 if the
  leaf's gradient is half precision.

ZeRO-0 and ZeRO-1 reduce gradients once, at the end of a step. ZeRO-2 and ZeRO-3 reduce them in
every backward, in buckets as they become ready, so that no rank holds all of them. ZeRO-1 and
ZeRO-2 gather updated parameters once a step. ZeRO-3 gathers those of a segment before its forward
and again before its backward (`gathering.py`). In a pipeline, ZeRO-3 gathers and reduces once a
step. If ZeRO shards within groups of ranks, all of this happens within a group, and gradients are
summed over groups once a step.

An offloaded tensor is in host memory for every type of device. Its inputs and outputs are copied
even from CPU to CPU. A program on CPU processes thus holds the same bytes as on a device and its
host. Offloaded parameters are fetched before every pass of a segment, as ZeRO-3 gathers them, and
are then gathered if they are parts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from weakref import WeakMethod

import torch
from autopar_cost_models.constants import BUCKET_BYTES
from torch import Tensor, nn

from autopar.ir.mesh import COPIES
from autopar.ir.plan import Plan
from autopar.ir.sharding import Layout, S, local_extent
from autopar.ir.traced import ParameterSpec
from autopar.rewrite.collectives.axes import AxisGroup
from autopar.rewrite.collectives.patterns import Split
from autopar.rewrite.program import Program
from autopar.runtime.state.gathering import Gathering
from autopar.runtime.state.gradients import add_up
from autopar.runtime.state.precision import PRECISIONS, master_dtype
from autopar.runtime.state.whole_matrices import Cutting, WholeMatrices
from autopar.runtime.state.zero import (
    SHARING_AXES,
    Moving,
    Share,
    buckets,
    copied,
    gather,
    scatter,
    share_of,
)

HOST = torch.device("cpu")
"""The device of offloaded tensors."""


@dataclass(slots=True)
class Trained:
    """One trained parameter. The module docstring describes its tensors."""

    leaf: nn.Parameter
    share: Share
    own: Tensor
    master: nn.Parameter
    total: Tensor | None = None

    @property
    def local(self) -> Tensor:
        """This rank's part of the master, as a plain tensor."""
        data = self.master.detach()
        return data.to_local() if hasattr(data, "to_local") else data


class Parameters:
    """The parameters and buffers of a program on this rank.

    `host` is the device of offloaded tensors, or None. `device_mesh` is on the device of the
    masters. `layouts` maps each name to its layouts on the axes with more than one rank. If ZeRO
    shards within groups, dp is divided accordingly in `axes` and `device_mesh`. `leaves` are the
    tensors in the program's modules, `masters` those that the optimizer is built from; both by
    name.
    """

    def __init__(
        self,
        program: Program,
        specs: Mapping[str, ParameterSpec],
        layouts: Mapping[str, Mapping[str, Layout]],
        plan: Plan,
        axes: Mapping[str, AxisGroup],
        device_mesh: Any,
        device: torch.device,
    ) -> None:
        self.plan, self.axes, self.device_mesh, self.specs = plan, axes, device_mesh, specs
        self._layouts = layouts
        self.dtype, self.master_dtype = PRECISIONS[plan.precision], master_dtype(plan.precision)
        self.device, self.host = device, HOST if plan.offload != "none" else None
        self.half = self.dtype != self.master_dtype
        self._fetched = plan.offload == "parameters"
        self._copied = self.half or plan.offload == "optimizer"  # whether masters are copies
        self._each_backward = plan.zero >= 2 and self.by_pass
        # whether leaves have memory while a segment runs
        self._by_segment = self._fetched or (plan.zero == 3 and self.by_pass)
        self._shares = {
            name: share_of(self._local_shape(name), layouts.get(name, {}), axes)
            if spec.trainable and plan.zero
            else Share()
            for name, spec in specs.items()
        }
        self.wholes = WholeMatrices(axes)
        self.leaves: dict[str, Tensor] = {}
        self.trained: dict[str, Trained] = {}
        self._ready: list[str] = []
        self._ready_bytes = 0
        self._travelling: tuple[list[str], Moving] | None = None
        # on CPU a collective is waited for at once
        self.gathering = Gathering(self._gather, ahead=device.type != "cpu")

    @property
    def by_pass(self) -> bool:
        """Whether ZeRO-2 and ZeRO-3 communicate in every pass of a segment. In a pipeline they do
        so once a step, as it is priced.
        """
        return self.plan.mesh.pp == 1

    @property
    def masters(self) -> dict[str, nn.Parameter]:
        """The tensors that the optimizer updates, by name."""
        return {name: one.master for name, one in self.trained.items()}

    def _local_shape(self, name: str) -> tuple[int, ...]:
        shape = list(self.specs[name].shape)
        for axis, layout in self._layouts.get(name, {}).items():
            if layout.is_shard:
                shape[layout.dim] = local_extent(
                    shape[layout.dim], self.axes[axis].size, self.axes[axis].index, layout.pattern
                )
        return tuple(shape)

    def splits(self, name: str) -> tuple[tuple[AxisGroup, Split], ...]:
        """The groups over which tp and ep shard a tensor, outermost first, each with how it splits
        what the outer ones leave.
        """
        found, shape = [], list(self.specs[name].shape)
        for axis, layout in self._layouts.get(name, {}).items():
            if layout.is_shard:
                group = self.axes[axis]
                found.append((group, Split(layout.dim, shape[layout.dim], layout.pattern)))
                shape[layout.dim] = local_extent(
                    shape[layout.dim], group.size, group.index, layout.pattern
                )
        return tuple(found)

    def cuts(self, name: str) -> tuple[tuple[AxisGroup, Split], ...]:
        """The groups over which a master is sharded, outermost first, each with its split: tp and
        ep, then those of ZeRO.
        """
        if name in self.wholes:
            return ()
        return (
            *self.splits(name),
            *((self.axes[axis], split) for axis, split in self._shares[name].cuts),
        )

    def has_master(self, name: str) -> bool:
        """Whether this rank holds the tensor that the optimizer updates for a trained parameter:
        its own part, or the whole that it owns.
        """
        return name not in self.wholes or self.wholes.owns(name)

    def cut(self, trained: Collection[int]) -> dict[str, Cutting]:
        """The parameters of which this rank holds only a part, among those whose master's id is in
        `trained`.
        """
        found = {
            name: Cutting(
                tuple(self.specs[name].shape),
                self._local_shape(name),
                self.splits(name),
                self._shares[name],
            )
            for name, one in self.trained.items()
            if id(one.master) in trained
        }
        return {name: cutting for name, cutting in found.items() if cutting.is_cut}

    @torch.no_grad()
    def update_whole(self, cut: Mapping[str, Cutting], everywhere: bool) -> None:
        """From now on, update these parameters whole: each on one rank, or all on every rank.
        Masters that every rank holds whole become plain tensors. Every rank must call it.
        """
        self.wholes.choose(cut, everywhere)
        for name, one in self.trained.items():
            if name not in cut and hasattr(one.master, "device_mesh") and not self.cuts(name):
                one.master = nn.Parameter(one.local)
        for name in cut:
            one = self.trained[name]
            whole = self.wholes.joined(name, one.local.to(self.device))
            owned = self._on_host(whole) if self.host is not None else whole
            one.master = (
                nn.Parameter(owned)
                if self.wholes.owns(name)
                else self.wholes.placeholder(name, owned)
            )

    # ----------------------------------------------------------------------------------------------------------------- set up

    def stored_dtype(self, name: str) -> torch.dtype:
        """The dtype in which a floating-point tensor is created. Trained ones keep the digits that
        half precision would round.
        """
        spec = self.specs[name]
        if spec.keeps_dtype:
            return getattr(torch, spec.dtype)
        return self.master_dtype if spec.trainable else self.dtype

    def home(self, name: str) -> torch.device:
        """The device on which a tensor is created."""
        return self.host if self._fetched and self.specs[name].trainable else self.device

    def kept(self, name: str, whole: Tensor) -> Tensor:
        """The part of a graph tensor that this rank keeps."""
        return self._shares[name].part(whole, self.axes) if self.plan.zero == 3 else whole

    def install(
        self, program: Program, tensors: Mapping[str, Tensor], device: torch.device
    ) -> None:
        """Replace the program's meta parameters by local tensors, which are the parts that `kept`
        returned. Tied slots share one tensor.
        """
        for name, spec in self.specs.items():
            if not spec.trainable:
                self.leaves[name] = (
                    tensors[name]
                    if spec.buffer
                    else nn.Parameter(tensors[name], requires_grad=False)
                )
            else:
                self.leaves[name] = self._train(name, tensors[name])
        self.give(program, device)

    def give(self, program: Program, device: torch.device) -> None:
        """Make a program read the installed tensors."""
        for parameter in program.parameters:
            holder = getattr(program.module, parameter.module)
            (holder._buffers if parameter.spec.buffer else holder._parameters)[
                parameter.attribute
            ] = self.leaves[parameter.spec.name]
        for module in program.module.children():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.device != device:
                    module._buffers[name] = buffer.to(device)
        self.watch(program.module)

    def watch(self, module: nn.Module) -> None:
        """Fill the leaves for this module's segments when they run, if leaves are emptied in
        between. Its segments read the same leaves.
        """
        if self._by_segment:
            self.gathering.watch(module)

    def _train(self, name: str, tensor: Tensor) -> nn.Parameter:
        """Register a trained parameter and return its leaf. `tensor` is the part that `kept`
        returned, at its `home`.
        """
        share, own = self._shares[name], tensor.to(self.dtype)
        gathers = self._fetched or (self.plan.zero == 3 and share.cuts)
        leaf = (
            self.gathering.empty(name, self._local_shape(name), self.dtype, self.device)
            if gathers
            else nn.Parameter(own)
        )
        master = leaf
        if gathers:
            master = nn.Parameter(tensor)
        elif share.cuts:
            own = share.part(leaf.detach(), self.axes)
            master = nn.Parameter(own)
        if self.host is not None:
            master = nn.Parameter(
                self._on_host(tensor if gathers else share.part(tensor, self.axes))
            )
            if self._fetched:
                own = self._on_host(own) if self.half else master.detach()
        elif self.half and not gathers:
            master = nn.Parameter(
                share.part(tensor, self.axes).clone(memory_format=torch.contiguous_format)
            )
        self.trained[name] = Trained(leaf, share, own, self._distributed(name, master))
        if self.half or self._each_backward or self._by_segment:
            # autograd holds its hooks where no collector of garbage looks
            take = WeakMethod(self._take)
            leaf.register_post_accumulate_grad_hook(
                lambda leaf: (own := take()) and own(name, leaf)
            )
        return leaf

    def _on_host(self, tensor: Tensor) -> Tensor:
        """A copy in host memory, pinned if that speeds up transfers."""
        copy = torch.empty(
            tensor.shape,
            dtype=tensor.dtype,
            device=self.host,
            pin_memory=self.device.type == "cuda",
        )
        return copy.copy_(tensor.detach())

    def _distributed(self, name: str, local: nn.Parameter) -> nn.Parameter:
        """The tensor that the optimizer sees: a DTensor that shares storage with `local`, over ep
        and tp, and over the axes that ZeRO shards over.
        """
        sharing = (COPIES, *SHARING_AXES) if self.plan.zero else ("ep",)
        axes = tuple(
            axis for axis in (*sharing, "tp") if axis in self.axes and self.axes[axis].size > 1
        )
        if self.device_mesh is None or not axes:
            return local
        from torch.distributed.tensor import DTensor, Replicate, Shard

        layouts = self.effective_layouts({name: self._layouts.get(name, {})})[name]
        placements = [
            Shard(layouts[axis].dim) if axis in layouts and layouts[axis].is_shard else Replicate()
            for axis in axes
        ]
        shape = torch.Size(self.specs[name].shape)
        stride = torch.empty(shape, device="meta").stride()
        mesh = self.device_mesh[axes if len(axes) > 1 else axes[0]]
        return nn.Parameter(
            DTensor.from_local(
                local.detach(), mesh, placements, run_check=False, shape=shape, stride=stride
            )
        )

    def effective_layouts(
        self, layouts: Mapping[str, Mapping[str, Layout]]
    ) -> dict[str, dict[str, Layout]]:
        """The layouts of masters and their gradients: those of the graphs, but sharded over the
        axes that ZeRO shards over. From one ZeRO group to the next they are as on dp.
        """
        found = {
            name: {
                axis: S(self._shares[name].dim) if axis in self._shares[name].axes else layout
                for axis, layout in own.items()
            }
            for name, own in layouts.items()
        }
        if COPIES in self.axes:
            found = {
                name: own | ({COPIES: layouts[name]["dp"]} if "dp" in own else {})
                for name, own in found.items()
            }
        return found

    # -------------------------------------------------------------------------------------------------------------- gradients

    def _take(self, name: str, leaf: Tensor) -> None:
        """Hook for a complete gradient of a leaf in backward: move the gradient to where it
        accumulates.
        """
        if self._by_segment:
            self.gathering.free([name])
        if not self._each_backward:
            if self.half:
                self._add(name, leaf.grad)
                leaf.grad = None
            return
        segment = self.gathering.segment_of.get(name)
        if (
            self._ready
            and self.plan.zero == 3
            and self.gathering.segment_of.get(self._ready[-1]) != segment
        ):
            self._flush()  # of the segment before
        self._ready.append(name)
        self._ready_bytes += leaf.grad.numel() * self.master_dtype.itemsize
        if self._ready_bytes >= BUCKET_BYTES:
            self._flush()

    def _flush(self) -> None:
        """Start to reduce the ready gradients, after the previous bucket has arrived."""
        names, self._ready, self._ready_bytes = self._ready, [], 0
        self._arrive()
        self._travelling = names, self._scatter(names, [self.leaves[name].grad for name in names])
        for name in names:
            self.leaves[name].grad = None

    def _arrive(self) -> None:
        """Wait for the bucket in transit."""
        if self._travelling is not None:
            (names, moving), self._travelling = self._travelling, None
            for name, part in zip(names, moving.wait(), strict=True):
                self._add(name, part)

    def _scatter(self, names: Sequence[str], grads: Sequence[Tensor]) -> Moving:
        wide = [grad.to(self.master_dtype) for grad in grads]
        shares, layouts = (
            [self._shares[name] for name in names],
            [self._layouts.get(name, {}) for name in names],
        )
        return Moving(scatter(wide, shares, layouts, self.axes))

    def _add(self, name: str, grad: Tensor) -> None:
        one = self.trained[name]
        if one.total is None:
            one.total = grad.to(self.master_dtype)
        else:
            one.total.add_(grad)

    def after_backward(self) -> None:
        """Finish the backward of one micro-batch. It must be called after each."""
        if self._ready:
            self._flush()
        self._arrive()
        if self._by_segment:
            self.gathering.free()

    def gradients(self) -> dict[str, Tensor]:
        """The accumulated gradients by name. After `reduce`, those that the optimizer receives."""
        found = {
            name: one.leaf.grad if one.total is None else one.total
            for name, one in self.trained.items()
        }
        return {name: grad for name, grad in found.items() if grad is not None}

    def change_gradient(self, name: str, change: Callable[[Tensor], Tensor]) -> None:
        """Replace the accumulated gradient (zeros if there is none) by `change(gradient)`."""
        one = self.trained[name]
        grad = one.leaf.grad if one.total is None else one.total
        self._put(
            name,
            change(torch.zeros_like(one.leaf, dtype=self.master_dtype) if grad is None else grad),
        )

    def _put(self, name: str, grad: Tensor) -> None:
        """Set the accumulated gradient."""
        one = self.trained[name]
        if self.half or one.total is not None:
            one.total = grad
        else:
            one.leaf.grad = grad

    def reduce(self, layouts: Mapping[str, Mapping[str, Layout]]) -> None:
        """Sum partial gradients, and keep the parts that this rank owns. Called once a step."""
        grads = self.gradients()
        if self.plan.zero and not self._each_backward:
            cut = [name for name in grads if self._shares[name].cuts]
            for names in buckets(
                cut, lambda name: grads[name].numel() * self.master_dtype.itemsize, BUCKET_BYTES
            ):
                for name, part in zip(
                    names, self._scatter(names, [grads[name] for name in names]).wait(), strict=True
                ):
                    self.trained[name].total, self.leaves[name].grad = part, None
            grads = self.gradients()
        add_up(grads, self.effective_layouts(layouts), self.axes, self._put)

    def hand_over(self) -> None:
        """Set the gradient of each master."""
        for name, grad in self.gradients().items():
            master = self.trained[name].master
            if name in self.wholes:
                whole = self.wholes.joined(name, grad)
                self.trained[name].total = self.leaves[name].grad = None
                if self.wholes.owns(name):
                    master.grad = whole if self.host is None else self._on_host(whole)
                continue
            if master is self.leaves[name]:
                continue
            if self.host is not None:
                grad = self._on_host(grad)
                self.trained[name].total = self.leaves[name].grad = (
                    None  # the device needs it no more
                )
            if hasattr(master, "device_mesh"):
                from torch.distributed.tensor import DTensor

                grad = DTensor(grad, master._spec, requires_grad=False)  # from_local takes 0.1 ms
            master.grad = grad

    def clear(self) -> None:
        """Drop all gradients."""
        for one in self.trained.values():
            one.leaf.grad = one.master.grad = one.total = None

    # ------------------------------------------------------------------------------------------------------------- after the step

    @torch.no_grad()
    def publish(self) -> None:
        """Update the leaves from the masters."""
        for name, one in self.trained.items():
            if name in self.wholes:
                one.own.copy_(self._part(name, self.dtype))
            elif self._copied:
                one.own.copy_(one.local)
        if self.plan.zero in (1, 2):
            cut = [name for name, one in self.trained.items() if one.share.cuts]
            for names in buckets(cut, lambda name: self.leaves[name].nbytes, BUCKET_BYTES):
                for name, whole in zip(names, self._gather(names).wait(), strict=True):
                    copied(self.leaves[name], whole)

    def _part(self, name: str, dtype: torch.dtype) -> Tensor:
        """This rank's part of a parameter that is updated whole."""
        master = self.trained[name].master.detach() if self.wholes.owns(name) else None
        return self.wholes.part(name, master, dtype, self.device)

    def _gather(self, names: Sequence[str]) -> Moving:
        """Start to gather the whole tensors of parameters from every rank's own parts."""
        ones = [self.trained[name] for name in names]
        parts = [one.own.to(self.device, non_blocking=True) for one in ones]
        return Moving(gather(parts, [one.share for one in ones], self.axes))

    def present(self) -> AbstractContextManager:
        """A context for running the program, after which no gathered parameter has memory. In a
        pipeline all are gathered throughout.
        """
        return self.gathering.holding(not self.by_pass)

    @torch.no_grad()
    def whole(self, name: str) -> Tensor:
        """A parameter or buffer as a tp or ep shard, whole over the axes that ZeRO shards over.
        Trained ones have the master's dtype. Every rank must call it.
        """
        if name not in self.trained:
            return self.leaves[name].detach()
        one = self.trained[name]
        if name in self.wholes:
            part = self._part(name, self.master_dtype)
            return Moving(gather([part], [one.share], self.axes)).wait()[0].reshape(one.leaf.shape)
        if one.share.cuts and (self.plan.zero == 3 or self.half):
            return (
                Moving(gather([one.local.to(self.device)], [one.share], self.axes))
                .wait()[0]
                .reshape(one.leaf.shape)
            )
        return one.local.to(self.device) if self.half or self._fetched else one.leaf.detach()
