"""Context parallelism of attention: the costs of its three methods, and the choice among them.

- gather: keys and values are all-gathered; their gradients are reduce-scattered.
- ring: keys and values travel round the ring while blocks are computed (Liu et al. 2023,
  arXiv:2310.01889).
- ulysses: all-to-all from positions to heads and back (Jacobs et al. 2023, arXiv:2309.14509).
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar_cost_models import collective_time_s, neighbour_traffic, point_to_point_time_s

from autopar.ir.cluster import ClusterSpec
from autopar.ir.mesh import MeshShape


@dataclass(frozen=True, slots=True)
class ContextAttention:
    """One attention op on one rank: bytes of whole sequences, and seconds of the rank's 1/cp of the
    work.

    `gradient_bytes` is the size of the gradients of keys and values in the dtype in which the ring
    accumulates them, at least fp32. `key_copies` is how often Ulysses repeats key heads so that
    every rank gets one (`rewrite/lowerings/context_attention.py`).
    """

    query_bytes: int
    key_bytes: int
    value_bytes: int
    result_bytes: int
    forward_s: float
    backward_s: float
    causal: bool
    zigzag: bool
    gradient_bytes: int
    key_copies: int = 1

    def waste(self, cp: int) -> float:
        """The extra compute of the slowest rank, as a fraction of the average. With a causal mask
        and contiguous shards the last rank has (2 cp - 1) / cp times its share.
        """
        return (cp - 1) / cp if self.causal and not self.zigzag else 0.0


def context_extra_s(
    method: str, op: ContextAttention, mesh: MeshShape, cluster: ClusterSpec, gathers: bool
) -> tuple[float, float]:
    """Seconds (forward, backward) that a method ("gather", "ring" or "ulysses") takes beyond a
    balanced 1/cp of the compute: waiting, and communication that is not hidden. `gathers`: whether
    method "gather" counts its all-gathers and reduce-scatters, which a program runs as separate
    layout changes.
    """
    cp, stride, topology = mesh.cp, mesh.stride("cp"), cluster.topology
    forward, backward = op.forward_s * op.waste(cp), op.backward_s * op.waste(cp)
    keys_bytes = op.key_bytes + op.value_bytes
    if method == "gather":
        if gathers:
            forward += sum(
                collective_time_s("all_gather", size, cp, stride, topology)
                for size in (op.key_bytes, op.value_bytes)
            )
            backward += sum(
                collective_time_s("reduce_scatter", size, cp, stride, topology)
                for size in (op.key_bytes, op.value_bytes)
            )
        return forward, backward
    if method == "ring":
        traffic = neighbour_traffic(cp, stride, topology)
        hop_s, home_s, back_s = (
            point_to_point_time_s(size / cp, cp, stride, topology, traffic)
            for size in (keys_bytes, op.gradient_bytes, keys_bytes + op.gradient_bytes)
        )
        hidden = (cp - 1) / cp  # the last block has nothing left to hide
        forward += max((cp - 1) * hop_s - op.forward_s * hidden, 0.0)
        # gradients travel one hop further, home
        backward += max((cp - 1) * back_s - op.backward_s * hidden, 0.0) + home_s
        return forward, backward
    sizes = (
        op.query_bytes,
        op.key_copies * op.key_bytes,
        op.key_copies * op.value_bytes,
        op.result_bytes,
    )
    moved = sum(collective_time_s("all_to_all", size, cp, stride, topology) for size in sizes)
    return moved, moved  # heads are balanced


def choose_method(
    op: ContextAttention, legal: tuple[str, ...], mesh: MeshShape, cluster: ClusterSpec
) -> str:
    """The method of `legal` ("gather", "ring", "ulysses") with the lowest time for the attention
    `op`, forward plus backward.
    """
    return min(
        legal, key=lambda method: sum(context_extra_s(method, op, mesh, cluster, gathers=True))
    )
