"""Finds the tensors that autograd keeps for backward, by running each op on the meta device under
saved-tensor hooks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from autopar.errors import AutoparError, one_line
from autopar.ir.calls import is_attention, op_name
from autopar.ops.dims import Call, is_symbolic
from autopar.ops.random import drops
from autopar.ops.values import is_getitem, operand_names, ops, result_names

PROBE_ROWS = 2


@dataclass(frozen=True, slots=True)
class SavedByOp:
    """What autograd keeps for one op: values of the graph by name, each replaced by the value that
    owns its storage, and bytes of private tensors per batch row.
    """

    values: tuple[str, ...]
    extra_bytes_per_row: float


def observe_saved(graph: Graph) -> tuple[dict[str, SavedByOp], dict[str, str]]:
    """(what each op keeps, by op name; the value that owns the storage of each value).

    Parameters are left out, since they are resident anyway. Fused attention is stated, not
    observed, because the meta device has no fused kernel. It keeps queries, keys, values, its
    result, and one fp32 log-sum-exp per query (Dao et al. 2022, algorithm 2). Attention with
    dropout runs unfused (`rewrite/lowerings/dropout.py`). It keeps scaled queries, keys, values,
    probabilities before and after dropout, and a bool for each probability.
    """
    env: dict[Node, Any] = {}
    owner: dict[int, str] = {}
    keep: list[torch.Tensor] = []  # storages must stay alive, or their addresses are reused
    roots: dict[str, str] = {}
    saved: dict[str, SavedByOp] = {}

    def enter(name: str, tensor: torch.Tensor) -> None:
        keep.append(tensor)
        roots[name] = owner.setdefault(tensor.untyped_storage()._cdata, name)

    for node in graph.nodes:
        if node.op == "output":
            break
        if node.op in ("placeholder", "get_attr"):
            env[node] = _probe(node)
            enter(node.name, env[node])
            continue
        env[node], packed = _called(node, env)
        if is_getitem(node):
            continue
        out = env[node] if isinstance(env[node], (list, tuple)) else (env[node],)
        for name, tensor in zip(
            result_names(node), [t for t in out if isinstance(t, torch.Tensor)], strict=False
        ):
            enter(name, tensor)
        saved[node.name] = (
            _attention(node, roots) if is_attention(node) else _classify(packed, owner, graph)
        )
        if drops(node) and not is_attention(node):  # a byte says whether an element stays
            saved[node.name] = SavedByOp(
                (), math.prod(env[node].shape) / PROBE_ROWS if node.meta.get("grad") else 0.0
            )
    return saved, roots


def _called(node: Node, env: dict[Node, Any]) -> tuple[Any, list[torch.Tensor]]:
    """(result of a call on the meta device, tensors that autograd keeps for it)."""
    if not callable(node.target):
        raise ValueError(f"{node.name} calls {node.target!r}, which is no function")
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), env.__getitem__)
    args, kwargs = _concrete(args), _concrete(kwargs)
    if "device" in kwargs:
        kwargs["device"] = "meta"
    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        try:
            result = node.target(*args, **kwargs)
        except NotImplementedError as error:
            raise AutoparError(
                f"{op_name(node)} has no kernel on the meta device, so autopar cannot tell what autograd keeps for it: "
                f"{one_line(error)}. Register one with torch.library.register_fake, or spell it with other ops"
            ) from error
        except (RuntimeError, IndexError) as error:
            raise AutoparError(
                f"{op_name(node)} fails for a batch of {PROBE_ROWS} rows, for which autopar tries each op: {one_line(error)}. If forward "
                "takes a fixed number of rows (x[:5]), x[torch.arange(5) % x.shape[0]] takes them of any batch"
            ) from error
    return _like_queries(result, args[0]) if _fused_attention(node) else result, packed


def rerun_ops(
    graph: Graph, saved: dict[str, SavedByOp], roots: dict[str, str], early_stop: bool
) -> frozenset[str]:
    """Names of the ops that run again if the whole graph is recomputed: all, or with `early_stop`
    those before the last tensor that backward needs.

    `torch.utils.checkpoint` with use_reentrant=False stops there. An op saves its operands before
    it computes, and its results after.
    """
    calls = ops(graph)
    if not early_stop:
        return frozenset(node.name for node in calls)
    last = max(
        (number for number, node in enumerate(calls) if _keeps(saved.get(node.name))), default=-1
    )
    if last >= 0:
        node, found = calls[last], saved[calls[last].name]
        if not found.extra_bytes_per_row and set(found.values) <= {
            roots[name] for name in operand_names(node)
        }:
            last -= 1
    return frozenset(node.name for node in calls[: last + 1])


def _keeps(saved: SavedByOp | None) -> bool:
    return saved is not None and bool(saved.values or saved.extra_bytes_per_row)


def _fused_attention(node: Node) -> bool:
    return is_attention(node) and not drops(node)


def _like_queries(result: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """An empty tensor like the result of fused attention (b, n, s, d), whose dims lie in memory in
    the order of those of the queries. Where positions are outside heads, joining the heads is a
    view and not a copy.
    """
    swapped = queries.stride(1) < queries.stride(2)
    shape = result.transpose(1, 2).shape if swapped else result.shape
    empty = torch.empty(
        shape, dtype=result.dtype, device=result.device, requires_grad=result.requires_grad
    )
    return empty.transpose(1, 2) if swapped else empty


def _probe(node: Node) -> torch.Tensor:
    val = node.meta["val"]
    shape = [_rows(s) for s in val.shape]
    return torch.empty(
        shape,
        dtype=val.dtype,
        device="meta",
        requires_grad=bool(node.meta.get("grad")) and val.is_floating_point(),
    )


def _rows(size: int | torch.SymInt) -> int:
    """A size as an integer, for a batch of `PROBE_ROWS` rows."""
    return int(_probed(size)) if is_symbolic(size) else int(size)


def _probed(number: Any) -> Any:
    """The value of a symbolic number for a batch of `PROBE_ROWS` rows."""
    expr = number.node.expr
    return expr.subs({s: PROBE_ROWS for s in expr.free_symbols})


def _concrete(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_concrete(v) for v in value)
    if isinstance(value, dict):
        return {k: _concrete(v) for k, v in value.items()}
    if isinstance(value, torch.SymFloat):
        return float(_probed(value))
    return _rows(value) if isinstance(value, torch.SymInt) else value


def _attention(node: Node, roots: dict[str, str]) -> SavedByOp:
    if not node.meta.get("grad"):
        return SavedByOp((), 0.0)
    query, key = Call(node).tensors[:2]
    if drops(node):
        size = query.element_size()
        queries = math.prod(_rows(s) for s in query.shape[:-1])
        own = queries * (_rows(query.shape[-1]) * size + _rows(key.shape[-2]) * (2 * size + 1))
        return SavedByOp(
            tuple(dict.fromkeys(roots[name] for name in operand_names(node)[1:3])), own / PROBE_ROWS
        )
    rows = 4.0
    for size in query.shape[:-1]:
        rows *= _rows(size)
    return SavedByOp(
        (*dict.fromkeys(roots[name] for name in operand_names(node)), node.name), rows / PROBE_ROWS
    )


def _classify(packed: list[torch.Tensor], owner: dict[int, str], graph: Graph) -> SavedByOp:
    parameters = {n.name for n in graph.nodes if n.op == "get_attr"}
    values: dict[str, None] = {}
    extra = 0.0
    seen: set[int] = set()
    for tensor in packed:
        storage = tensor.untyped_storage()._cdata
        if storage in owner:
            if owner[storage] not in parameters:
                values[owner[storage]] = None
        elif storage not in seen:
            seen.add(storage)
            extra += tensor.untyped_storage().nbytes()  # whole, where a part is kept
    return SavedByOp(tuple(values), extra / PROBE_ROWS)
