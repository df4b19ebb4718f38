"""Complex numbers as pairs of real tensors, real part and imaginary part.

The layout algebra, communication and optimizers know real tensors alone. A loss is real, so the
gradients of the two parts are those that autograd of complex numbers gives.

Discrete Fourier transforms become one op of pairs, `autopar::fourier`; those that return real
numbers become `autopar::real_fourier`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from autopar_kernels.registration import register_composite
from torch import Tensor
from torch.fx import Graph, Node

from autopar.errors import AutoparError
from autopar.ir.calls import argument, op_name
from autopar.ops.aten import aten
from autopar.trace.edit import call, is_op
from autopar.trace.user_lines import line_of_node

Pair = tuple[Any, ...]
"""The real and the imaginary part: nodes, or numbers."""

_OPERANDS = "Tensor real, Tensor? imag, str transform, SymInt[]? size, int[] dim, str? norm"


def _fourier(
    real: Tensor,
    imag: Tensor | None,
    transform: str,
    size: list[int] | None,
    dim: list[int],
    norm: str | None,
) -> Any:
    values = real if imag is None else torch.complex(real, imag)
    found = getattr(torch.fft, transform)(values, size, dim, norm)
    return found if not found.is_complex() else (found.real.clone(), found.imag.clone())


register_composite(f"fourier({_OPERANDS}) -> (Tensor, Tensor)", _fourier)
register_composite(f"real_fourier({_OPERANDS}) -> Tensor", _fourier)


def spell_complex(graph: Graph) -> None:
    """Rewrite the graph, in place, so that every complex value is two real ones. Complex buffers
    and constants stay; they are read as pairs.

    Raises AutoparError for an op of complex numbers that has no spelling in pairs.
    """
    pairs: dict[Node, Any] = {}
    for node in list(graph.nodes):
        if _is_complex(node) or any(each in pairs for each in node.all_input_nodes):
            _Spelling(graph, node, pairs).run()
    for node in reversed(pairs):
        if node.op == "call_function":
            graph.erase_node(node)


def _is_complex(node: Node) -> bool:
    val = node.meta.get("val")
    values = val if isinstance(val, (list, tuple)) else (val,)
    return any(isinstance(each, Tensor) and each.is_complex() for each in values)


class _Spelling:
    """Rewrites one node of complex numbers as calls of real tensors. `pairs` maps each earlier
    complex node to its (real, imaginary) parts; `run` adds this one.
    """

    def __init__(self, graph: Graph, node: Node, pairs: dict[Node, Any]) -> None:
        self.graph, self.node, self.pairs = graph, node, pairs
        self.target: Any = node.target
        self.args: tuple[Any, ...] = node.args

    def run(self) -> None:
        """Write real calls before the node. A complex result is stored in `self.pairs`; a real one
        replaces the node, which is erased. Raises AutoparError if the op has no spelling in pairs.
        """
        node, name = self.node, _name(self.node)
        if node.op == "output":
            raise AutoparError("forward returns a complex tensor; a loss is a real number")
        before = self.graph.inserting_before
        with self.graph.inserting_after(node) if node.op == "placeholder" else before(node):
            if node.op == "placeholder":
                self.pairs[node] = self._halves()
            elif node.target is operator.getitem:
                self.pairs[node] = self.pairs[self.args[0]][self.args[1]]
            elif not isinstance(node.meta.get("val"), (Tensor, list, tuple)):
                node.args = torch.fx.map_arg(node.args, self.real)  # a size
            elif name in _SPELLINGS:
                self._keep(_SPELLINGS[name](self))
            else:
                shape = tuple(map(str, node.meta["val"].shape)) if _is_complex(node) else ""
                raise AutoparError(
                    f"{name}{line_of_node(node)} of complex numbers {shape} has no spelling in pairs "
                    "of real tensors, which autopar needs: write it with real and imaginary parts "
                    "(torch.view_as_real, .real, .imag)"
                )

    def _keep(self, result: Any) -> None:
        if _is_complex(self.node):
            self.pairs[self.node] = result
        else:
            self.node.replace_all_uses_with(result)
            self.graph.erase_node(self.node)

    def emit(self, target: Callable, *args: Any, **kwargs: Any) -> Node:
        """Insert a call of `target` with real operands before the node, and return it."""
        return call(self.graph, self.node, target, *args, **kwargs)

    def of(self, operand: Any) -> Pair:
        """The (real, imaginary) parts of an operand: nodes or numbers. The imaginary part of what
        is real is None.
        """
        if isinstance(operand, complex):
            return operand.real, operand.imag
        return (
            self.pairs.get(operand, (operand, None))
            if isinstance(operand, Node)
            else (operand, None)
        )

    def real(self, operand: Any) -> Any:
        """The real part of an operand, a node or a number; the operand itself if it is real."""
        return self.of(operand)[0]

    def whole(self, operand: Any) -> Pair:
        """The (real, imaginary) parts of an operand, never None: what is real gets zeros, and real
        tensors are cast to the dtype of the node's parts.
        """
        real, imag = self.of(operand)
        if isinstance(real, Node):
            dtype = self._dtype()
            real = (
                self.emit(aten.to.dtype, real, dtype) if real.meta["val"].dtype != dtype else real
            )
            imag = self.emit(aten.zeros_like.default, real) if imag is None else imag
        return real, 0.0 if imag is None else imag

    def _dtype(self) -> torch.dtype:
        val = self.node.meta["val"]
        return (val[0] if isinstance(val, (list, tuple)) else val).dtype.to_real()

    def _halves(self) -> Pair:
        """The (real, imaginary) parts of the node, a complex buffer or constant, as new calls right
        after it.
        """
        both = call(self.graph, self.node, aten.view_as_real.default, self.node)
        with self.graph.inserting_after(both):
            imag = call(self.graph, self.node, aten.select.int, both, -1, 1)
            real = call(self.graph, self.node, aten.select.int, both, -1, 0)
        return real, imag

    def parts(self, both: Node) -> Pair:
        """The two results of the call `both`, as new getitem nodes."""
        found = []
        for index, val in enumerate(both.meta["val"]):
            found.append(self.graph.call_function(operator.getitem, (both, index)))
            found[-1].meta = dict(both.meta) | {"val": val}
        return found[0], found[1]


def _name(node: Node) -> str:
    return op_name(node).removeprefix("aten::") or str(node.target)


def _part_of(at: _Spelling, part: int) -> Any:
    return torch.fx.map_arg(at.args, lambda operand: at.of(operand)[part] or operand)


def _alike(at: _Spelling) -> Any:
    """The result of an op that moves or adds elements: the op on the real parts, and on the
    imaginary parts. A pair of nodes, or a list of pairs for an op with several results.
    """
    node = at.node
    numbers = {key: value for key, value in node.kwargs.items() if key != "dtype"}
    results = []
    for part in (0, 1):
        results.append(at.emit(at.target, *_part_of(at, part), **numbers))
    if isinstance(node.meta["val"], Tensor):
        return tuple(results)
    return list(zip(*(_items(at, each) for each in results), strict=True))


def _items(at: _Spelling, several: Node) -> Iterator[Node]:
    for index, val in enumerate(several.meta["val"]):
        item = at.graph.call_function(operator.getitem, (several, index))
        item.meta = dict(several.meta) | {"val": val}
        yield item


def _joined(at: _Spelling) -> Pair:
    """The pair of nodes for cat, stack or where, whose operands may be complex or real."""
    if is_op(at.node, "where"):
        condition, *given = at.args
        operands = [at.whole(each) for each in given]
        return tuple(at.emit(at.target, condition, *each) for each in zip(*operands, strict=True))
    operands = [at.whole(each) for each in at.args[0]]
    return tuple(
        at.emit(at.target, list(each), *at.args[1:]) for each in zip(*operands, strict=True)
    )


def _multilinear(at: _Spelling) -> Pair:
    """The pair of nodes for a product of any kind (matmul, einsum, linear, ...): the sum over the
    parts of all factors, with i * i = -1. The bias of a linear layer is added.
    """
    node = at.node
    listed = is_op(node, "einsum")
    factors = list(at.args[1] if listed else at.args)
    bias = factors.pop() if is_op(node, "linear") and len(factors) > 2 else None
    choices = [
        [(each, power) for power, each in enumerate(at.of(factor)) if each is not None]
        for factor in factors
    ]
    sums: list[Any] = [None, None]
    for chosen in product(*choices):
        power, operands = sum(p for _, p in chosen), [each for each, _ in chosen]
        args = (at.args[0], operands) if listed else operands
        term, part, negative = at.emit(at.target, *args), power % 2, power % 4 > 1
        if sums[part] is None:
            sums[part] = at.emit(aten.neg.default, term) if negative else term
        else:
            sums[part] = at.emit(aten.sub.Tensor if negative else aten.add.Tensor, sums[part], term)
    if bias is not None:
        sums = [at.emit(aten.add.Tensor, *each) for each in zip(sums, at.whole(bias), strict=True)]
    return tuple(sums)


def _added(at: _Spelling) -> Pair:
    node = at.node
    (left, left_i), (right, right_i) = map(at.of, at.args[:2])
    kwargs, shape = dict(node.kwargs), list(node.meta["val"].shape)
    real = at.emit(at.target, left, right, **kwargs)
    if left_i is None or right_i is None:  # zeros of the other's shape
        one = at.emit(aten.zeros_like.default, real)
        left_i, right_i = (one if each is None else each for each in (left_i, right_i))
    imag = at.emit(at.target, left_i, right_i, **kwargs)
    return real, imag if len(imag.meta["val"].shape) == len(shape) else _wide(at, imag, shape)


def _wide(at: _Spelling, value: Node, shape: list) -> Node:
    return at.emit(aten.expand.default, value, shape)


def _product(at: _Spelling, left: Pair, right: Pair) -> Pair:
    mul = lambda a, b: at.emit(aten.mul.Tensor, a, b)  # noqa: E731
    (a, b), (c, d) = left, right
    return (
        at.emit(aten.sub.Tensor, mul(a, c), mul(b, d)),
        at.emit(aten.add.Tensor, mul(a, d), mul(b, c)),
    )


def _inverse(at: _Spelling, value: Pair) -> Pair:
    real, imag = value
    square = at.emit(aten.add.Tensor, *(at.emit(aten.mul.Tensor, x, x) for x in value))
    return (
        at.emit(aten.div.Tensor, real, square),
        at.emit(aten.neg.default, at.emit(aten.div.Tensor, imag, square)),
    )


def _divided(at: _Spelling) -> Pair:
    above, below = at.args[:2]
    real, imag = at.of(below)
    if isinstance(below, complex):
        inverse = 1 / below
        return _product(at, at.whole(above), (inverse.real, inverse.imag))
    if imag is not None:
        return _product(at, at.whole(above), _inverse(at, (real, imag)))
    return tuple(at.emit(aten.div.Tensor, part, real) for part in at.whole(above))


def _power(at: _Spelling) -> Pair:
    base, exponent = at.whole(at.args[0]), at.args[1]
    if not isinstance(exponent, (int, float)) or exponent not in range(9):
        raise AutoparError(
            f"pow{line_of_node(at.node)} of complex numbers: autopar knows whole exponents up to 8; "
            "write others as torch.exp(exponent * torch.log(base)) in real and imaginary parts"
        )
    found = (
        at.emit(aten.ones_like.default, base[0]),
        at.emit(aten.zeros_like.default, base[1]),
    )
    for k in range(int(exponent)):
        found = base if k == 0 else _product(at, found, base)
    return found


def _polar(at: _Spelling, size: Any, angle: Any) -> Pair:
    turned = at.emit(aten.cos.default, angle), at.emit(aten.sin.default, angle)
    return tuple(at.emit(aten.mul.Tensor, size, each) for each in turned)


def _exponential(at: _Spelling) -> Pair:
    real, imag = at.whole(at.args[0])
    return _polar(at, at.emit(aten.exp.default, real), imag)


def _length(at: _Spelling) -> Node:
    """The node of the absolute values: the norm of the pair, whose gradient at 0 is 0."""
    both = at.emit(aten.stack.default, list(at.whole(at.args[0])), -1)
    return at.emit(aten.linalg_vector_norm.default, both, 2, [-1])


def _conjugate(at: _Spelling) -> Pair:
    real, imag = at.whole(at.args[0])
    return real, at.emit(aten.neg.default, imag)


def _cast(at: _Spelling) -> Any:
    """A cast from one complex dtype to another or from a real one, as a pair of nodes. A cast to a
    real dtype is one node, of the real part.
    """
    operand, dtype = at.args[0], at.node.meta["val"].dtype
    if not dtype.is_complex:
        return at.emit(aten.to.dtype, at.real(operand), dtype)
    real, imag = at.whole(operand)
    return tuple(at.emit(aten.to.dtype, part, dtype.to_real()) for part in (real, imag))


def _constant(at: _Spelling) -> Pair:
    """The pair of nodes for zeros, ones, full, empty or scalar_tensor of a complex dtype."""
    node, kwargs = at.node, {"dtype": at.node.meta["val"].dtype.to_real()}
    name, given = _name(node), list(at.args)
    known = {"zeros": 0, "empty": 0, "ones": 1}
    value = complex(known[name] if name in known else given[-1])
    size = [] if name == "scalar_tensor" else given[0]
    return tuple(at.emit(aten.full.default, size, x, **kwargs) for x in (value.real, value.imag))


def _alike_filled(at: _Spelling) -> Pair:
    real, _ = at.whole(at.args[0])
    value = {"zeros_like": 0.0, "ones_like": 1.0, "empty_like": 0.0}[_name(at.node)]
    return at.emit(aten.full_like.default, real, value), at.emit(aten.zeros_like.default, real)


def _paired(at: _Spelling) -> Pair:
    """The pair of nodes for view_as_complex: elements 0 and 1 of the last dim."""
    return tuple(at.emit(aten.select.int, at.args[0], -1, part) for part in (0, 1))


def _transform(at: _Spelling) -> Any:
    """A Fourier transform over one dim, two or any number, as one call: a pair of nodes, or a real
    node for irfft and its like.
    """
    node, name = at.node, _name(at.node)
    kind = name.removeprefix("fft_").removesuffix("2").removesuffix("n")
    real, imag = at.of(at.args[0])
    rank = real.meta["val"].dim()
    size = argument(node, "n" if name.endswith("fft") else "s")
    dim = argument(node, "dim")
    if name.endswith("fft"):
        size, dim = None if size is None else [size], [-1 if dim is None else dim]
    elif dim is None:
        first = 2 if name.endswith("2") else rank if size is None else len(size)
        dim = list(range(rank - first, rank))
    if kind == "irfft" and imag is None:
        imag = at.emit(aten.zeros_like.default, real)
    operands = (real, imag, f"{kind}n", size, [each % rank for each in dim], argument(node, "norm"))
    if kind == "irfft":
        return at.emit(torch.ops.autopar.real_fourier.default, *operands)
    return at.parts(at.emit(torch.ops.autopar.fourier.default, *operands))


_MOVES = """
    reshape view unsqueeze squeeze transpose permute expand slice select unbind split_with_sizes index index_select gather repeat
    repeat_interleave flip roll pad constant_pad_nd diagonal unfold tril triu clone contiguous alias detach neg sum cumsum mean
    lift_fresh_copy
""".split()  # fmt: skip
_SPELLINGS: dict[str, Callable[[_Spelling], Any]] = {
    **dict.fromkeys(_MOVES, _alike),
    **dict.fromkeys(("cat", "stack", "where"), _joined),
    **dict.fromkeys(("mul", "matmul", "mm", "bmm", "mv", "dot", "outer", "linear", "einsum"), _multilinear),
    **dict.fromkeys(("add", "sub"), _added),
    "div": _divided,
    "reciprocal": lambda at: _inverse(at, at.whole(at.args[0])),
    "pow": _power,
    "square": lambda at: _product(at, *[at.whole(at.args[0])] * 2),
    "exp": _exponential,
    "abs": _length,
    "angle": lambda at: at.emit(aten.atan2.default, *reversed(at.whole(at.args[0]))),
    **dict.fromkeys(("conj", "_conj", "conj_physical", "_conj_physical"), _conjugate),
    **dict.fromkeys(("resolve_conj", "resolve_neg"), lambda at: at.whole(at.args[0])),
    "real": lambda at: at.whole(at.args[0])[0],
    "imag": lambda at: at.whole(at.args[0])[1],
    "to": _cast,
    **dict.fromkeys(("zeros", "ones", "full", "empty", "scalar_tensor"), _constant),
    **dict.fromkeys(("zeros_like", "ones_like", "empty_like"), _alike_filled),
    "view_as_complex": _paired,
    "complex": lambda at: tuple(at.args[:2]),
    "view_as_real": lambda at: at.emit(aten.stack.default, list(at.whole(at.args[0])), -1),
    "polar": lambda at: _polar(at, *at.args[:2]),
    **{
        f"fft_{kind}{dims}": _transform
        for kind in ("fft", "ifft", "rfft", "irfft")
        for dims in ("", "2", "n")
    },
}  # fmt: skip
"""What an op is in pairs, by its name; the result is a pair, a list of pairs, or a real node."""
