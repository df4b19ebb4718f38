"""Prices one call under one strategy: kernels and communication.

The call communicates for axes that propagation decides, or inside a special lowering.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar_cost_models.constants import OWN_OP_ISSUES

from autopar.annotate.call_kernels import PricedCall, kernel_time
from autopar.annotate.context_method import context_extra_s
from autopar.annotate.kernels import KernelTime
from autopar.annotate.local_class import LocalClass
from autopar.ir.annotated import Saved, Strategy
from autopar.ir.calls import is_attention, op_name
from autopar.ir.fusion import LINEAR_LOSS
from autopar.ir.sharding import COLLECTIVE_PRIMITIVES
from autopar.ops.dims import Call
from autopar.ops.experts import ROUTED_EXPERTS
from autopar.ops.fused import FUSED

_STATISTICS = {"vocab_parallel_statistics": 1, "vocab_parallel_linear_loss": 2}
"""Lowerings that gather statistics of each token -> the operand with the tokens' targets."""


@dataclass(frozen=True, slots=True)
class PaidMove:
    """A layout change over dp, ep or cp, paid by the first call that requests it. It has the
    operand's index, the primitives of forward and backward, and bytes before tp divides them.
    """

    operand: int
    axis: str
    forward: str
    backward: str
    size_bytes: int


def call_strategy(
    local: LocalClass,
    call: PricedCall,
    paid: Sequence[PaidMove],
    saved: tuple[Saved, ...],
    late: tuple[Saved, ...],
) -> Strategy:
    """The priced strategy of a call: seconds, saved tensors, and the tensors `late` that gradients
    of parameters need. `paid` are the layout changes that this op is the first to request; their
    collectives over dp are left out (`CallPricer.over_dp`).
    """
    computed = kernel_time(local, call)
    local_s, sent_s = _sent(local, call, computed, paid)
    added = [b for b, more in zip(call.read, call.added, strict=True) if more]
    local_s[1] += _added_s(local, call, added)
    issued_s = _issued_s(local, call, computed, len(added))
    return Strategy(
        call.choice.name,
        call.choice.inputs,
        call.choice.outputs,
        computed.forward_s + local_s[0] + sent_s[0],
        computed.backward_s + local_s[1] + sent_s[1],
        saved=saved,
        late=late,
        forward_comm_s=sent_s[0],
        backward_comm_s=sent_s[1],
        backward_weight_s=computed.weight_s,
        forward_dispatch_s=issued_s[0],
        backward_dispatch_s=issued_s[1],
    )


def _issued_s(
    local: LocalClass, call: PricedCall, computed: KernelTime, added: int
) -> tuple[float, float]:
    """Seconds in which the host issues (forward, backward) of a call, 0.0 on CPUs. Backward also
    sums gradients `added` times.
    """
    software, each_s, op = local.setting.software, local.setting.issue_s, op_name(call.node)
    routed = op == ROUTED_EXPERTS
    graphed = software.cuda_graphs == "all" or (
        software.cuda_graphs == "but experts" and not routed
    )
    if graphed:
        return 0.0, 0.0
    # a view costs the host, not the device
    view = call.dims is not None and call.dims.movement_free and not software.compiled
    forward = computed.forward_kernels + view
    backward = computed.backward_kernels + (view and any(call.grads)) + added
    if op in FUSED:
        forward, backward = OWN_OP_ISSUES, OWN_OP_ISSUES * any(call.grads) + added
    if op == LINEAR_LOSS:  # and the kernels of each chunk of tokens
        forward += computed.forward_kernels
        backward += computed.backward_kernels
    if routed:
        forward += software.routing_operations
    return forward * each_s, backward * each_s


def _added_s(local: LocalClass, call: PricedCall, added: list[int]) -> float:
    """Seconds in which autograd sums the gradients from several readers of a value: a kernel for
    each of the sizes `added`. With a compiler it is one more read of a fused kernel.
    """
    if local.setting.software.compiled:
        fused = call.shares is None or not any(
            more and not r for more, r in zip(call.added, call.shares.reads, strict=True)
        )
        return local.pricing.kernels.stream(sum(added) if fused else 0, 0, False, 0).forward_s
    return sum(local.pricing.kernels.stream(3 * size, 0, False).forward_s for size in added)


def _sent(
    local: LocalClass, call: PricedCall, computed: KernelTime, paid: Sequence[PaidMove]
) -> tuple[list[float], list[float]]:
    """Seconds besides the op's kernels, as two lists [forward, backward]: of local work (waiting,
    copies), and of communication.
    """
    local_s, sent_s = [0.0, 0.0], [0.0, 0.0]
    if call.choice.lowering == "vocab_parallel_cross_entropy":
        tokens = local.bytes[call.names[1]] // 8 * 4
        sent_s[0] += 3 * local.pricing.move_s("all_reduce", tokens)
    if call.choice.lowering in _STATISTICS:
        tokens = local.bytes[call.names[_STATISTICS[call.choice.lowering]]] // 8 * 4
        rows = 4 if Call(call.node).arg("label_smoothing") else 3
        sent_s[0] += local.pricing.move_s("all_gather", rows * tokens * local.pricing.tp)
    if "cp" in call.fixed and is_attention(call.node):
        for place, (idle, sent) in enumerate(_context_extra(local, call, computed)):
            local_s[place] += idle
            sent_s[place] += sent
    if local.lowered(call.node) == "expert_parallel":
        x, down = local.facts.tensors[call.names[0]], Call(call.node).arg("down").meta["val"]
        choices = int(local.facts.tensors[call.names[1]].shape[1])
        exchanges = local.pricing.expert_parallel_s(
            call.read[1], choices, int(x.shape[1]), int(down.shape[0]), local.pricing.itemsize(x)
        )
        beside = local.setting.software.dispatch_overlap
        for place, (extra, own_s) in enumerate(
            zip(exchanges, (computed.forward_s, computed.backward_s), strict=True)
        ):
            sent_s[place] += local.pricing.exposed_s(own_s if beside else 0.0, extra)
    for one in paid:
        part = local.pricing.sharded(one.size_bytes, call.choice.inputs[one.operand])
        moves = (one.forward, one.backward) if call.grads[one.operand] else (one.forward,)
        for place, move in enumerate(moves):
            if move not in COLLECTIVE_PRIMITIVES:
                local_s[place] += local.pricing.move_s(move, part, one.axis)
            elif one.axis != "dp":
                sent_s[place] += local.pricing.move_s(move, part, one.axis)
    return local_s, sent_s


def _context_extra(
    local: LocalClass, call: PricedCall, computed: KernelTime
) -> tuple[tuple[float, float], ...]:
    """What context parallelism adds to an attention op, for forward and for backward: (seconds of
    waiting for the slowest rank, seconds of communication that compute does not hide). Empty if cp
    does not shard its positions.
    """
    letter, _, pattern = call.fixed["cp"].strategy.partition(" ")
    if letter not in ("s", "ring", "ulysses"):
        return ()
    op = local.pricing.context_attention(
        call.node, call.letters, bool(pattern), local.facts.mask_of(call.node)
    )
    op = replace(op, forward_s=computed.forward_s, backward_s=computed.backward_s)
    method = "gather" if letter == "s" else letter
    extra = context_extra_s(method, op, local.setting.mesh, local.setting.cluster, gathers=False)
    waste = op.waste(local.setting.mesh.cp) if method != "ulysses" else 0.0
    idle = op.forward_s * waste, op.backward_s * waste
    return tuple((waits, max(total - waits, 0.0)) for waits, total in zip(idle, extra, strict=True))
