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

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from autopar_cost_models.constants import BUCKET_BYTES
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.ir.mesh import COPIES
from autopar.rewrite.collectives.axes import AxisGroup
from autopar.rewrite.collectives.patterns import Split
from autopar.rewrite.program import Program
from autopar.runtime.state.gathering import Gathering
from autopar.runtime.state.gradients import Gradients
from autopar.runtime.state.holding import Cutting, Holding, Trained
from autopar.runtime.state.whole_matrices import WholeMatrices
from autopar.runtime.state.zero import SHARING_AXES, Moving, buckets, copied, gather, gathered


class Parameters:
    """Parameters and buffers of a program on this rank.

    `device_mesh` is that of the masters' device, with dp divided as in the axes of `holding`.  By
    name, `leaves` has the tensors that the program's modules read. `trained` has all tensors of
    each trained parameter, and `masters` those from which the optimizer is built.
    """

    def __init__(self, holding: Holding, device_mesh: DeviceMesh | None) -> None:
        self.holding, self.device_mesh = holding, device_mesh
        self.wholes = WholeMatrices(holding.axes)
        self.leaves: dict[str, Tensor] = {}
        self.trained: dict[str, Trained] = {}
        # on CPU a collective is waited for at once
        self.gathering = Gathering(self._gather, ahead=holding.device.type != "cpu")
        self.gradients = Gradients(holding, self.trained, self.gathering)

    @property
    def copies_masters(self) -> bool:
        """Whether masters are copies of what this rank owns."""
        return self.holding.half or self.holding.plan.offload == "optimizer"

    @property
    def publishes(self) -> bool:
        """Whether graphs read changes of masters after `publish` alone."""
        return self.copies_masters or self.holding.plan.zero in (1, 2) or bool(self.wholes.names)

    @property
    def masters(self) -> dict[str, nn.Parameter]:
        """By name, the tensors that the optimizer updates: DTensors if sharded."""
        return {name: one.master for name, one in self.trained.items()}

    def cuts(self, name: str) -> tuple[tuple[AxisGroup, Split], ...]:
        """The groups over which a master is sharded, outermost first, each with its split: tp and ep,
        then those of ZeRO. () if it is not sharded. () too for a parameter that is updated whole, whose
        owner holds the whole master (`WholeMatrices`).
        """
        if name in self.wholes:
            return ()
        cutting, axes = self.holding.cuttings[name], self.holding.axes
        return (*cutting.splits, *((axes[axis], split) for axis, split in cutting.share.cuts))

    def has_master(self, name: str) -> bool:
        """Whether this rank holds the tensor that the optimizer updates for a trained parameter:
        its own part, or the whole that it owns.
        """
        return name not in self.wholes or self.wholes.owns(name)

    def cut(self, trained: Collection[int]) -> dict[str, Cutting]:
        """By name, how ranks cut those parameters of which this rank holds only a part. Only
        parameters count whose master's id() is in `trained`.
        """
        found = {name: self.holding.cuttings[name] for name in self.trained}
        return {
            name: cutting
            for name, cutting in found.items()
            if cutting.is_cut and id(self.trained[name].master) in trained
        }

    @torch.no_grad()
    def update_whole(self, cut: Mapping[str, Cutting], everywhere: bool) -> None:
        """From now on, update the parameters `cut` whole: each on one rank, or if `everywhere`, all
        on every rank. Replaces their masters by whole tensors. Other masters that no axis cuts
        become plain tensors. Every rank must call it.
        """
        holding = self.holding
        self.wholes.choose(cut, everywhere)
        for name, one in self.trained.items():
            if name not in cut and hasattr(one.master, "device_mesh") and not self.cuts(name):
                one.master = nn.Parameter(one.local)
        for name in cut:
            one = self.trained[name]
            whole = self.wholes.joined(name, one.local.to(holding.device))
            owned = holding.on_host(whole) if holding.offloads else whole
            one.master = (
                nn.Parameter(owned)
                if self.wholes.owns(name)
                else self.wholes.placeholder(name, owned)
            )

    def masters_as_local(self) -> dict[int, nn.Parameter]:
        """Replace each master that is a DTensor by a parameter over its local tensor. Returns the new
        masters by id() of the old ones.
        """
        new: dict[int, nn.Parameter] = {}
        for one in self.trained.values():
            if hasattr(one.master, "device_mesh"):
                new[id(one.master)] = master = nn.Parameter(one.local)
                one.master = master
        return new

    @torch.no_grad()
    def write(self, name: str, whole: Tensor) -> None:
        """Set a parameter or buffer to this rank's part of the whole tensor `whole`. Graphs read a
        trained one after `publish`.
        """
        part = self.holding.cuttings[name].part(whole, self.holding.axes)
        if name not in self.trained:
            self.leaves[name].copy_(part)
        elif name not in self.wholes:
            self.trained[name].local.copy_(part)
        elif self.wholes.owns(name):
            self.trained[name].master.copy_(whole)

    # ----------------------------------------------------------------------------------------------------------------- set up

    def install(
        self, program: Program, tensors: Mapping[str, Tensor], device: torch.device
    ) -> None:
        """Create leaves and masters from this rank's tensors (by name, the part that `Holding.kept`
        gives), and put the leaves in place of the program's meta parameters. Tied slots share one
        tensor.
        """
        for name, spec in self.holding.specs.items():
            if spec.trainable:
                self.leaves[name] = self._train(name, tensors[name])
            elif spec.buffer:
                self.leaves[name] = tensors[name]
            else:
                self.leaves[name] = nn.Parameter(tensors[name], requires_grad=False)
        self.give(program, device)

    def give(self, program: Program, device: torch.device) -> None:
        """Make the modules of a program read the installed leaves. Its other buffers move to
        `device`.
        """
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
        """Make this module's segments fill their leaves when they run, if leaves have memory only
        while a segment runs. Its segments must read the same leaves.
        """
        if self.holding.by_segment:
            self.gathering.watch(module)

    def _train(self, name: str, tensor: Tensor) -> nn.Parameter:
        """Register a trained parameter: make its leaf and its master, and watch its gradient.
        Returns the leaf. `tensor` is what `Holding.kept` keeps, on the device (or host) where
        it rests. A gathered leaf starts without memory.
        """
        holding, cutting = self.holding, self.holding.cuttings[name]
        share, own = cutting.share, tensor.to(holding.dtype)
        gathers = holding.fetches or (holding.plan.zero == 3 and share.cuts)
        if gathers:
            leaf = self.gathering.empty(name, cutting.local_shape, holding.dtype, holding.device)
            part = tensor
        else:
            leaf = nn.Parameter(own)
            own, part = share.part(leaf.detach(), holding.axes), share.part(tensor, holding.axes)
        if holding.offloads:
            master = nn.Parameter(holding.on_host(part))
        elif gathers:
            master = nn.Parameter(part)
        elif holding.half:
            master = nn.Parameter(part.clone(memory_format=torch.contiguous_format))
        else:
            master = nn.Parameter(own) if share.cuts else leaf
        if holding.fetches:
            own = holding.on_host(own) if holding.half else master.detach()
        self.trained[name] = Trained(leaf, share, own, self._distributed(name, master))
        self.gradients.watch(name)
        return leaf

    def _distributed(self, name: str, local: nn.Parameter) -> nn.Parameter:
        """What the optimizer sees of a master: a DTensor that shares storage with `local`, over ep
        and tp, and over the axes that ZeRO shards over. `local` itself if none of these has several
        ranks.
        """
        cutting, groups = self.holding.cuttings[name], self.holding.axes
        sharing = (COPIES, *SHARING_AXES) if self.holding.plan.zero else ("ep",)
        axes = tuple(axis for axis in (*sharing, "tp") if axis in groups and groups[axis].size > 1)
        if self.device_mesh is None or not axes:
            return local
        from torch.distributed.tensor import DTensor, Replicate, Shard

        layouts = cutting.layouts
        placements = [
            Shard(layouts[axis].dim) if axis in layouts and layouts[axis].is_shard else Replicate()
            for axis in axes
        ]
        shape = torch.Size(cutting.shape)
        stride = torch.empty(shape, device="meta").stride()
        mesh = self.device_mesh[axes if len(axes) > 1 else axes[0]]
        return nn.Parameter(
            DTensor.from_local(
                local.detach(), mesh, placements, run_check=False, shape=shape, stride=stride
            )
        )

    # --------------------------------------------------------------------------------------------------------------- the step

    def hand_over(self) -> None:
        """Set the gradient of each master that this rank updates, in the form that the optimizer
        expects: whole, in host memory or a DTensor if the master is.
        """
        holding = self.holding
        for name, grad in self.gradients.so_far().items():
            one = self.trained[name]
            if one.master is one.leaf:
                continue
            whole = name in self.wholes
            if whole:
                grad = self.wholes.joined(name, grad)
            if whole or holding.offloads:
                one.total = one.leaf.grad = None  # the device needs it no more
            if not self.has_master(name):
                continue
            if holding.offloads:
                grad = holding.on_host(grad)
            if (spec := getattr(one.master, "_spec", None)) is not None:
                from torch.distributed.tensor import DTensor

                grad = DTensor(grad, spec, requires_grad=False)  # from_local takes 0.1 ms
            one.master.grad = grad

    @torch.no_grad()
    def rescale(self, name: str, factors: Tensor) -> None:
        """Multiply a parameter or buffer, in place. `factors` has the shape of `whole(name)`. Every
        rank that holds it must call it.
        """
        if name not in self.trained:
            self.leaves[name].mul_(factors)
            return
        one = self.trained[name]
        one.local.mul_(one.share.part(factors, self.holding.axes).to(one.local.device))
        self.publish([name])

    @torch.no_grad()
    def publish(self, names: Collection[str] | None = None) -> None:
        """Copy the updated masters into the tensors that graphs read, by default of all trained
        parameters. Under ZeRO-1 and ZeRO-2, all-gather the leaves; ZeRO-3 gathers them when
        segments run.
        """
        holding = self.holding
        updated = {name: self.trained[name] for name in (self.trained if names is None else names)}
        for name, one in updated.items():
            if name in self.wholes:
                one.own.copy_(self._part(name, holding.dtype))
            elif self.copies_masters:
                one.own.copy_(one.local)
            elif one.is_apart:
                one.rejoin()
        if holding.plan.zero in (1, 2):
            cut = [name for name, one in updated.items() if one.share.cuts]
            for bucket in buckets(cut, lambda name: self.leaves[name].nbytes, BUCKET_BYTES):
                for name, whole in zip(bucket, self._gather(bucket).wait(), strict=True):
                    copied(self.leaves[name], whole)

    def _part(self, name: str, dtype: torch.dtype) -> Tensor:
        """This rank's part, in `dtype`, of a parameter that is updated whole. Its owner sends the
        parts, so every rank must call it.
        """
        master = self.trained[name].master.detach() if self.wholes.owns(name) else None
        return self.wholes.part(name, master, dtype, self.holding.device)

    def _gather(self, names: Sequence[str]) -> Moving:
        """Start to gather the whole tensors of parameters from every rank's own parts."""
        ones = [self.trained[name] for name in names]
        parts = [one.own.to(self.holding.device, non_blocking=True) for one in ones]
        return Moving(gather(parts, [one.share for one in ones], self.holding.axes))

    def present(self) -> AbstractContextManager:
        """A context for running the program, after which no gathered parameter has memory. In a
        pipeline all are gathered throughout.
        """
        return self.gathering.holding(not self.holding.by_pass)

    @torch.no_grad()
    def whole(self, name: str) -> Tensor:
        """A parameter or buffer as a tp or ep shard, whole over the axes that ZeRO shards over.
        Trained ones have the master's dtype. Every rank must call it.
        """
        if name not in self.trained:
            return self.leaves[name].detach()
        holding, one = self.holding, self.trained[name]
        if name in self.wholes:
            part = self._part(name, holding.master_dtype)
        elif one.share.cuts and (holding.plan.zero == 3 or holding.half):
            part = one.local.to(holding.device)
        else:
            return (
                one.local.to(holding.device)
                if holding.half or holding.fetches
                else one.leaf.detach()
            )
        return gathered(part, one.share, holding.axes).reshape(one.leaf.shape)
