"""Memory-bound kernels around the products of routed experts that only some software has."""

from __future__ import annotations

from dataclasses import dataclass

from autopar_cost_models import Device, memory_time_s

from autopar.request.software import Software


@dataclass(frozen=True, slots=True)
class Stream:
    """`count` kernels, one after the other, that move `size_bytes` in all."""

    size_bytes: int = 0
    count: int = 0

    def time_s(self, device: Device) -> float:
        """Seconds on the device; 0.0 for no kernels."""
        if not self.count:
            return 0.0
        return memory_time_s(self.size_bytes, device) + (self.count - 1) * device.launch_s


@dataclass(frozen=True, slots=True)
class ExpertChain:
    """Kernels around experts, in forward and in backward."""

    forward: Stream
    backward: Stream


def further_chains(
    software: Software, itemsize: int, experts: int, rows: int, wide: int, width: int
) -> list[ExpertChain]:
    """The chains of kernels that the software has besides those of autopar (`Software.sorts_by_expert`
    and the fields after it).

    Args:
        software: the software.
        itemsize: bytes of an element.
        experts: experts of the rank.
        rows: elements of the rows that the experts read, and of their results.
        wide: elements of the results of the first product.
        width: elements of what the second product reads.

    - Sorting copies the rows before the experts, and the results after them.
    - Sequential experts join their results, and the gradients of their rows.
    - Clamping reads and writes the result of the first product, and joins its halves. Backward
      reads gradient and input, writes, and joins the halves.
    - For biases a product writes a tensor, a sum reads two and writes one, and the parts are
      joined. Backward multiplies by weights and by the bias, sums both, and joins.
    - Recomputation runs the clamps and the activation once more in backward.
    """
    found = []
    rows, wide, width = (itemsize * size for size in (rows, wide, width))
    clamps = Stream(4 * wide, 3) if software.clamps_experts else Stream()
    if software.sorts_by_expert and experts > 1:
        found.append(ExpertChain(Stream(4 * rows, 2), Stream(4 * rows, 2)))
    if software.sequential_experts and experts > 1:
        found.append(ExpertChain(Stream(2 * rows, 1), Stream(2 * rows, 1)))
    if software.clamps_experts:
        found.append(ExpertChain(clamps, Stream(5 * wide, 3)))
    if software.expert_bias:
        there, back = 2 * experts + 1, 4 * experts + 1
        found.append(ExpertChain(Stream(6 * rows, there), Stream(8 * rows, back)))
    if software.recomputes_activation:
        again = Stream(clamps.size_bytes + wide + width, clamps.count + 1)
        found.append(ExpertChain(Stream(), again))
    return found
