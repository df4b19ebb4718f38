"""Deals the nodes of the flat graph out to segments.

A block is a child `container.<n>` of a module container with at least two children (an
nn.ModuleList of layers). Of nested containers the outermost counts. Ops before, between and after
the blocks form the prologue, glue and epilogue segments. A graph without such blocks is cut where
one value crosses (`_pieces`).

Changes of a buffer stay in the segment that reads the buffer, since a pipeline cannot separate
them.
"""

from __future__ import annotations

import operator
import re
from collections import defaultdict

from torch.fx import Graph, Node

from autopar.ops.values import output_nodes
from autopar.trace.capture import Captured

_LEAST_OPS = 12
"""The smallest piece of a graph without blocks, in ops; smaller ones have nothing to plan."""

_Named = list[tuple[str, list[Node]]]


def nodes_of_segments(captured: Captured) -> _Named:
    """(name, nodes) of each segment, in execution order: blocks and what lies between them, or
    pieces if there are none. Needs `meta['grad']` of all nodes (`blocks.mark_differentiable`).
    """
    found = _blocks(captured)
    return found if found is not None else _pieces(captured)


def _block_paths(graph: Graph) -> dict[Node, str]:
    """By node, the outermost module path of the form `container.<n>` that it was called in, for
    containers with at least two children in the graph. Nodes outside such containers are left out.
    """
    stacks = {
        n: [path for path, _ in n.meta.get("nn_module_stack", {}).values()]
        for n in graph.nodes
        if n.op == "call_function"
    }
    children: dict[str, set[str]] = defaultdict(set)
    for stack in stacks.values():
        for path in stack:
            if match := re.fullmatch(r"(.+)\.(\d+)", path):
                children[match[1]].add(match[2])
    found = {}
    for node, stack in stacks.items():
        for path in stack:
            match = re.fullmatch(r"(.+)\.(\d+)", path)
            if match and len(children[match[1]]) > 1:
                found[node] = path
                break
    return found


def _blocks(captured: Captured) -> _Named | None:
    """(name, nodes) of each segment of a graph with blocks, in execution order: 'prologue', the
    module path of each block, glue between blocks ('glue1' and so on), 'epilogue'. Empty ones are
    left out. None without blocks, or if they do not run one after the other.

    Levels: prologue 0, block i 2i + 1, glue after it 2i + 2.
    """
    graph, paths = captured.graph, _block_paths(captured.graph)
    order: dict[str, int] = {}
    for node in graph.nodes:
        if node in paths:
            order.setdefault(paths[node], len(order))
    last = 2 * len(order)
    level: dict[Node, int] = {}
    consistent = True
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        needs = max((level.get(i, 0) for i in node.all_input_nodes), default=0)
        if node.target is operator.getitem:
            level[node] = needs
        elif node in paths:
            level[node] = 2 * order[paths[node]] + 1
            consistent &= needs <= level[node]
        else:
            level[node] = needs + needs % 2
    if not consistent or not order:
        return None
    changes = _changes(captured)
    for node in reversed(list(graph.nodes)):  # what only the epilogue uses runs there
        fixed = node in paths or node in changes or node.target is operator.getitem
        if node in level and not fixed and level[node] < last:
            users = [level.get(u, last) for u in node.users if u not in changes]
            if users and min(users) == last:
                level[node] = last
    _keep_changes(captured, level, paths, changes)
    names = {2 * i + 1: path.removeprefix("model.") for path, i in order.items()}
    groups: dict[int, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if node in level:
            groups[level[node]].append(node)

    def label(k: int) -> str:
        return names.get(k) or (
            "prologue" if k == 0 else "epilogue" if k == last else f"glue{k // 2}"
        )

    if last not in groups:  # the loss is computed inside the last block
        groups[last] = []
    return [(label(k), groups[k]) for k in sorted(groups) if groups[k]]


def _changes(captured: Captured) -> set[Node]:
    """The nodes whose results only new values of buffers need."""
    output, found = captured.graph.output_node(), set[Node]()
    loss = output_nodes(captured.graph)[0]
    for node in reversed(captured.graph.nodes):
        ends = found | {output}
        if (
            node.op == "call_function"
            and node is not loss
            and node.users
            and ends.issuperset(node.users)
        ):
            found.add(node)
    return found


def _keep_changes(
    captured: Captured, level: dict[Node, int], paths: dict[Node, str], changes: set[Node]
) -> None:
    """Raise, in place, the levels of `changes` (nodes that only new values of buffers need) to the
    highest level at which their buffer is read. Nodes in `paths` keep their level.
    """
    changed = set(captured.updates)
    for buffer in captured.graph.find_nodes(op="placeholder"):
        if captured.attributes.get(buffer.name) not in changed:
            continue
        top = max((level[user] for user in buffer.users if user in level), default=0)
        for user in buffer.users:
            if user in changes and user not in paths:
                level[user] = max(level[user], top)
    for node in captured.graph.nodes:  # and of what follows from them
        if node in changes and node not in paths:
            needs = (level.get(i, 0) for i in node.all_input_nodes)
            level[node] = max((level[node], *needs))


def _pieces(captured: Captured) -> _Named:
    """(name, nodes) of the pieces of a graph without blocks, in order. If there is no place to cut,
    all nodes as 'model'.

    A cut is where a module with trainable parameters begins, and a single value that needs a
    gradient crosses. Pieces have `_LEAST_OPS` ops and more, and are named after their first module
    with parameters.
    """
    nodes = [node for node in captured.graph.nodes if node.op == "call_function"]
    place = {node: number for number, node in enumerate(nodes)}
    read_until: dict[int, list[Node]] = defaultdict(list)
    for node in nodes:
        readers = [place[user] for user in node.users if user in place]
        if node.meta.get("grad"):
            read_until[max(readers, default=place[node])].append(node)
    crossing, pieces = set[Node](), [list[Node]()]
    changes, piece_of = _changes(captured), dict[Node, int]()
    for number, node in enumerate(nodes):
        long_enough = min(len(pieces[-1]), len(nodes) - number) >= _LEAST_OPS
        if long_enough and len(crossing) == 1 and _begins(captured, node, nodes[number - 1]):
            pieces.append([])
        piece_of[node] = len(pieces) - 1
        if node in changes:  # new values of buffers may be written at the end
            made = [piece_of[i] for i in node.all_input_nodes if i in piece_of]
            piece_of[node] = max(made, default=piece_of[node])
        pieces[piece_of[node]].append(node)
        if node.meta.get("grad"):
            crossing.add(node)
        crossing.difference_update(read_until[number])
    if len(pieces) == 1:
        return [("model", nodes)]
    return _named(captured, pieces)


def _module(node: Node) -> str:
    """The path of the innermost module that runs a node; '' for the model itself."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return stack[-1][0] if stack else ""


def _trained(captured: Captured, node: Node) -> bool:
    """Whether a node reads a trainable parameter."""
    specs = (
        captured.parameters.get(captured.attributes.get(i.name, "")) for i in node.all_input_nodes
    )
    return any(spec is not None and spec.trainable for spec in specs)


def _begins(captured: Captured, node: Node, before: Node) -> bool:
    """Whether `node` reads a trainable parameter in another module than the call `before` it."""
    return _trained(captured, node) and _module(node) != _module(before)


def _named(captured: Captured, pieces: list[list[Node]]) -> _Named:
    """(name, nodes) of the pieces: the module path of the first node with a trainable parameter, or
    'piece', made distinct by numbers.
    """
    found: dict[str, list[Node]] = {}
    for number, nodes in enumerate(pieces):
        name = next((_module(node) for node in nodes if _trained(captured, node)), "")
        name = name.removeprefix("model.") or "piece"
        found[f"{name} ({number})" if name in found else name] = nodes
    return list(found.items())
