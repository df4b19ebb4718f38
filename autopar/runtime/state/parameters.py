"""The trained parameters of one rank: what its graphs read, what it owns, what the optimizer updates, and how gradients get there.

    leaf     the tensor that graphs read: whole over dp, in the precision's dtype; under ZeRO-3, and where the plan offloads parameters, it
             has memory only while a segment runs
    own      this rank's part of it (`zero.py`): the leaf itself, a view of it (ZeRO 1, 2), or a tensor of its own (ZeRO 3), in host
             memory where the plan offloads parameters
    master   what the optimizer trains: a DTensor over `own`, or over a copy of it: in fp32 where the precision is half, in host memory
             where the plan offloads the optimizer alone; of a parameter that is updated whole the whole, on its owner
             (`whole_matrices.py`)
    total    the gradient so far, where that is not `leaf.grad`: a part (ZeRO 2, 3), or fp32 where the leaf's is half

Of a step, ZeRO 0 and 1 reduce gradients once, at its end; 2 and 3 in every backward, in buckets as gradients become ready, so that no rank
ever holds all of them.  1 and 2 gather the updated parameters once a step; 3 gathers those of a segment before its forward and again before
its backward (`gathering.py`), and in a pipeline once a step, as gradients are reduced once a step there.  Where groups of ranks share
out, all that is within a group; what it has of gradients is added up over the groups once a step.

An offloaded tensor is in host memory whatever the device is: what it is given and gives back is copied even from CPU to CPU, so that a
program holds on CPU processes what it would hold on a device, and what it would hold beside one.  Offloaded parameters are fetched as those
of ZeRO 3 are gathered, before every pass of a segment, and then gathered if they are parts.
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

    `device_mesh` is of the device of the masters, with dp parted as in the axes of `holding`.  `leaves` are what the program's modules
    hold, `masters` what the optimizer is built from; both by name.
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
    def masters(self) -> dict[str, nn.Parameter]:
        """What the optimizer updates, by name."""
        return {name: one.master for name, one in self.trained.items()}

    def cuts(self, name: str) -> tuple[tuple[AxisGroup, Split], ...]:
        """The groups over which a master is cut, outermost first, and what each cuts: tp and ep, and then those of ZeRO."""
        if name in self.wholes:
            return ()
        cutting, axes = self.holding.cuttings[name], self.holding.axes
        return (*cutting.splits, *((axes[axis], split) for axis, split in cutting.share.cuts))

    def has_master(self, name: str) -> bool:
        """Whether this rank holds what the optimizer updates of a trained parameter: its own part, or the whole that it owns."""
        return name not in self.wholes or self.wholes.owns(name)

    def cut(self, trained: Collection[int]) -> dict[str, Cutting]:
        """The parameters of which this rank holds a part, among those whose master's id is in `trained`."""
        found = {name: self.holding.cuttings[name] for name in self.trained}
        return {
            name: cutting
            for name, cutting in found.items()
            if cutting.is_cut and id(self.trained[name].master) in trained
        }

    @torch.no_grad()
    def update_whole(self, cut: Mapping[str, Cutting], everywhere: bool) -> None:
        """From now on update these parameters whole: by one rank each, or by every rank.  Masters that every rank holds whole become plain
        tensors.  Every rank must call."""
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

    # ----------------------------------------------------------------------------------------------------------------- set up

    def install(
        self, program: Program, tensors: Mapping[str, Tensor], device: torch.device
    ) -> None:
        """Put local tensors, of which `Holding.kept` says which part, in place of the program's meta parameters.  Tied slots share one
        tensor."""
        for name, spec in self.holding.specs.items():
            if spec.trainable:
                self.leaves[name] = self._train(name, tensors[name])
            elif spec.buffer:
                self.leaves[name] = tensors[name]
            else:
                self.leaves[name] = nn.Parameter(tensors[name], requires_grad=False)
        self.give(program, device)

    def give(self, program: Program, device: torch.device) -> None:
        """Let a program read the installed tensors."""
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
        """Fill leaves for this module's segments, which read the same ones, if they are empty between."""
        if self.holding.by_segment:
            self.gathering.watch(module)

    def _train(self, name: str, tensor: Tensor) -> nn.Parameter:
        """The leaf of a parameter, of which `tensor` is what `Holding.kept` keeps, at its home."""
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
        """What the optimizer sees: a DTensor that shares storage with `local`, over ep and tp, and over the axes that ZeRO shares out."""
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
        """Give each master its gradient."""
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
    def publish(self) -> None:
        """Make the leaves what the masters have become."""
        holding = self.holding
        for name, one in self.trained.items():
            if name in self.wholes:
                one.own.copy_(self._part(name, holding.dtype))
            elif holding.half or holding.plan.offload == "optimizer":  # masters are copies
                one.own.copy_(one.local)
        if holding.plan.zero in (1, 2):
            cut = [name for name, one in self.trained.items() if one.share.cuts]
            for names in buckets(cut, lambda name: self.leaves[name].nbytes, BUCKET_BYTES):
                for name, whole in zip(names, self._gather(names).wait(), strict=True):
                    copied(self.leaves[name], whole)

    def _part(self, name: str, dtype: torch.dtype) -> Tensor:
        """This rank's part of a parameter that is updated whole."""
        master = self.trained[name].master.detach() if self.wholes.owns(name) else None
        return self.wholes.part(name, master, dtype, self.holding.device)

    def _gather(self, names: Sequence[str]) -> Moving:
        """The wholes of parameters, from every rank's own parts."""
        ones = [self.trained[name] for name in names]
        parts = [one.own.to(self.holding.device, non_blocking=True) for one in ones]
        return Moving(gather(parts, [one.share for one in ones], self.holding.axes))

    def present(self) -> AbstractContextManager:
        """A block that runs the program; after it no gathered parameter is left.  In a pipeline all are gathered for all of it."""
        return self.gathering.holding(not self.holding.by_pass)

    @torch.no_grad()
    def whole(self, name: str) -> Tensor:
        """A parameter or buffer as a tp or ep shard, whole over the axes that ZeRO shares out; trained ones in the master's dtype.  Every
        rank must call."""
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
