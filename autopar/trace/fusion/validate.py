"""Whether a match computes what its subgraph computes: both are evaluated on small random tensors, and compared.

In fp64, with every cast widened to fp64, results and gradients agree to `_EXACT`.  In the graph's own dtypes the results have the same
dtypes, and the op is as close to the fp64 result as the subgraph is, but for one rounding.  A result of few elements may be close by
chance.  Errors are then root mean squares over several sets of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from autopar.ir.calls import op_name
from autopar.trace.fusion.algebra import at
from autopar.trace.fusion.matches import VIEWS, Match, viewed

_EXACT = 1e-12
"""Largest difference in fp64, relative to the largest element."""
_ROWS = 3
"""Dims other than the last have at most this size."""

_FEW, _DRAWS = 16, 16
"""The number of elements below which a result is small, and the sets of tensors that it is compared
on.
"""

Values = dict[Node, Tensor]


def wrong(match: Match) -> str:
    """What the op of a match computes otherwise than the subgraph, as text; '' if both agree.
    Evaluates both on small random tensors.
    """
    given = _operands(match)
    try:
        wide = {node: _widened(value) for node, value in given.items()}
        ours, theirs = _with_gradients(match, wide, _op), _with_gradients(match, wide, _subgraph)
        for name in ours:
            if (error := _difference(ours[name], theirs[name])) > _EXACT:
                return f"its {name} differs by {error:.1e} in fp64"
        first = _rounded(match, given)
        for ours_, theirs_, _ in first:
            if ours_.dtype != theirs_.dtype or ours_.shape != theirs_.shape:
                return f"the op gives {_described(ours_)}, the subgraph {_described(theirs_)}"
        small_ones = any(ours_.numel() < _FEW for ours_, _, _ in first)
        more = range(1, _DRAWS if small_ones else 1)
        drawn = [first, *(_rounded(match, _operands(match, seed)) for seed in more)]
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        return f"it cannot be evaluated on small tensors: {str(error).splitlines()[0]}"
    for tensors in zip(*drawn, strict=True):
        own, other = (_mean_difference([(one[k], one[2]) for one in tensors]) for k in (0, 1))
        dtype = tensors[0][0].dtype
        if dtype is torch.float64:  # there the subgraph is its own reference, and `_EXACT` decides
            continue
        if not own <= other + torch.finfo(dtype).eps:
            return f"in {dtype} it is off by {own:.1e}, the subgraph by {other:.1e}"
    return ""


def _rounded(match: Match, given: Values) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(the op's, the subgraph's, the subgraph's in fp64) of each result on tensors by operand node.
    The first two are in the graph's own dtypes.
    """
    wide = {node: _widened(value) for node, value in given.items()}
    results = _op(match, given, None), _subgraph(match, given, None)
    return list(zip(*results, _subgraph(match, wide, torch.float64), strict=True))


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def _operands(match: Match, seed: int = 0) -> Values:
    """Random tensors by operand node, in the graph's dtypes: symbolic dims have 2 elements, others
    at most `_ROWS`, the last dim all. Integers are 0 or 1.
    """
    generator = torch.Generator().manual_seed(seed)
    found: Values = {}
    for name, node in match.operands.items():
        val = node.meta["val"]
        shape = match.shapes.get(name) or small_shape(node)
        if val.is_floating_point():
            found[node] = torch.randn(shape, generator=generator, dtype=torch.float64).to(val.dtype)
        else:
            found[node] = torch.randint(0, 2, shape, generator=generator).to(val.dtype)
    return found


def small_shape(node: Node) -> tuple[int, ...]:
    """The small shape that a node's tensor has where a match is evaluated: dims by `small`, the
    last dim whole unless it is symbolic.
    """
    shape = node.meta["val"].shape
    last = [int(size) if isinstance(size, int) else small(size) for size in shape[-1:]]
    return *(small(size) for size in shape[:-1]), *last


def _small_pairs(node: Node) -> list[int] | None:
    """The small shape of a value that is another one with its last dim cut into two, which stay
    whole. None for any other value.
    """
    shape, whole = node.meta["val"].shape, at(node).meta["val"].shape
    last = [*shape[-2:], *whole[-1:]]
    if len(shape) != len(whole) + 1 or not all(isinstance(size, int) for size in last):
        return None
    if last[0] * last[1] != last[2]:
        return None
    return [small(size) for size in shape[:-2]] + last[:2]


def small(size: Any) -> int:
    """The size that stands for `size` where a match is evaluated: at most `_ROWS`, and 2 for a
    symbolic size.
    """
    return min(int(size), _ROWS) if isinstance(size, int) else 2


def _widened(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


Evaluation = Callable[[Match, Mapping[Node, Tensor], "torch.dtype | None"], Sequence[Tensor]]


def _op(match: Match, given: Mapping[Node, Tensor], wide: torch.dtype | None) -> Sequence[Tensor]:
    """The results of the op on tensors by operand node (`given`). If `wide` is None, the first is
    rounded as the match says.
    """
    tensors = {
        name: viewed(match, name, given[node], _shaped if name in match.shapes else _called)
        for name, node in match.operands.items()
    }
    found = match.op(**tensors, **match.attributes)
    if match.rounded is not None and wide is None:
        found = found.to(match.rounded)
    return (found,) if isinstance(found, Tensor) else found


def _called(op: Any, *args: Any) -> Any:
    return op(*args)


def _shaped(op: Any, tensor: Tensor, *args: Any) -> Any:
    """The result of an op on a tensor that has the shape after all views already."""
    return tensor if op._schema.name in VIEWS else op(tensor, *args)


def _subgraph(
    match: Match, given: Mapping[Node, Tensor], wide: torch.dtype | None
) -> Sequence[Tensor]:
    """The results of the replaced nodes on tensors by operand node (`given`). All casts are to
    `wide` unless that is None.
    """
    values: dict[Node, Any] = dict(given) | {
        n: given[of] for n, of in match.copies.items() if of in given
    }
    if match.apart is not None:  # what the product gives with its bias
        x, bias = (match.operands[name] for name in ("x", "bias"))
        values[x] = given[x] + given[bias]
    for node in match.interior:
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
        if node in match.passed:  # a view, which changes no value
            values[node] = args[0]
            continue
        if op_name(node) in ("aten::reshape", "aten::expand"):
            args = (args[0], _small_pairs(node) or small_shape(node))
        if wide is not None:
            args, kwargs = _cast_to(wide, args), _cast_to(wide, kwargs)
            if op_name(node) == "aten::rms_norm":  # whose default follows the dtype
                args, kwargs = args[:3], {"eps": match.attributes["eps"]}
        values[node] = node.target(*args, **kwargs)  # type: ignore[operator]  # an op
        # of a result, such as the sum that a norm reads
        values |= {copy: values[node] for copy, of in match.copies.items() if of is node}
    return [values[node] for node in match.results]


def _cast_to(wide: torch.dtype, value: Any) -> Any:
    """The arguments (nested in dicts, lists and tuples) with `wide` in the place of every floating
    dtype.
    """
    if isinstance(value, dict):
        return {name: _cast_to(wide, inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_cast_to(wide, inner) for inner in value)
    return wide if isinstance(value, torch.dtype) and value.is_floating_point else value


def _with_gradients(match: Match, given: Values, evaluate: Evaluation) -> dict[str, Tensor]:
    """The results in fp64 ('result 0', ...) and the gradients of operands that have one ('gradient
    of x', ...), by these names. `evaluate` is `_op` or `_subgraph`; `given` has tensors by operand
    node.

    Gradients of the results are random, the same in each call. An operand that is not read has the
    gradient 0.
    """
    leaves = {
        node: value.detach().requires_grad_(_has_gradient(node)) for node, value in given.items()
    }
    results = evaluate(match, leaves, torch.float64)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(r.shape, generator=generator, dtype=r.dtype) for r in results]
    wanted = {
        name: leaves[node] for name, node in match.operands.items() if leaves[node].requires_grad
    }
    gradients = torch.autograd.grad(results, list(wanted.values()), weights, allow_unused=True)
    found = {f"result {i}": result.detach() for i, result in enumerate(results)}
    return found | {
        f"gradient of {name}": torch.zeros(()) if gradient is None else gradient
        for name, gradient in zip(wanted, gradients, strict=True)
    }


def _has_gradient(node: Node) -> bool:
    """Whether an operand is a floating tensor through which a gradient flows back (`meta['grad']`)."""
    floating: bool = node.meta["val"].is_floating_point()
    return floating and bool(node.meta.get("grad"))


def _difference(one: Tensor, other: Tensor) -> float:
    """The largest difference of elements, relative to the largest element of `other`; inf if one is
    NaN, 0.0 without elements.
    """
    return _mean_difference([(one, other)])


def _mean_difference(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """The root mean square over pairs of the largest difference of elements, relative to the largest
    element of all second tensors; inf if one is NaN, 0.0 without elements.
    """
    squares = [_largest(one.double() - other.double()) ** 2 for one, other in pairs]
    scale = max(_largest(other) for _, other in pairs) or 1.0
    error = (sum(squares) / len(pairs)) ** 0.5 / scale
    return error if error == error else float("inf")


def _largest(tensor: Tensor) -> float:
    """The largest absolute value of an element; 0.0 without elements, NaN if one is NaN."""
    return float(tensor.double().abs().max()) if tensor.numel() else 0.0
