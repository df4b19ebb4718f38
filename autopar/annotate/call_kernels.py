"""The kernel time of one call under one strategy, from the shapes of this rank's shards."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from math import ceil, prod

from torch.fx import Node

from autopar.annotate.fusion import FusedShare
from autopar.annotate.kernels import FREE_KERNEL, KernelTime, MatrixProduct, Shape, product_of
from autopar.annotate.linear_losses import LinearLoss, linear_loss_time
from autopar.annotate.local_class import LocalClass
from autopar.annotate.transfers import attention_of
from autopar.ir.annotated import Saved
from autopar.ir.calls import is_attention, op_name
from autopar.ir.fusion import LINEAR_LOSS
from autopar.ir.plan_fields import AxisChoice
from autopar.ops.convolution import CONVOLUTIONS
from autopar.ops.dims import Call, OpDims
from autopar.ops.experts import ROUTED_EXPERTS
from autopar.ops.random import drops
from autopar.ops.strategies import OpStrategy, letter_of

_LOOKUPS = {
    f"aten::{name}" for name in ("embedding", "index", "index_select", "gather", "take_along_dim")
}
_CONVOLUTIONS = {f"aten::{name}" for name in CONVOLUTIONS if name.startswith("conv")}
_NORM_KERNELS = 7  # forward of a composite norm; those of backward are about as many
_GROUPED = ("autopar::grouped_mm", "aten::_grouped_mm")


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedCall:
    """A call under one strategy, as its kernels see it on one rank.

    Attributes:
        node: the call.
        dims: the op's dims, named by letters; None if the op has no rule.
        names, outs: names of the operands and of the results.
        grads: for each operand, whether backward computes its gradient.
        added: for each operand, whether autograd adds that gradient to another one.
        fixed: the choices on the axes that propagation decides, by axis.
        shares: which operands and results a fused kernel moves; None if the op is not fused.
        choice: the strategy over tp.
        read, written: bytes of this rank's operands and results.
        kept: the tensors that autograd keeps.
    """

    node: Node
    dims: OpDims | None
    names: tuple[str, ...]
    outs: tuple[str, ...]
    grads: tuple[bool, ...]
    added: tuple[bool, ...]
    fixed: dict[str, AxisChoice]
    shares: FusedShare | None
    choice: OpStrategy
    read: list[int]
    written: list[int]
    kept: tuple[Saved, ...]

    @property
    def letters(self) -> OpDims:
        """The op's dims, named by letters. ValueError if the op has no rule."""
        if self.dims is None:
            raise ValueError(f"{self.node.name} ({self.node.target}) has no letters")
        return self.dims

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients of all operands that get one."""
        return sum(b for b, grad in zip(self.read, self.grads, strict=True) if grad)

    @property
    def mask_bytes(self) -> int:
        """Bytes of the dropout mask that backward reads; 0 for an op without dropout. Other private
        tensors of an op are ignored: they are statistics, or artefacts of a composite op on the
        meta device.
        """
        return sum(
            s.size_bytes for s in self.kept if s.key == f"{self.node.name}:own" and drops(self.node)
        )

    @property
    def kept_values(self) -> list[Saved]:
        """The kept tensors that are values of the graph, as opposed to private ones of the op."""
        return [s for s in self.kept if s.key != f"{self.node.name}:own"]


def kernel_time(local: LocalClass, call: PricedCall) -> KernelTime:
    """Seconds of a call's kernels on one rank, forward and backward: by a model for its kind of op,
    otherwise as a memory-bound op. Free ops take 0.
    """
    name, dims = op_name(call.node), call.dims
    if dims is not None and dims.movement_free:
        return FREE_KERNEL
    if is_attention(call.node):
        return _attention(local, call)
    if name == ROUTED_EXPERTS:
        return _experts(local, call)
    if name == LINEAR_LOSS:
        return _linear_loss(local, call)
    if name in _GROUPED and all(
        len(_operand_shape(local, call, i)) == n for i, n in ((0, 2), (1, 3))
    ):
        return _grouped(local, call)
    if dims is not None and dims.contraction:
        product = _convolution(local, call) if name in _CONVOLUTIONS else _product(local, call)
        if product is not None:
            return local.pricing.kernels.product(product)
        products = sum(call.grads)
        backward_bytes = 2 * call.gradient_bytes + sum(call.written)
        return local.pricing.kernels.roofline(
            _flops(local, call), sum(call.read) + sum(call.written), backward_bytes, products
        )
    if name in _LOOKUPS:
        return _lookup(local, call)
    if name == "aten::cross_entropy_loss":
        return _cross_entropy(local, call)
    if (
        name == "aten::rms_norm"
        and local.setting.software.composite_norms
        and not local.setting.software.compiled
    ):
        return _composite_norm(local, call)
    return _streamed(local, call)


def _flops(local: LocalClass, call: PricedCall) -> int:
    """FLOPs of forward for this rank's part; 0 for an op without FLOPs. An axis divides the FLOPs
    if it shards any operand or result.
    """
    if not (flops := local.pricing.number(call.letters.total_flops())):
        return 0
    for axis, own in call.fixed.items():
        if any(x.is_shard for x in (*own.inputs, *own.outputs)):
            flops = ceil(flops / local.setting.mesh.size(axis))
    return ceil(flops / local.pricing.tp) if call.choice.letter else flops


def _operand_shape(local: LocalClass, call: PricedCall, i: int) -> Shape:
    """The shape of operand `i` on this rank."""
    layouts = {axis: choice.inputs[i] for axis, choice in call.fixed.items()}
    return local.pricing.local_shape(
        local.shapes[call.names[i]], layouts | {"tp": call.choice.inputs[i]}
    )


def _product(local: LocalClass, call: PricedCall) -> MatrixProduct | None:
    shapes = [_operand_shape(local, call, i) for i in range(len(call.names))]
    parameters = [name in local.facts.weights for name in call.names]
    fp8 = call.node.name not in local.facts.heads or local.setting.software.fp8_head
    found = product_of(call.letters, shapes, list(call.grads), parameters, fp8)
    if found is None or not local.setting.software.joins_products:
        return found
    if found.parameter != 1 or found.batch != 1:
        return found
    return replace(found, joined=joined_outputs(call.node, local.facts.weights))


def _convolution(local: LocalClass, call: PricedCall) -> MatrixProduct | None:
    """A convolution as a matrix product, one for each group of channels: (positions, channels x
    kernel) by (channels x kernel, channels). None if a size is 0.
    """
    x, weight, space = (
        _operand_shape(local, call, 0),
        _operand_shape(local, call, 1),
        len(local.shapes[call.names[1]]) - 2,
    )
    groups = max(x[-space - 1] // weight[1], 1)
    rows, columns = (
        weight[0] // groups,
        prod(weight[1:]),
    )  # output channels of a group, and what each of them sums
    if bool(Call(call.node).arg("transposed", False)) or "transpose" in op_name(call.node):
        groups = max(x[-space - 1] // weight[0], 1)
        sizes = prod(x[: -space - 1]) * prod(x[-space:]), columns, weight[0] // groups
    else:
        out = local.shapes[call.outs[0]]
        sizes = prod(x[: -space - 1]) * prod(out[-space:]), rows, columns
    if not prod(sizes) * groups:
        return None
    m, n, k = sizes
    return MatrixProduct(
        m=m,
        n=n,
        k=k,
        batch=groups,
        left_grad=call.grads[0],
        right_grad=call.grads[1],
        parameter=1 if call.names[1] in local.facts.weights else -1,
    )


def _attention(local: LocalClass, call: PricedCall) -> KernelTime:
    shapes, whole = (
        [_operand_shape(local, call, i) for i in range(3)],
        [local.shapes[name] for name in call.names[:3]],
    )
    letter = letter_of(call.fixed["cp"].strategy) if "cp" in call.fixed else ""
    context = local.setting.mesh.cp if letter in ("s", "ring", "ulysses") else 1
    ranks = context * (local.pricing.tp if call.choice.letter == "s" else 1)
    if ranks > 1:
        shapes = [
            (*shape[:-2], all_ranks[-2], shape[-1])
            for shape, all_ranks in zip(shapes, whole, strict=True)
        ]
    ulysses = context if letter == "ulysses" else 1
    blocks, mask = context if letter == "ring" else 1, local.facts.mask_of(call.node)
    attention = attention_of(Call(call.node), shapes, mask, ranks // ulysses, blocks, ulysses)
    size = sum(call.read) + sum(call.written)
    return local.pricing.kernels.attention(
        attention, _flops(local, call), size, 2 * call.gradient_bytes + sum(call.written)
    )


def _experts(local: LocalClass, call: PricedCall) -> KernelTime:
    """Kernel time of routed experts. Routing is assumed to be even, so every expert gets the same
    number of rows.
    """
    node = Call(call.node)
    place = [
        name
        for name in ("x", "index", "weights", "up", "up_bias", "down")
        if node.arg(name) is not None
    ].index
    x, index, up, down = (
        _operand_shape(local, call, place(name)) for name in ("x", "index", "up", "down")
    )
    flip = node.arg("transposed")
    return local.pricing.kernels.experts(
        x[0], prod(index), x[1], down[0], up[2 if flip else 1], down[1 if flip else 2]
    )


def _grouped(local: LocalClass, call: PricedCall) -> KernelTime:
    """Kernel time of a grouped matrix product, with rows evenly distributed: (rows, k) by (groups,
    n, k) or (groups, k, n).
    """
    (rows, k), weight = _operand_shape(local, call, 0), _operand_shape(local, call, 1)
    return local.pricing.kernels.grouped(rows, weight[0], prod(weight[1:]) // k, k, any(call.grads))


def _lookup(local: LocalClass, call: PricedCall) -> KernelTime:
    """Kernel time of a table look-up, which reads as many rows as it returns.

    The gradient of an embedding is a whole table of zeros to which rows are added. If the gradient
    buffer has another dtype, the table is then added to the buffer.
    """
    out, indices = sum(call.written), sum(call.read[1:])
    table = call.read[0] * call.grads[0]
    itemsize, kept = local.pricing.kernels.itemsize, local.pricing.kernels.gradient_itemsize
    buffer = (
        table + 2 * table // itemsize * kept
        if call.names[0] in local.facts.weights and kept != itemsize
        else 0
    )
    backward = table + 3 * out + indices + buffer if table else 0
    return local.pricing.kernels.stream(2 * out + indices, backward, any(call.grads))


def _cross_entropy(local: LocalClass, call: PricedCall) -> KernelTime:
    """Kernel time of cross-entropy. Eager mode runs log_softmax and nll_loss, and writes a gradient
    of the size of the logits. A compiler or a fused loss does not write it.
    """
    logits, rest = call.read[0], sum(call.read[1:]) + sum(call.written)
    if local.setting.software.compiled or local.setting.software.loss_kernel == "fused":
        return local.pricing.kernels.stream(logits + rest, 2 * logits + rest, any(call.grads))
    return local.pricing.kernels.stream(2 * logits + rest, 4 * logits + rest, any(call.grads), 2)


def _linear_loss(local: LocalClass, call: PricedCall) -> KernelTime:
    """Kernel time of a head's product with its cross-entropy, in chunks of tokens."""
    hidden, weight, target = (_operand_shape(local, call, i) for i in range(3))
    loss = LinearLoss(
        tokens=prod(target),
        classes=weight[0],
        width=hidden[-1],
        chunk=int(Call(call.node).arg("chunk")),
        hidden_grad=call.grads[0],
        head_grad=call.grads[1],
        parameter=call.names[1] in local.facts.weights,
    )
    return linear_loss_time(local.pricing.kernels, loss)


def _composite_norm(local: LocalClass, call: PricedCall) -> KernelTime:
    """Kernel time of a root-mean-square norm of n elements that runs op by op.

    Forward casts to fp32, squares, averages, multiplies, casts back and multiplies by the weight.
    Backward runs the derivative of each op, casts to and from fp32, and sums the two gradients of
    the fp32 input.
    """
    n, low, high = (
        sum(call.written) // local.pricing.kernels.itemsize,
        local.pricing.kernels.itemsize,
        max(local.pricing.kernels.itemsize, 4),
    )
    forward = (low + high) + 2 * high + high + 2 * high + (high + low) + 2 * low
    weight, scaled, mean = (
        6 * low,
        (2 + 3 + 1) * high,
        1 * high,
    )  # gradients of two factors, one of them summed up
    squared, summed = (2 + 2 + 3) * high, 3 * high  # of the power: power, doubled, product
    backward = weight + (low + high) + scaled + mean + squared + summed + (high + low)
    return local.pricing.kernels.stream(n * forward, n * backward, any(call.grads), _NORM_KERNELS)


def _streamed(local: LocalClass, call: PricedCall) -> KernelTime:
    """Kernel time of a memory-bound op. Forward reads operands and writes results. Backward reads
    gradients of results and saved tensors, and writes gradients of operands.

    A sum passes its gradient on without a kernel, unless an operand was broadcast.
    """
    shares = call.shares if local.setting.software.fuses else None
    # a compiler draws the numbers again
    mask = 0 if shares and local.setting.software.compiled else call.mask_bytes
    reads = shares.reads if shares else (True,) * len(call.read)
    writes = shares.writes if shares else (True,) * len(call.written)
    arriving = sum(b for b, counted in zip(call.written, writes, strict=True) if counted)
    leaving = [
        b for b, counted, grad in zip(call.read, reads, call.grads, strict=True) if counted and grad
    ]
    forward = (
        sum(b for b, counted in zip(call.read, reads, strict=True) if counted) + arriving + mask
    )
    if op_name(call.node) == "aten::add":
        broadcast = [b for b in leaving if b < sum(call.written)]
        # of a chain: the gradient of its input, once for both operands
        whole = max(leaving, default=0) if not arriving else 0
        backward = sum(broadcast) + (sum(call.written) if broadcast and arriving else whole)
    else:
        backward = arriving + sum(leaving) + _kept_bytes(local, call, shares) + mask
    kernels = int(any(writes)) if shares else 1
    return local.pricing.kernels.stream(forward, backward, any(call.grads), kernels)


def _kept_bytes(local: LocalClass, call: PricedCall, shares: FusedShare | None) -> int:
    """Bytes of saved values of the graph that backward reads. In a chain of fused ops (`shares`)
    only those that enter the chain count.
    """
    if shares is None:
        return sum(s.size_bytes for s in call.kept_values)
    entering = {
        local.facts.roots[name]
        for name, counted in zip(call.names, shares.reads, strict=True)
        if counted
    }
    return sum(s.size_bytes for s in call.kept_values if s.key.partition("/")[0] in entering)


def joined_outputs(node: Node, weights: Container[str]) -> float:
    """Outputs of the product of which a linear layer is a part, over its own outputs; 1.0 if it
    runs alone. `weights` names the parameters of its class.

    Two layers of one size that read one input are joined, as gate and up are. So are two of one size
    and a third that is at least as large, as keys, values and queries are.
    """
    inputs = node.args[0] if node.args else None
    if not isinstance(inputs, Node):
        return 1.0
    sizes = {
        user: size
        for user in inputs.users
        if user.target is node.target and (size := _outputs(user, inputs, weights))
    }
    least = sorted(sizes.values())
    joined = len(least) in (2, 3) and least[0] == least[1]
    return sum(least) / sizes[node] if joined and node in sizes else 1.0


def _outputs(node: Node, inputs: Node, weights: Container[str]) -> int:
    """Outputs of a linear layer that multiplies these inputs by a parameter; 0 for other calls."""
    if len(node.args) < 2 or node.args[0] is not inputs:
        return 0
    weight = node.args[1]
    if not isinstance(weight, Node) or weight.name not in weights:
        return 0
    return int(weight.meta["val"].shape[0])
