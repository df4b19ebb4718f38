"""Bytes of activations of one block class: what autograd keeps until backward, and what backward
needs on top at its peak.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from torch.fx import Node

from autopar.annotate.fusion import LOSSES, NORMS
from autopar.annotate.linear_losses import chunk_bytes
from autopar.annotate.local_class import LocalClass, sharding_key
from autopar.annotate.saved_tensors import SavedByOp
from autopar.ir.annotated import AnnotatedOp, Saved
from autopar.ir.calls import is_attention, op_name
from autopar.ir.fusion import LINEAR_LOSS
from autopar.ir.mesh import BATCH_AXES
from autopar.ir.sharding import AxisLayout, R, S
from autopar.ops.dims import Call
from autopar.ops.experts import ROUTED_EXPERTS
from autopar.ops.random import drops
from autopar.ops.strategies import OpStrategy
from autopar.ops.values import operand_names, ops, result_names

_WHOLE_STATISTICS = ("vocab_parallel_statistics", "vocab_parallel_linear_loss")
"""Lowerings over tp after which each rank keeps the merged statistics of all its tokens."""
_PASSES = (
    "aten::add",
    "aten::alias",
    "aten::contiguous",
)  # hand the gradient of their result on as it is


def late_tensors(node: Node, saved: tuple[Saved, ...], written: list[int]) -> tuple[Saved, ...]:
    """Of the tensors that an op saved, those from which gradients of parameters are computed:
    normally all. A norm written op by op needs only the tensors that it made itself. `written` has
    the bytes of the op's results.
    """
    own = tuple(one for one in saved if one.key.endswith(":own"))
    return (
        own
        if op_name(node) in NORMS and sum(one.size_bytes for one in own) >= written[0]
        else saved
    )


def kept_tensors(
    local: LocalClass,
    node: Node,
    choice: OpStrategy,
    names: tuple[str, ...],
    outs: tuple[str, ...],
    keeping: dict[str, SavedByOp],
) -> tuple[Saved, ...]:
    """The tensors that autograd keeps for a call under the strategy `choice` over tp, with bytes on
    one device; none if no gradient flows. `names` and `outs` name the call's operands and results.
    `keeping` replaces, by op name, what was observed to be saved.
    """
    observed = keeping.get(node.name, local.facts.saved.get(node.name))
    if observed is None or not node.meta.get("grad"):
        return ()
    fixed = local.choices.get(node.name, {})
    held = [
        (n, x, {a: c.inputs[i] for a, c in fixed.items()})
        for i, (n, x) in enumerate(zip(names, choice.inputs, strict=True))
    ]
    held += [(n, x, local.fixed[n]) for n, x in zip(outs, choice.outputs, strict=True)]
    by_root: dict[str, list[_Held]] = {}
    for name, layout, layouts in held:
        by_root.setdefault(local.facts.roots[name], []).append((name, layout, layouts))
    kept = []
    for root in observed.values:
        if root in local.unwritten:
            continue
        first, *others = by_root.get(root, [(root, R, local.fixed[root])])
        if all(_key(local, other) == _key(local, first) for other in others):
            kept.append(_kept(local, node, root, first, root))
        else:  # parts of one tensor, of which some were converted and are tensors of their own
            kept += [_kept(local, node, root, part, part[0]) for part in (first, *others)]
    if observed.extra_bytes_per_row:
        own = _own_bytes(local, node, observed.extra_bytes_per_row)
        if "cp" in fixed and any(x.is_shard for x in (*fixed["cp"].inputs, *fixed["cp"].outputs)):
            own = ceil(own / local.setting.mesh.cp)
        if choice.letter and choice.lowering not in _WHOLE_STATISTICS:
            whole = min(_whole_rows_bytes(local, node, names), own) if choice.letter == "f" else 0
            own = whole + ceil((own - whole) / local.pricing.tp)
        kept.append(Saved(f"{node.name}:own", own))
    return tuple(kept)


_Held = tuple[str, AxisLayout, dict[str, AxisLayout]]
"""A value of a call: its name, its layout over tp, and its layouts on the other axes."""


def _key(local: LocalClass, held: _Held) -> str:
    return sharding_key(local.facts, held[0], {**held[2], "tp": held[1]})


def _kept(local: LocalClass, node: Node, root: str, held: _Held, name: str) -> Saved:
    """The tensor called `name` that autograd keeps on one device for an operand or result `held`.
    `root` is the value that owns the storage of both.
    """
    (_, layout, layouts), key = held, _key(local, held)
    tensor = local.facts.tensors[name]
    fitting = {axis: x for axis, x in layouts.items() if x.dim < tensor.dim()}
    size = local.pricing.sharded(local.pricing.size_bytes(tensor, fitting), layout)
    if _gathers_again(local, node, root, layout):
        dim = min((dim for dim, _ in local.facts.positions.get(root, ())), default=0)
        key, size = f"{key}/tp{dim}", ceil(size / local.pricing.tp)
    if local.setting.software.keeps_fp8 and node.name in local.narrow:
        key, size = f"{key}:fp8", size // local.pricing.itemsize(tensor)
    return Saved(name + key, size)


def workspace_bytes(
    local: LocalClass,
    inputs: Sequence[AnnotatedOp],
    calls: Sequence[AnnotatedOp],
    outputs: Sequence[AnnotatedOp],
    gradients: Mapping[str, int],
    *,
    weights: bool,
    alone: bool,
) -> int:
    """Peak bytes on one device that backward of a segment (one layer, or what is before or after
    the layers) needs beyond what forward keeps. Each value has the size under its smallest
    strategy.

    Args:
        local: the class.
        inputs: its priced inputs.
        calls: its priced calls, in order.
        outputs: its priced outputs.
        gradients: parameter -> bytes of its gradient in the smallest layout that may store it.
        weights: whether to count gradients of parameters until they are accumulated. Under ZeRO-3
            they are part of the buffers instead.
        alone: whether the plan has no pipeline. With `weights`, the gradient of a tied head then
            also counts, since it waits for that of the embedding.
    """
    facts, sizes = local.facts, _least_sizes(local, (*inputs, *calls))
    made = {
        name: {s.outputs[k] for s in op.strategies}
        for op in (*inputs, *calls)
        for k, name in enumerate(op.outputs)
    }
    backward = []
    for node, op in zip(ops(facts.graph), calls, strict=True):
        if not any(facts.grads[name] for name in op.outputs):
            continue
        keeps, dims = _least_kept(op), facts.dims[node.name]
        passes = op_name(node) in _PASSES or (dims is not None and dims.movement_free)
        writes = tuple(
            name for name in op.inputs if facts.grads[name] and name not in facts.weights
        )
        own = _while_it_runs(local, node, op, keeps, sizes, gradients if weights else {})
        own += _gathered_bytes(local, op, made)
        backward.append(BackwardOp(op.outputs, writes, keeps, own, passes))
    ends = [op.inputs[0] for op in outputs if facts.grads[op.inputs[0]]]
    waiting = _waiting_bytes(local) if weights and alone else 0
    return backward_workspace(backward, sizes, ends) + waiting


def _least_sizes(local: LocalClass, made: Iterable[AnnotatedOp]) -> dict[str, int]:
    """Bytes of the gradient of each result of these ops, by value name, under its smallest
    strategy. 0 for a value without gradient, or inside a fused kernel.
    """
    sizes: dict[str, int] = {}
    for op in made:
        for k, name in enumerate(op.outputs):
            least = min(
                local.pricing.sharded(local.bytes[name], s.outputs[k]) for s in op.strategies
            )
            counts = local.facts.grads[name] and name not in local.unwritten
            sizes[name] = held_bytes(local, least) if counts else 0
    return sizes


def _while_it_runs(
    local: LocalClass,
    node: Node,
    op: AnnotatedOp,
    keeps: Mapping[str, int],
    sizes: Mapping[str, int],
    gradients: Mapping[str, int],
) -> int:
    """Bytes that only the backward of one op needs, besides the gradients that it reads and writes.
    Negative for a loss that writes its gradient over the logits. `keeps` are the bytes that the op
    keeps, `sizes` those of values' gradients, `gradients` those of parameters' gradients; all by
    name.
    """
    software = local.setting.software
    if op_name(node) == LINEAR_LOSS:
        return held_bytes(local, chunk_bytes(local, node, op, gradients))
    if op_name(node) in LOSSES and software.loss_kernel == "plain":
        # gradients before and after the log-softmax, both as kept
        return 2 * keeps.get(f"{node.name}:own", 0) - sizes[op.inputs[0]]
    if op_name(node) in LOSSES and software.loss_kernel == "beside":
        # when forward ends; in backward the gradient of the logits is there instead
        return max(keeps.get(f"{node.name}:own", 0) - sizes[op.inputs[0]], 0)
    if op_name(node) in LOSSES and software.loss_kernel == "fused":
        return -sizes[op.inputs[0]]
    if software.fused_kernels:
        return 0
    # the gradient of a weight, before it is added to what is there
    return max((gradients[name] for name in op.inputs if name in gradients), default=0)


def _gathered_bytes(
    local: LocalClass, op: AnnotatedOp, made: Mapping[str, Collection[AxisLayout]]
) -> int:
    """Bytes of the input that a linear layer gathers again, under the smallest strategy that shards
    its parameter; 0 if it can read the input sharded as it is made. `made` has the layouts in which
    each value can be made. The input is there twice for a moment: as the collective delivers it,
    and with its shards in order.
    """
    name = local.rerun.gathered.get(op.name)
    if name is None or local.pricing.tp == 1:
        return 0
    read = op.inputs.index(name)
    weights = [k for k, operand in enumerate(op.inputs) if operand in local.facts.weights]
    whole = [
        not (s.inputs[read].is_shard and s.inputs[read] in made.get(name, ()))
        for s in op.strategies
        if any(s.inputs[k].is_shard for k in weights)
    ]
    return held_bytes(local, 2 * local.bytes[name]) if whole and all(whole) else 0


def _waiting_bytes(local: LocalClass) -> int:
    """Bytes of the gradient of a tied head's weight, which waits for the gradient of the embedding;
    0 if none waits while segments of this class run.

    Autograd holds it through the backward of all segments in between. Megatron's fused product adds
    to the gradient buffer directly, so the result is then 0.
    """
    if local.setting.software.fused_kernels:
        return 0
    pricing = local.pricing
    return sum(
        ceil(t.numel() / pricing.tp) * pricing.itemsize(t) for t in local.facts.place.waiting
    )


def own_tensors(local: LocalClass, kept: Iterable[Saved]) -> tuple[Saved, ...]:
    """Of the kept tensors, those that this segment owns: all but inputs that many segments share,
    which are counted once elsewhere. Their sizes become bytes of device memory (`held_bytes`).
    """
    return tuple(
        Saved(s.key, held_bytes(local, s.size_bytes)) for s in kept if s.key not in local.as_made
    )


def _least_kept(op: AnnotatedOp) -> dict[str, int]:
    """Bytes that an op keeps under its smallest strategy: value name, or a key that ends in `:own`,
    -> bytes. What some strategy does not keep is left out.
    """
    found = [
        {(s.key if s.key.endswith(":own") else s.value): s.size_bytes for s in strategy.saved}
        for strategy in op.strategies
    ]
    return {
        key: min(sizes[key] for sizes in found)
        for key in found[0]
        if all(key in sizes for sizes in found)
    }


def held_bytes(local: LocalClass, size_bytes: int) -> int:
    """Bytes of device memory that an activation takes. On a GPU this includes what the caching
    allocator loses to fragmentation.
    """
    if local.pricing.device.generation == "cpu":
        return size_bytes
    return ceil(size_bytes * (1 + local.setting.software.fitted.fragmentation))


def _own_bytes(local: LocalClass, node: Node, per_row: float) -> int:
    """Bytes that an op keeps besides values of the graph, before cp and tp divide them. `per_row`
    is what was observed for one batch row. A fused norm keeps two fp32 statistics a row; an unfused
    norm keeps its intermediate results.
    """
    own = int(per_row * local.setting.micro_batch)
    software, name = local.setting.software, op_name(node)
    result, first = (
        local.facts.tensors[names[0]] for names in (result_names(node), operand_names(node))
    )
    exact = (
        name in NORMS
        or (name in LOSSES and software.loss_kernel != "fused")
        or name == LINEAR_LOSS
        or is_attention(node)
        or drops(node)
    )
    if not exact:  # activations, seen in the dtype of the trace; the others keep fp32 or bytes in any precision
        own = own * local.pricing.itemsize(first) // first.element_size()
    if name == ROUTED_EXPERTS and software.fused_kernels:
        own = min(own, _fused_experts_bytes(local, node))
    if name in NORMS and (software.compiled or software.fused_kernels):
        rows = local.pricing.size_bytes(result, {axis: S(0) for axis in BATCH_AXES}) // (
            local.pricing.itemsize(result) * int(result.shape[-1])
        )
        own = min(own, 8 * rows)
    return own


def _gathers_again(local: LocalClass, node: Node, root: str, layout: AxisLayout) -> bool:
    """Whether a layer keeps the sharded form of an input that it has whole, and gathers it again in
    backward.

    Under the recompute mode these are the inputs of linear layers. Under software that always does
    so, they are inputs that were gathered along positions.
    """
    if local.pricing.tp == 1 or layout.is_shard:
        return False
    if (name := local.rerun.gathered.get(node.name)) is not None and layout.value.kind == "R":
        return local.facts.roots[name] == root
    pinned = local.setting.sequence_parallel is True and local.setting.software.gathers_again
    return pinned and node.name in local.facts.products and bool(local.facts.positions.get(root))


def _fused_experts_bytes(local: LocalClass, node: Node) -> int:
    """Bytes that fused kernels of routed experts keep for all choices of a rank: inputs of both
    products, and what the activation reads. The weights of choices multiply inside the activation,
    so nothing is kept after the second product.
    """
    call, software = Call(node), local.setting.software
    x, up, down = local.facts.tensors[operand_names(node)[0]], call.arg("up"), call.arg("down")
    transposed = bool(call.arg("transposed", False))
    choices = _whole_rows_bytes(local, node, operand_names(node)) // (
        2 * int(x.shape[1]) * local.pricing.itemsize(x)
    )
    inner, width = (
        int(w.meta["val"].shape[axis])
        for w, axis in ((up, 2 if transposed else 1), (down, 1 if transposed else 2))
    )
    narrow = (
        1 if software.keeps_fp8 and software.matmul_dtype == "fp8" else local.pricing.itemsize(x)
    )
    return choices * (narrow * (int(x.shape[1]) + width) + local.pricing.itemsize(x) * inner)


def _whole_rows_bytes(local: LocalClass, node: Node, names: tuple[str, ...]) -> int:
    """Bytes that routed experts keep under any tp sharding: the row of each choice before the first
    product and after the second. 0 for other ops.
    """
    if op_name(node) != ROUTED_EXPERTS:
        return 0
    x, fixed = (
        local.facts.tensors[names[0]],
        {a: c.inputs[1] for a, c in local.choices.get(node.name, {}).items()},
    )
    choices = local.pricing.size_bytes(local.facts.tensors[names[1]], fixed) // 8
    return 2 * choices * int(x.shape[1]) * local.pricing.itemsize(x)


@dataclass(frozen=True, slots=True)
class BackwardOp:
    """The backward of one op. `reads` and `writes` name the values whose gradients it reads and
    writes. `keeps` maps saved tensors to bytes. `own` is the bytes alive only while it runs. If
    `passes`, it passes the gradient of its result on unchanged.
    """

    reads: tuple[str, ...]  # results
    writes: tuple[str, ...]  # operands
    keeps: Mapping[str, int]
    own: int = 0
    passes: bool = False


def backward_workspace(
    backward: Iterable[BackwardOp], sizes: Mapping[str, int], outputs: Iterable[str]
) -> int:
    """Peak bytes of a segment's backward above the bytes that its forward keeps.

    `backward` lists ops in forward order, `sizes` has the bytes of values, and `outputs` names the
    values whose gradients arrive from the next segment.

    Ops of a class run backward from last to first. Before an op, the gradients of its results are
    alive, and the op writes the gradients of its operands. After it, the gradients of its results
    are freed, and so are saved tensors that no earlier op keeps. The workspace is the largest
    excess of gradients over freed bytes. Each value has the size of its smallest strategy, so that
    the solver sees a constant.
    """
    calls = list(backward)
    first: dict[str, int] = {}
    kept: dict[str, int] = {}
    for number, call in enumerate(calls):
        for key, size in call.keeps.items():
            first.setdefault(key, number)
            kept[key] = max(kept.get(key, 0), size)
    # value -> the value in whose gradient's memory its gradient is
    buffer: dict[str, str] = {name: name for name in outputs}
    alive: dict[str, int] = {name: sizes.get(name, 0) for name in outputs}
    fullest = excess = sum(alive.values())
    for number, call in reversed(list(enumerate(calls))):
        for name in call.writes:
            if name in buffer:
                continue  # added to what is there
            source = buffer.get(call.reads[0]) if call.passes and call.reads else None
            if source is not None and sizes.get(name, 0) == alive.get(source, -1):
                buffer[name] = source
            else:
                buffer[name] = name
                alive[name] = sizes.get(name, 0)
                excess += alive[name]
        fullest = max(fullest, excess + call.own)
        for name in call.reads:
            source = buffer.pop(name, None)
            if source is not None and source not in buffer.values():
                excess -= alive.pop(source)
        excess -= sum(kept[key] for key in call.keeps if first[key] == number)
    return max(fullest, 0)
