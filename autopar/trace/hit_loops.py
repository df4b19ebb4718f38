"""Loops over the experts that got a token, and branches on whether an expert got one.

    hit = (mask.sum((1, 2)) > 0).nonzero()
    for e in hit: ...                             # or: if token.numel() > 0: ...

How often such code runs depends on data. Capture runs it for every expert, since one without tokens
adds nothing in a loop that `autopar/trace/expert_loops.py` recognizes. `check_spans` refuses what is
left of such code, which may compute something else.
"""

from __future__ import annotations

import ast
import contextlib
import linecache
import operator
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from autopar.errors import AutoparError
from autopar.ir.calls import arguments
from autopar.trace.edit import product
from autopar.trace.user_lines import is_of_user, line_of_node, line_text

_SPAN = "autopar_span"
"""The mark of a node, in the part of its meta that export keeps."""
_TIME, HIT_MASKS = "autopar_time", "autopar_hit_masks"
"""The marks of a branch that is taken, and of masks whose experts that got a token a loop runs over."""
_STAGE, _MASKS, _EXPERT = "_autopar_stage", "_autopar_masks", "_autopar_expert"
"""Attributes of tensors: what it is on the way to such a loop, the masks at its start, and which expert it is."""
_EXPERTS = "_autopar_experts"
"""Attribute of choices and of their masks: among how many experts they choose. There may be more masks."""


@dataclass(frozen=True, slots=True)
class LoopLines:
    """Lines of the user's code that ran for every expert: the header, and the lines of the body."""

    file: str
    header: int
    first: int
    last: int
    loops: bool


@dataclass(slots=True)
class HitLoops:
    """The spans of one captured call. `times`: how often a branch has been taken."""

    spans: list[LoopLines] = field(default_factory=list)
    times: int = 0

    def run(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """What a call gives that has to do with such code; None for any other call."""
        if not args:
            return None
        if func in _TOPK:
            return _chosen(func, args, kwargs)
        if func in _STEPS:
            return _followed(func, args, kwargs)
        if func in _ITERATED and len(args) <= 2 and getattr(args[0], _STAGE, "") == _NUMBERS:
            return self._experts(getattr(args[0], _MASKS))
        if func is Tensor.numel and free_unbacked_symbols(args[0].shape):
            return self._count(args[0])
        if func is Tensor.__getitem__ and len(args) == 2:
            return _entry(*args)
        return None

    @contextlib.contextmanager
    def marked(self) -> Iterator[None]:
        """A context that marks the nodes of the graph which calls in one of the spans make."""
        span, mode = self._current(), get_proxy_mode()
        if span is None or mode is None:
            yield
            return
        graph: Any = mode.tracer.graph
        last = graph._root.prev
        yield
        node = graph._root.prev
        while node is not last:
            node.meta["custom"] = {**node.meta.get("custom", {}), _SPAN: span, _TIME: self.times}
            node = node.prev

    def _current(self) -> LoopLines | None:
        """The span in which the user's code runs."""
        frame: types.FrameType | None = sys._getframe(1) if self.spans else None
        while frame is not None:
            for span in self.spans:
                if (
                    frame.f_code.co_filename == span.file
                    and span.first <= frame.f_lineno <= span.last
                ):
                    return span
            frame = frame.f_back
        return None

    def _experts(self, masks: Tensor) -> tuple[Tensor, ...] | None:
        if not self._covers(ast.For):
            return None
        _mark(masks, {HIT_MASKS: True})
        return tuple(_expert(e, 1) for e in range(getattr(masks, _EXPERTS, int(masks.shape[-1]))))

    def _count(self, rows: Tensor) -> int | torch.SymInt | None:
        """The number of elements, which is taken to be one at least where `if` asks for that alone."""
        if not self._covers(ast.If):
            return None
        self.times += 1
        _mark(rows, {_TIME: self.times})
        count = product(rows.shape)
        torch._check(count > 0)
        return count

    def _covers(self, kind: type[ast.For] | type[ast.If]) -> bool:
        """Add the span of the loop or branch whose header runs. Returns whether there is one."""
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and not is_of_user(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            return False
        file, line = frame.f_code.co_filename, frame.f_lineno
        for node in ast.walk(_parsed(file)):
            if (
                isinstance(node, kind)
                and isinstance(node, ast.For | ast.If)
                and node.lineno == line
                and _asks_for_hits(node)
            ):
                first, last = node.body[0].lineno, node.end_lineno or line
                span = LoopLines(file, line, first, last, kind is ast.For)
                self.spans += [] if span in self.spans else [span]
                return True
        return False


def _parsed(file: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ast.parse("")


def _asks_for_hits(node: ast.For | ast.If) -> bool:
    """Whether the header is one of `for e in hit` and `if rows.numel() > 0`, without `else`."""
    if node.orelse:
        return False
    if isinstance(node, ast.For):  # not `for place, e in enumerate(hit)`: places would be others
        return isinstance(node.target, ast.Name)
    test = node.test
    return isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Gt) and _is_zero(test)


def _is_zero(test: ast.Compare) -> bool:
    return isinstance(test.comparators[0], ast.Constant) and test.comparators[0].value == 0


_TOPK = (Tensor.topk, torch.topk)
_ITERATED = (Tensor.unbind, torch.unbind)
_ONE_HOT, _COUNTS, _HITS, _NUMBERS = "masks", "counts", "hits", "numbers"
"""What a tensor is on the way from `one_hot` to the numbers of the experts that got a token."""
_STEPS: dict[Callable, tuple[str, str]] = {
    F.one_hot: ("", _ONE_HOT),
    **dict.fromkeys((Tensor.permute, torch.permute), (_ONE_HOT, _ONE_HOT)),
    **dict.fromkeys((Tensor.sum, torch.sum), (_ONE_HOT, _COUNTS)),
    **dict.fromkeys((Tensor.gt, torch.gt, Tensor.greater, torch.greater, Tensor.__gt__), (_COUNTS, _HITS)),
    **dict.fromkeys((Tensor.nonzero, torch.nonzero), (_HITS, _NUMBERS)),
}  # fmt: skip
"""For each function, from what to what it leads."""


def _chosen(func: Callable, args: tuple, kwargs: dict) -> Any:
    """What a call of `topk` gives, whose choices are marked with the number of what they choose among."""
    found = func(*args, **kwargs)
    among = args[0].shape[args[2] if len(args) > 2 else kwargs.get("dim", -1)]
    if isinstance(among, int):
        setattr(found[1], _EXPERTS, among)
    return found


def _followed(func: Callable, args: tuple, kwargs: dict) -> Any:
    """What a call gives, marked with what it is on that way."""
    before, after = _STEPS[func]
    found = func(*args, **kwargs)
    if getattr(args[0], _STAGE, "") != before:
        return found
    masks = found if not before else getattr(args[0], _MASKS)
    if not before and getattr(args[0], _EXPERTS, masks.shape[-1]) < masks.shape[-1]:
        setattr(masks, _EXPERTS, getattr(args[0], _EXPERTS))
    experts, choices = masks.shape[-1], masks.shape[-2]
    fits = {
        _COUNTS: isinstance(experts, int) and list(found.shape) == [experts] != [choices],
        _HITS: args[1:] == (0,),
    }
    if fits.get(after, True):
        setattr(found, _STAGE, after)
        setattr(found, _MASKS, masks)
    return found


def _mark(tensor: Tensor, marks: dict[str, Any]) -> None:
    """Mark the call that made a tensor, if calls are recorded."""
    if (mode := get_proxy_mode()) is not None:
        node = get_proxy_slot(tensor, mode.tracer).proxy.node
        node = arguments(node)[0] if node.target is operator.getitem else node
        node.meta["custom"] = {**node.meta.get("custom", {}), **marks}


def mark_of(node: Node, name: str) -> Any:
    """A mark of a node, or None."""
    return node.meta.get("custom", {}).get(name)


def is_run_for_hits(node: Node, masks: Node | None, where: Node) -> bool:
    """Whether a node that adds the results of an expert does so once for each expert that got a token.

    `masks`: the one-hot masks that say which tokens. `where`: the call that gives their numbers.
    """
    span = mark_of(node, _SPAN)
    if span is None:
        return True
    if span.loops:
        return masks is not None and bool(mark_of(masks, HIT_MASKS))
    return mark_of(where, _TIME) == mark_of(node, _TIME)


def _expert(number: int, dims: int) -> Tensor:
    """The number of an expert as a tensor, with as many dims as a row of `nonzero` has, or none."""
    found = torch.tensor([number] if dims else number)
    setattr(found, _EXPERT, number)
    return found


def _entry(source: Any, index: Any) -> Tensor | None:
    """`source[expert]` without an index that is a tensor; `expert[0]`, as an expert again."""
    if hasattr(source, _EXPERT) and index == 0:
        return _expert(getattr(source, _EXPERT), 0)
    if isinstance(index, Tensor) and hasattr(index, _EXPERT):
        number = getattr(index, _EXPERT)
        return source[number : number + 1] if index.dim() else source[number]
    return None


def check_spans(graph: Graph) -> None:
    """Raise AutoparError if a graph still computes something in one of the spans."""
    for node in graph.nodes:
        span = mark_of(node, _SPAN)
        if span is not None and node.op == "call_function":
            raise AutoparError(
                f"forward runs code{line_text(span.file, span.header)} for the experts that got a token, so that how often depends on "
                f"data, and does more there than add what an expert computes of its tokens{line_of_node(node)}. Loop over all experts, "
                "range(num_experts), and index the tokens of each by a mask"
            )
