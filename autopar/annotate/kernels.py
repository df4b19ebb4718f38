"""Seconds of one call on one device, from models of its kernels.

Every function takes the shapes of this rank's shards, so a small shard has its own, lower rate.
Backward of a product is two products: dX = dY W^T and dW = X^T dY. The latter is written in the
dtype in which gradients accumulate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, prod

from autopar_cost_models import Device, activation_itemsize, matmul_time_s, memory_time_s
from autopar_cost_models.attention import (
    FLASH_RATES,
    flash_attention_time_s,
    unfused_attention_time_s,
)
from autopar_cost_models.matmul import (
    cast_to_fp8_time_s,
    fp8_linear_time_s,
    grouped_matmul_time_s,
    shaped_matmul_time_s,
)
from autopar_cost_models.memory import BYTES_PER_PARAMETER
from autopar_cost_models.roofline import chain_time_s

from autopar.annotate.expert_kernels import further_chains
from autopar.ops.dims import Letters, OpDims
from autopar.request.software import Software

Shape = tuple[int, ...]
_ROUTING_KERNELS = 8  # small ones of `sort_by_expert` and `inverse_order`: sort (2), searchsorted, division, aranges (2), empty, scatter


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Seconds of a call. `weight_s` is the part of `backward_s` that computes the gradient of a
    parameter. `forward_kernels` and `backward_kernels` count kernels.
    """

    forward_s: float
    backward_s: float
    weight_s: float = 0.0
    forward_kernels: int = 1
    backward_kernels: int = 1


FREE_KERNEL = KernelTime(0.0, 0.0, 0.0, 0, 0)


@dataclass(frozen=True, slots=True)
class MatrixProduct:
    """`batch` matrix products (m, k) @ (k, n). `left_grad` and `right_grad`: which factors get
    gradients. `parameter`: index of the factor that is a parameter, or -1. `fp8`: whether the
    product may run in fp8. `joined`: columns of the product of which this one is a part, over its
    own.
    """

    m: int
    n: int
    k: int
    batch: int = 1
    left_grad: bool = True
    right_grad: bool = True
    parameter: int = -1
    fp8: bool = False
    joined: float = 1.0


@dataclass(frozen=True, slots=True)
class LocalAttention:
    """softmax(Q K^T) V on one rank, in local sizes. `queries` and `keys` are whole-sequence
    lengths, divided among `context_ranks` ranks.

    `blocks` is the number of kernels in which a rank computes its part: one for each rank of a
    ring.
    """

    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    head_dim: int
    causal: bool
    window: int | None = None
    context_ranks: int = 1
    blocks: int = 1
    dropout: bool = False


def product_of(
    dims: OpDims, shapes: list[Shape], grads: list[bool], parameters: list[bool], fp8: bool
) -> MatrixProduct | None:
    """The matrix product that a contraction of two factors is, from its letters and this rank's
    shapes; None if it is not one, or a size is 0. `fp8`: whether it may run in fp8; only a single
    product by a parameter does.

    Letters of both factors and the result are batch dims; letters of both factors alone are summed.
    The result's other letters are rows and columns.
    """
    factors = [i for i in range(len(dims.inputs)) if i not in dims.additive]
    if len(factors) != 2 or len(dims.outputs) != 1:
        return None
    left, right = (shapes[i] for i in factors)
    summed, shared, rows, columns = _roles(*(dims.inputs[i] for i in factors), dims.outputs[0])
    k, batch, m = (prod([left[place] for place in places]) for places in (summed, shared, rows))
    n = prod([right[place] for place in columns])
    if not m * n * k * batch:
        return None
    parameter = next((place for place, i in enumerate(factors) if parameters[i]), -1)
    return MatrixProduct(
        m=m,
        n=n,
        k=k,
        batch=batch,
        left_grad=grads[factors[0]],
        right_grad=grads[factors[1]],
        parameter=parameter,
        fp8=fp8 and parameter >= 0 and batch == 1,
    )


@lru_cache(maxsize=4096)
def _roles(
    left: Letters, right: Letters, result: Letters
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Indices of the dims that a product sums, of its batch dims and of its rows, all in the left
    factor, and of its columns, in the right factor.
    """
    a, b = ({letter: place for place, letter in enumerate(of)} for of in (left, right))
    both, out = a.keys() & b.keys(), set(result)
    rows, columns = ([place for x, place in of.items() if x not in both] for of in (a, b))
    return [a[x] for x in both - out], [a[x] for x in both & out], rows, columns


@lru_cache(maxsize=16)
def kernels_of(device: Device, precision: str, software: Software) -> Kernels:
    """The kernel models of a device under a precision and software. They cache their prices."""
    return Kernels(device, precision, software)


class Kernels:
    """Kernel models of one device under one precision and software."""

    def __init__(self, device: Device, precision: str, software: Software) -> None:
        self.device, self.precision, self.software = device, precision, software
        self.itemsize, self.gradient_itemsize = (
            activation_itemsize(precision),
            BYTES_PER_PARAMETER[precision][1],
        )
        rates = {
            kernel: rate.forward
            for (generation, kernel), rate in FLASH_RATES.items()
            if generation == device.generation
        }
        self.flash = (
            (
                software.attention_kernel
                or max(rates, key=lambda kernel: rates[kernel], default=None)
            )
            if precision in ("bf16", "fp16")
            else None
        )
        self._known: dict[object, KernelTime] = {}

    # ----------------------------------------------------------------------------------------------------------- matrix products

    def product(self, p: MatrixProduct) -> KernelTime:
        """Kernel time of a matrix product and of the products of its backward, in fp8 if the
        product may and the software does so. A part of a larger product takes its share of the time.
        """
        if p.joined > 1:
            whole = self.product(replace(p, n=round(p.n * p.joined), joined=1.0))
            return replace(
                whole,
                forward_s=whole.forward_s / p.joined,
                backward_s=whole.backward_s / p.joined,
                weight_s=whole.weight_s / p.joined,
            )
        if p not in self._known:
            self._known[p] = (
                self._fp8_product(p)
                if p.fp8 and self.software.matmul_dtype == "fp8"
                else self._product(p)
            )
        return self._known[p]

    def _product(self, p: MatrixProduct) -> KernelTime:
        def seconds(m: int, n: int, k: int, summed_up: bool) -> float:
            itemsize = (
                self.gradient_itemsize if summed_up and self.software.fused_accumulation else None
            )
            added_s = self._accumulation_s(p.batch * m * n) if summed_up else 0.0
            return (
                shaped_matmul_time_s(
                    m, n, k, self.device, self.precision, batch=p.batch, result_itemsize=itemsize
                )
                + added_s
            )

        left_s = seconds(p.m, p.k, p.n, p.parameter == 0) if p.left_grad else 0.0
        right_s = seconds(p.n, p.k, p.m, p.parameter == 1) if p.right_grad else 0.0
        weight_s = (left_s, right_s)[p.parameter] if p.parameter >= 0 else 0.0
        return KernelTime(
            seconds(p.m, p.n, p.k, False), left_s + right_s, weight_s, 1, p.left_grad + p.right_grad
        )

    def _accumulation_s(self, numel: int) -> float:
        """Seconds of the kernel that adds a gradient to those of earlier micro-batches; 0 if the
        product itself accumulates.
        """
        if self.software.fused_accumulation:
            return 0.0
        return memory_time_s((self.itemsize + 2 * self.gradient_itemsize) * numel, self.device)

    def _fp8_product(self, p: MatrixProduct) -> KernelTime:
        """Kernel time of a linear layer in fp8; either factor may be the weight. If only one
        gradient is needed, only that one is cast and computed.
        """
        rows, outputs = (p.m, p.n) if p.parameter == 1 else (p.n, p.m)
        scaling, device = self.software.fp8_scaling, self.device
        input_grad, weight_grad = (
            (p.left_grad, p.right_grad) if p.parameter == 1 else (p.right_grad, p.left_grad)
        )
        forward_s = fp8_linear_time_s(rows, p.k, outputs, device, scaling=scaling)
        weight_s = (
            shaped_matmul_time_s(
                outputs, p.k, rows, device, "fp8", scaling=scaling, result_itemsize=4
            )
            if weight_grad
            else 0.0
        )
        added_s = self._accumulation_s(outputs * p.k) if weight_grad else 0.0
        if input_grad and weight_grad:
            backward_s = fp8_linear_time_s(
                rows, p.k, outputs, device, backward=True, scaling=scaling
            )
        elif input_grad or weight_grad:
            input_s = (
                shaped_matmul_time_s(rows, p.k, outputs, device, "fp8", scaling=scaling)
                if input_grad
                else 0.0
            )
            backward_s = cast_to_fp8_time_s(rows * outputs, device, scaling) + input_s + weight_s
        else:
            backward_s = 0.0
        return KernelTime(
            forward_s,
            backward_s + added_s,
            weight_s + added_s,
            3,
            input_grad + weight_grad + (input_grad or weight_grad),
        )

    def experts(
        self, tokens: int, choices: int, hidden: int, experts: int, wide: int, width: int
    ) -> KernelTime:
        """Kernel time of routed experts on one rank.

        `choices` rows of `hidden` elements are spread evenly over `experts`. They pass matrices
        (hidden, wide) and (width, hidden), and are summed for each of `tokens`.

        The kernels between the products are those of `autopar_kernels.routed_experts`. They gather
        rows, activate and gate, put rows back in order, weight and sum; backward reverses each. In
        fp8, rows and weights are cast for the products.
        """
        key = "experts", tokens, choices, hidden, experts, wide, width
        if key in self._known:
            return self._known[key]
        fp8, device, scaling = (
            self.software.matmul_dtype == "fp8",
            self.device,
            self.software.fp8_scaling,
        )
        dtype = "fp8" if fp8 else self.precision
        rows = [choices // experts + (e < choices % experts) for e in range(experts)]
        mean = max(ceil(choices / experts), 1)

        def cast_s(elements: int) -> float:
            return cast_to_fp8_time_s(elements, device, scaling) if fp8 else 0.0

        (forward_s, forward), (backward_s, backward) = self._between_products(
            tokens, choices, hidden, wide, width
        )
        forward_s += _ROUTING_KERNELS * device.launch_s
        sizes = choices * hidden, choices * wide, choices * width
        for chain in further_chains(self.software, self.itemsize, experts, *sizes):
            forward_s += chain.forward.time_s(device)
            backward_s += chain.backward.time_s(device)
            forward, backward = forward + chain.forward.count, backward + chain.backward.count
        weight_s = 0.0
        for k, n in ((hidden, wide), (width, hidden)):
            forward_s += (
                cast_s(choices * k)
                + cast_s(experts * n * k)
                + grouped_matmul_time_s(rows, n, k, device, dtype, scaling=scaling)
            )
            backward_s += cast_s(choices * n) + grouped_matmul_time_s(
                rows, k, n, device, dtype, scaling=scaling
            )
            weight_s += shaped_matmul_time_s(
                n,
                k,
                mean,
                device,
                dtype,
                batch=experts,
                result_itemsize=self.gradient_itemsize,
                scaling=scaling,
            )
        count = forward + 2 + 4 * fp8 + _ROUTING_KERNELS, backward + 4 + 2 * fp8
        self._known[key] = KernelTime(forward_s, backward_s + weight_s, weight_s, *count)
        return self._known[key]

    def _between_products(
        self, tokens: int, choices: int, hidden: int, wide: int, width: int
    ) -> tuple[tuple[float, int], tuple[float, int]]:
        """(seconds, kernels) of routed experts without their products, for forward and for
        backward.
        """
        inner, outer, result = (
            self.itemsize * x for x in (choices * hidden, choices * width, tokens * hidden)
        )
        between, compiled = self.itemsize * choices * wide, self.software.fuses
        gated = wide != width
        activation = [2 * outer, 3 * outer] if gated else [2 * outer]
        activation_back = [5 * outer, 3 * outer] if gated else [3 * outer]
        # of each chain: bytes of eager kernels, bytes of one fused kernel
        forward = (
            ([result + inner], result + inner),
            (activation, between + outer),
            ([2 * inner, 2 * inner, inner + result], inner + result),
        )
        backward = (
            ([3 * inner], inner + result),
            (activation_back, 2 * between + outer),
            ([2 * inner, 3 * inner, 3 * inner], 3 * inner),
        )
        moves = compiled and not self.software.permutes_by_op
        fused = (moves, compiled, moves)  # gathering rows, activation, putting rows back
        there, back = (
            (
                sum(
                    chain_time_s(*chain, self.device, joined)
                    for chain, joined in zip(chains, fused, strict=True)
                ),
                sum(
                    1 if joined else len(chain[0])
                    for chain, joined in zip(chains, fused, strict=True)
                ),
            )
            for chains in (forward, backward)
        )
        return there, back

    def grouped(self, rows: int, groups: int, n: int, k: int, differentiable: bool) -> KernelTime:
        """Kernel time of one grouped product and the two products of its backward: (rows, k) by
        `groups` matrices (k, n), with rows spread evenly. Not `differentiable`: backward takes 0.
        """
        counts = [rows // groups + (g < rows % groups) for g in range(groups)]
        forward_s = grouped_matmul_time_s(counts, n, k, self.device, self.precision)
        if not differentiable:
            return KernelTime(forward_s, 0.0, 0.0, 1, 0)
        mean, itemsize = max(ceil(rows / groups), 1), self.gradient_itemsize
        weight_s = shaped_matmul_time_s(
            n, k, mean, self.device, self.precision, batch=groups, result_itemsize=itemsize
        )
        return KernelTime(
            forward_s,
            grouped_matmul_time_s(counts, k, n, self.device, self.precision) + weight_s,
            weight_s,
            1,
            2,
        )

    def roofline(
        self, flops: float, forward_bytes: float, backward_bytes: float, products: float
    ) -> KernelTime:
        """Kernel time of a contraction without a model of its own, by the roofline. Backward has
        `products` times its FLOPs.
        """
        forward_s = matmul_time_s(flops, forward_bytes, self.device, self.precision)
        backward_s = (
            matmul_time_s(int(flops * products), backward_bytes, self.device, self.precision)
            if products
            else 0.0
        )
        return KernelTime(forward_s, backward_s, 0.0, 1, ceil(products))

    # ---------------------------------------------------------------------------------------------------------------- attention

    def attention(
        self, a: LocalAttention, flops: int, forward_bytes: int, backward_bytes: int
    ) -> KernelTime:
        """Kernel time of attention.

        In bf16 and fp16, a measured flash kernel of the device is used if there is one. Otherwise
        FLOPs and bytes decide, and backward takes 2.5 times forward. With dropout, attention runs
        op by op and is priced so. Context ranks share one sequence's work equally here;
        `context_method.py` prices imbalance and transfers.
        """
        key = a, flops, forward_bytes, backward_bytes
        if key not in self._known:
            self._known[key] = self._attention(a, flops, forward_bytes, backward_bytes)
        return self._known[key]

    def _attention(
        self, a: LocalAttention, flops: int, forward_bytes: int, backward_bytes: int
    ) -> KernelTime:
        if a.dropout:
            sizes = a.batch, a.heads, a.queries, a.keys, a.head_dim, self.device
            compiled = self.software.fuses and self.software.joins != "by hand, softmax alone"
            forward_s, backward_s = (
                unfused_attention_time_s(
                    *sizes,
                    dtype=self.precision,
                    fused_softmax=compiled,
                    dropout=True,
                    backward=backward,
                )
                for backward in (False, True)
            )
            return KernelTime(
                forward_s, backward_s, 0.0, 4 if compiled else 6, 6 if compiled else 8
            )
        if (kernel := self.flash) is None:
            return self.roofline(flops, forward_bytes, backward_bytes, 2.5)

        def seconds(backward: bool) -> float:
            whole_s = flash_attention_time_s(
                batch=a.batch,
                heads=a.heads,
                key_heads=a.key_heads,
                queries=a.queries,
                keys=a.keys,
                head_dim=a.head_dim,
                device=self.device,
                kernel=kernel,
                dtype=self.precision,
                causal=a.causal,
                window=a.window,
                backward=backward,
                fitted=self.software.fitted,
            )
            return (
                whole_s - self.device.launch_s
            ) / a.context_ranks + a.blocks * self.device.launch_s

        return KernelTime(seconds(False), seconds(True), 0.0, a.blocks, a.blocks)

    # ------------------------------------------------------------------------------------------------------------------- memory

    def stream(
        self, forward_bytes: float, backward_bytes: float, differentiable: bool, kernels: int = 1
    ) -> KernelTime:
        """Time of `kernels` memory-bound kernels that move these bytes. Without `backward_bytes`,
        or if not `differentiable`, backward takes 0. With `kernels=0` it is a part of a chain that
        another call launches.
        """

        def seconds(size_bytes: float) -> float:
            return memory_time_s(size_bytes, self.device) + (kernels - 1) * self.device.launch_s

        backward = bool(backward_bytes) and differentiable
        return KernelTime(
            seconds(forward_bytes),
            seconds(backward_bytes) if backward else 0.0,
            0.0,
            kernels,
            kernels if backward else 0,
        )
