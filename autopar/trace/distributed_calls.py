"""The functions of torch.distributed as a single process has them, which forward calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.device_mesh as device_mesh
import torch.distributed.nn.functional as with_gradients
from torch import Tensor

from autopar.errors import AutoparError
from autopar.trace.user_lines import line_now


class _Done:
    """The handle of a collective that has ended."""

    def wait(self, *args: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    is_success = is_completed


# ------------------------------------------------------------------------------------------------------------------ collectives


def _end(kwargs: dict, args: tuple, place: int) -> _Done | None:
    """What a collective returns whose argument `place` is `async_op`."""
    return _Done() if kwargs.get("async_op", args[place : place + 1] == (True,)) else None


def _write(name: str, target: Tensor, value: Tensor) -> None:
    """Copy `value` into `target`, as a collective does, past autograd."""
    if target.numel() != value.numel() or target.dtype != value.dtype:
        _refuse(
            f"{name} of a tensor of shape ({_sizes(value)}) into one of ({_sizes(target)})",
            "forward sees one process, so that both have one size: take the world size from torch.distributed in forward",
        )
    with torch.no_grad():
        target.copy_(value.detach().reshape(target.shape))


def _sizes(tensor: Tensor) -> str:
    return ", ".join("batch" if isinstance(s, torch.SymInt) else str(s) for s in tensor.shape)


def _only(name: str, values: Any) -> Any:
    """The entry of a list that has one for each process."""
    if len(values) != 1:
        _refuse(
            f"{name} with {len(values)} tensors",
            "forward sees one process: make one for each of torch.distributed.get_world_size(), read in forward",
        )
    return values[0]


def _from_zero(name: str, *ranks: Any) -> None:
    for rank in ranks:
        if rank not in (None, 0):
            _refuse(f"{name} from or to rank {rank}", "forward sees one process, whose rank is 0")


def _all_reduce(tensor: Any, op: Any = None, group: Any = None, *args: Any, **kwargs: Any) -> Any:
    return _end(kwargs, args, 0)


def _all_gather(
    tensor_list: Any, tensor: Tensor, group: Any = None, *args: Any, **kwargs: Any
) -> Any:
    _write("all_gather", _only("all_gather", tensor_list), tensor)
    return _end(kwargs, args, 0)


def _into_tensor(
    output_tensor: Tensor | None = None,
    input_tensor: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    target = kwargs.get("output") if output_tensor is None else output_tensor
    value = kwargs.get("input") if input_tensor is None else input_tensor
    _write("a collective", target, value)  # type: ignore[arg-type]
    return _Done() if kwargs.get("async_op") or True in [a for a in args if a is True] else None


def _broadcast(tensor: Any, src: Any = None, group: Any = None, *args: Any, **kwargs: Any) -> Any:
    _from_zero("broadcast", src, kwargs.get("group_src"))
    return _end(kwargs, args, 0)


def _reduce(
    tensor: Any, dst: Any = None, op: Any = None, group: Any = None, *args: Any, **kwargs: Any
) -> Any:
    _from_zero("reduce", dst, kwargs.get("group_dst"))
    return _end(kwargs, args, 0)


def _gather(
    tensor: Tensor,
    gather_list: Any = None,
    dst: Any = None,
    group: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    _from_zero("gather", dst, kwargs.get("group_dst"))
    if gather_list is not None:
        _write("gather", _only("gather", gather_list), tensor)
    return _end(kwargs, args, 0)


def _scatter(
    tensor: Tensor,
    scatter_list: Any = None,
    src: Any = None,
    group: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    _from_zero("scatter", src, kwargs.get("group_src"))
    _write("scatter", tensor, _only("scatter", scatter_list))
    return _end(kwargs, args, 0)


def _reduce_scatter(
    output: Tensor, input_list: Any, op: Any = None, group: Any = None, *args: Any, **kwargs: Any
) -> Any:
    _write("reduce_scatter", output, _only("reduce_scatter", input_list))
    return _end(kwargs, args, 0)


def _all_to_all(
    output_tensor_list: Any, input_tensor_list: Any, group: Any = None, *args: Any, **kwargs: Any
) -> Any:
    target, value = (_only("all_to_all", x) for x in (output_tensor_list, input_tensor_list))
    _write("all_to_all", target, value)
    return _end(kwargs, args, 0)


def _barrier(*args: Any, **kwargs: Any) -> Any:
    return _Done() if kwargs.get("async_op") else None


def _all_gather_object(object_list: list, obj: Any, group: Any = None) -> None:
    _only("all_gather_object", object_list)
    object_list[0] = obj


def _broadcast_objects(object_list: list, src: Any = None, *args: Any, **kwargs: Any) -> None:
    _from_zero("broadcast_object_list", src, kwargs.get("group_src"))


def _new_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
    if ranks is not None and list(ranks) != [0]:
        _refuse(f"new_group({list(ranks)})", "forward sees one process, whose rank is 0")
    return None


_CALLS: dict[str, Callable] = {
    "get_world_size": lambda group=None: 1,
    "get_rank": lambda group=None: 0,
    "get_node_local_rank": lambda fallback_rank=None: 0,
    "get_group_rank": lambda group, global_rank: 0,
    "get_global_rank": lambda group, group_rank: 0,
    "get_process_group_ranks": lambda group=None: [0],
    "get_backend": lambda group=None: "gloo",
    "all_reduce": _all_reduce,
    "all_reduce_coalesced": _all_reduce,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _into_tensor,
    "all_gather_single": _into_tensor,
    "_all_gather_base": _into_tensor,
    "reduce_scatter_tensor": _into_tensor,
    "reduce_scatter_single": _into_tensor,
    "_reduce_scatter_base": _into_tensor,
    "all_to_all_single": _into_tensor,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
    "monitored_barrier": _barrier,
    "all_gather_object": _all_gather_object,
    "broadcast_object_list": _broadcast_objects,
    "new_group": _new_group,
}
"""Functions of torch.distributed as one process has them."""


def _same(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return tensor.view_as(tensor)


def _first(output: Any, values: Any, *args: Any, **kwargs: Any) -> Tensor:
    return _same(_only("a collective", values))


_WITH_GRADIENTS: dict[str, Callable] = {
    "all_reduce": _same,
    "broadcast": _same,
    "reduce": _same,
    "all_gather": lambda tensor, group=None: (_same(tensor),),
    "gather": lambda tensor, dst=0, group=None: (_same(tensor),),
    "scatter": lambda tensors, src=0, group=None: _same(_only("scatter", tensors)),
    "reduce_scatter": lambda output, input_list, op=None, group=None: _first(output, input_list),
    "all_to_all": lambda output_tensor_list, input_tensor_list, group=None: (
        _first(output_tensor_list, input_tensor_list),
    ),
    "all_to_all_single": lambda output, input, *args, **kwargs: _same(input),
    "_all_gather_base": lambda output_tensor, input_tensor, group=None: _same(input_tensor),
}
_FUNCTIONAL: dict[str, Callable] = {
    name: _same
    for name in (
        "wait_tensor", "broadcast", "all_reduce", "all_gather_single", "all_gather_single_autograd", "reduce_scatter_single",
        "reduce_scatter_single_autograd", "all_gather_tensor", "all_gather_tensor_autograd", "reduce_scatter_tensor",
        "reduce_scatter_tensor_autograd", "all_to_all_single", "all_to_all_single_autograd", "permute_tensor",
    )
} | {
    name: lambda tensors, *args, **kwargs: [*map(_same, tensors)]
    for name in (
        "all_reduce_coalesced", "all_gather_single_coalesced", "reduce_scatter_single_coalesced", "all_gather_into_tensor_coalesced",
        "reduce_scatter_tensor_coalesced",
    )
}  # fmt: skip
TABLES = ((dist, _CALLS), (with_gradients, _WITH_GRADIENTS), (functional, _FUNCTIONAL))
MODULES = (
    dist,
    dist.distributed_c10d,
    with_gradients,
    torch.distributed.nn,
    functional,
    device_mesh,
)
REFUSED = (
    "send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list", "init_process_group",
    "destroy_process_group", "split_group", "shrink_group", "new_subgroups", "new_subgroups_by_enumeration", "gather_object",
    "scatter_object_list", "all_gather_coalesced",
)  # fmt: skip
OPS = ("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")
"""Namespaces of ops that communicate."""


def refusing(name: str) -> Callable:
    """A function that raises AutoparError: one process does not have `torch.distributed.name`."""

    def refused(*args: Any, **kwargs: Any) -> NoReturn:
        _refuse(
            name,
            "forward sees one process with the whole batch: call it outside of forward, or leave it out",
        )

    return refused


def _refuse(what: str, advice: str) -> NoReturn:
    raise AutoparError(f"forward calls torch.distributed.{what}{line_now()}: {advice}")
