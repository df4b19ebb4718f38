"""Determines how losses of micro-batches combine to the loss of their batch, and edits the graph to
make that exact.

A loss splits if it is a sum over rows, or such a sum divided by something that does not depend on
parameters. Divisors and weights are then computed from the whole batch before the first forward,
and become inputs of the graph (`StepValues`). Any other loss is unchanged, and its batch is not
split.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import torch
from torch.fx import Graph, Node
from torch.fx.node import Argument

from autopar.ir.calls import op_name
from autopar.ir.traced import MICRO_BATCH_SHARE, LossSplit, StepValues
from autopar.ops.aten import aten
from autopar.ops.dims import at_batch, results
from autopar.ops.experts import ROUTED_EXPERTS
from autopar.ops.rules import op_dims
from autopar.ops.values import fake_tensor, input_node, output_nodes
from autopar.trace.batch_norm import STATISTICS
from autopar.trace.capture import Captured
from autopar.trace.edit import call, full, is_op
from autopar.trace.mean_losses import LABEL_COUNT
from autopar.trace.row_facts import (
    MIXED_ROWS,
    ROWS,
    SAME,
    SUM,
    Fact,
    RowFacts,
    ancestors,
    elements_a_row,
    fill_value,
    follows_batch,
    is_random,
    reads,
    row_dim_of,
    row_facts,
    tensor_overload,
)
from autopar.trace.user_lines import line_of_node

_TERMS = ("add", "sub", "rsub", "mul", "div", "neg", "sum", "mean", "stack", "cat", "to", "_to_copy", "clone", "alias", "view",
          "reshape", "squeeze", "unsqueeze")  # fmt: skip
"""Ops that may lie between a term of the loss and the loss."""
_GATES = ("linear", "matmul", "mm", "addmm", "bmm", "einsum")
_IN_TRAINING = torch.ops.autopar.in_training.default
ROUTERS = "balance losses of routers"


def split_loss(captured: Captured) -> tuple[LossSplit, StepValues | None]:
    """(a `LossSplit`: how the losses of micro-batches combine to that of the batch, `StepValues`:
    the values that each step computes from its whole batch, or None if there are none).

    Edits the normalized graph of `captured` so that it reads these values as inputs. A loss that
    does not split leaves the graph unchanged; then `joins` is '' and `reason` says why.
    """
    graph = captured.graph
    loss = output_nodes(graph)[0]
    analysis = _Analysis(captured, loss)
    found, fact = analysis.run()
    made = partial(
        LossSplit, by_convention=analysis.conventions(), least_rows=_least_rows(captured.graph)
    )
    if fact.kind == MIXED_ROWS:
        return made("", analysis.why(fact)), None
    if fact.kind == ROWS:
        return made("", "the loss has a dim of rows"), None
    if carried := _carried(captured, loss):
        return made(
            "",
            f"forward changes {_kind(captured, carried)} {carried!r} and computes the loss with it, once a micro-batch",
        ), None
    power = 1 if fact.kind == SAME else fact.power
    edits = _Edits(captured, found, analysis.needed)
    if power not in (0, 1):
        edits.settle_loss(power)
    values = edits.run()
    return made("mean" if power == 1 else "sum"), values


def _least_rows(graph: Graph) -> int:
    """How many rows batch norm needs in training, which divides by the values of a channel less 1."""
    return 2 if any(node.meta.get(STATISTICS) == 1 for node in graph.nodes) else 1


class _Analysis:
    """Finds how the loss and the nodes above it depend on rows (`RowFacts`). Balance losses of
    routers and batch statistics are taken as computed per micro-batch, by convention.
    """

    def __init__(self, captured: Captured, loss: Node) -> None:
        self.graph, self.loss = captured.graph, loss
        self.fixed = _fixed(captured)
        self.overruled: dict[Node, Fact] = {}
        self.gates = _gates_of(captured.graph, self.fixed)
        self.widest = _widest_input(captured.graph, self.fixed)

    def run(self) -> tuple[RowFacts, Fact]:
        """(the facts of all nodes, the fact of the loss). If the loss mixes rows only through terms
        of routers, these are stored in `overruled` and counted as sums.
        """
        while True:
            found = row_facts(self.graph, self.fixed, self.overruled, self.widest)
            fact = found.of(self.loss)
            terms = self._router_terms(found) if fact.kind == MIXED_ROWS and self.gates else set()
            if not terms:
                return found, fact
            self.overruled |= dict.fromkeys(terms, Fact(SUM, 1))

    @property
    def needed(self) -> set[Node]:
        """The nodes from which the loss is computed, itself included. Nodes above terms that are
        per micro-batch by convention are left out.
        """
        return ancestors(
            [self.loss], lambda node: () if node in self.overruled else node.all_input_nodes
        )

    def conventions(self) -> tuple[str, ...]:
        """Names of the quantities that are computed per micro-batch by convention: `STATISTICS`,
        `ROUTERS`, both, or none. Call it after `run`.
        """
        statistics = any(STATISTICS in node.meta for node in self.needed)
        return tuple(
            name for name, there in ((STATISTICS, statistics), (ROUTERS, self.overruled)) if there
        )

    def why(self, fact: Fact) -> str:
        """A text for the user: which op, in which line or module, combines rows. Raises ValueError
        if the fact has no cause.
        """
        cause = fact.cause
        if cause is None:
            raise ValueError(f"{fact} does not say which op mixes rows")
        op = op_name(cause).rpartition("::")[2] or str(cause)
        stack = [path for path, _ in cause.meta.get("nn_module_stack", {}).values()]
        paths = [path.removeprefix("model.") for path in stack if path not in ("", "model")]
        place = line_of_node(cause) or (f" in module {paths[-1]!r}" if paths else " in the loss")
        if cause.op == "call_function" and op_dims(cause) is None:
            return f"{op}{place} has no rule (autopar.register_rule gives it one) and may combine rows of the batch"
        return f"{op}{place} combines rows of the batch in a way that parts of it do not add up to"

    def _router_terms(self, found: RowFacts) -> set[Node]:
        """The largest terms of the loss that mix rows and read, of activations, only the logits of
        routers. Terms in `overruled` are left out.
        """
        of_gates = self._of_gates(found)

        def parts(node: Node) -> list[Node]:
            whole = node in of_gates or not is_op(node, *_TERMS)
            return (
                []
                if whole
                else [each for each in node.all_input_nodes if found.of(each).kind == MIXED_ROWS]
            )

        return (ancestors([self.loss], parts) & of_gates) - self.overruled.keys()

    def _of_gates(self, found: RowFacts) -> set[Node]:
        """The nodes computed from router logits and otherwise only from what is known before
        forward, or is the same for all micro-batches.
        """
        of_gates, free = set[Node](), set[Node]()
        for node in self.graph.nodes:
            if node.op == "output":
                continue
            if found.of(node).known or found.of(node).kind == SAME:
                free.add(node)
            inputs = set(node.all_input_nodes)
            if node in self.gates or (inputs & of_gates and inputs <= of_gates | free):
                of_gates.add(node)
        return of_gates


class _Edits:
    """Edits the graph, in place by `run`, so that it reads values of the whole batch as inputs
    where a micro-batch would compute them from its own rows.
    """

    def __init__(self, captured: Captured, found: RowFacts, needed: set[Node]) -> None:
        self.captured, self.graph, self.found, self.needed = captured, captured.graph, found, needed
        self.keys = Keys()
        self.share: Node | None = None
        self.names: list[str] = []
        self.targets: list[Node] = []
        self.inputs: dict[tuple[int, int], Node] = {}
        self.laid_out: dict[Node, Node] = {}
        self.labels = -1

    def settle_loss(self, power: int) -> None:
        """Make the graph return loss * share ** power, where share is 1 / (number of
        micro-batches). Losses of micro-batches then sum to that of the batch.
        """
        output = self.graph.output_node()
        loss, *rest = output_nodes(self.graph)
        output.args = ((self._settled(loss, power, output), *rest),)

    def run(self) -> StepValues | None:
        lifted = [(node, self._lift(node, places)) for node, places in self._lifted().items()]
        readers = [
            (cut, user)
            for cut in self.found.cuts
            for user in list(cut.users)
            if self._is_computed(user)
        ]
        cuts = list(
            dict.fromkeys(
                [cut for cut, _ in readers]
                + [number for _, numbers in lifted for number in numbers]
            )
        )
        for cut in cuts:
            self._input_for(cut)
        values = self._values()
        for cut, user in readers:
            user.replace_input_with(cut, self._laid_out(cut))
        for (node, operand), power in self.found.settled.items():
            if node in self.needed:
                now = self._laid_out(operand) if operand in self.found.cuts else operand
                node.replace_input_with(now, self._settled(now, power, node))
        for node, numbers in lifted:
            for number in numbers:
                node.replace_input_with(number, self._input_for(number))
        if not self.targets and self.share is None:
            return None
        self.graph.eliminate_dead_code()
        self.graph.lint()
        return values if self.share is None else values.with_share(self.share.meta["val"])

    def _values(self) -> StepValues:
        """How the step computes the values that became inputs: two graphs cut out of this one
        before edits.
        """
        vals = tuple(node.meta["val"] for node in self.inputs.values())
        return StepGraphs(self.captured, self.found, self.targets).values(
            tuple(self.names), vals, self.labels
        )

    def _is_computed(self, node: Node) -> bool:
        """Whether micro-batches compute a node on the way to the loss: the loss needs it, and it is
        not known before forward, or is computed again.
        """
        return node in self.needed and (not self.found.of(node).known or node in self.found.again)

    def _lifted(self) -> dict[Node, dict[int, torch.SymInt | torch.SymFloat]]:
        found: dict[Node, dict[int, torch.SymInt | torch.SymFloat]] = {}
        for (node, place), value in self.found.lifted.items():
            if node in self.needed:
                found.setdefault(node, {})[place] = value
        return found

    def _lift(self, node: Node, places: Mapping[int, torch.SymInt | torch.SymFloat]) -> list[Node]:
        """Make the batch-dependent numbers among a call's arguments (place -> value) 0-d constant
        nodes, whose value is known before forward. Returns these nodes.

        Raises ValueError if the op has no overload with tensors in place of numbers.
        """
        args, numbers = list(node.args), []
        val, target = results(node)[0], tensor_overload(node)
        if target is None:
            raise ValueError(f"{op_name(node)} ({node.name}) takes no tensors in place of numbers")
        for place, value in places.items():
            with self.graph.inserting_before(node):
                whole = torch.int64 if isinstance(value, torch.SymInt) else torch.float64
                dtype = val.dtype if val.is_floating_point() else whole
                number = full(self.graph, node, value, val.new_empty([], dtype=dtype))
            number.meta.pop(STATISTICS, None)
            self.found.facts[number] = Fact(MIXED_ROWS, known=True, cause=number)
            args[place] = number
            numbers.append(number)
        node.target, node.args = target, tuple(args)
        return numbers

    def _input_for(self, cut: Node) -> Node:
        """The placeholder for `cut`, a node whose value of the whole batch is known before forward.
        Inserts it on the first call. Nodes that compute the same share one input.
        """
        key = self.keys.of(cut), self.found.cuts.get(cut, 1)
        if key not in self.inputs:
            labels = LABEL_COUNT in cut.meta
            if labels and self.labels < 0:
                self.labels = len(self.targets)
            name = (
                "label_count"
                if labels
                else "row_weights"
                if follows_batch(cut.meta["val"])
                else "batch_value"
            )
            target = self._rows_first(cut)
            self.inputs[key] = self._placeholder(name, target.meta["val"])
            self.names.append(self.inputs[key].name)
            self.targets.append(target)
        return self.inputs[key]

    def _rows_first(self, cut: Node) -> Node:
        """`cut`, or a node of the same values whose dim 0 has an entry for each row of the batch."""
        layout = self._layout(cut)
        if layout is None:
            return cut
        dim, sizes = layout
        moved = [dim + 1, *(each for each in range(len(sizes)) if each != dim + 1)]
        with self.graph.inserting_after(cut):
            apart = call(self.graph, cut, aten.reshape.default, cut, sizes)
        with self.graph.inserting_after(apart):
            target = call(self.graph, cut, aten.permute.default, apart, moved)
        self.found.facts |= dict.fromkeys((apart, target), self.found.of(cut))
        return target

    def _laid_out(self, cut: Node) -> Node:
        """A node, after the placeholder for `cut`, with the dims of `cut`: what `_rows_first` undone
        gives.
        """
        layout, source = self._layout(cut), self._input_for(cut)
        if layout is None:
            return source
        if cut not in self.laid_out:
            dim, sizes = layout
            back = [*range(1, dim + 2), 0, *range(dim + 2, len(sizes))]
            before = next(node for node in self.graph.nodes if node.op != "placeholder")
            with self.graph.inserting_before(before):
                apart = call(self.graph, cut, aten.permute.default, source, back)
                shape = list(cut.meta["val"].shape)
                self.laid_out[cut] = call(self.graph, cut, aten.reshape.default, apart, shape)
        return self.laid_out[cut]

    def _layout(self, cut: Node) -> tuple[int, list[int | torch.SymInt]] | None:
        """(the dim of rows of `cut`, sizes in which it is three dims: batches, rows, and entries of
        a row). None if its dim 0 has an entry for each row, or it has no rows.
        """
        shape, dim = list(cut.meta["val"].shape), row_dim_of(cut)
        if dim is None or (dim == 0 and at_batch(shape[0], 1) == 1):
            return None
        outer = self.found.cuts[cut]
        inputs = self.graph.find_nodes(op="placeholder")
        rows = next(
            node.meta["val"].shape[0]
            for node in inputs
            if node.name in self.captured.input_nodes and follows_batch(node.meta["val"])
        )
        return dim, [*shape[:dim], outer, rows, at_batch(shape[dim], 1) // outer, *shape[dim + 1 :]]

    def _placeholder(self, name: str, val: torch.Tensor) -> Node:
        last = [node for node in self.graph.nodes if node.op == "placeholder"][-1]
        taken = {node.name for node in self.graph.nodes} | set(self.captured.inputs)
        number, free = 0, name
        while free in taken:
            number += 1
            free = f"{name}_{number}"
        with self.graph.inserting_after(last):
            node = self.graph.placeholder(free)
        node.meta["val"] = val.detach()
        return node

    def _settled(self, operand: Node, power: int, before: Node) -> Node:
        """A new node, before `before`, with `operand` times (1 / number of micro-batches) ** power.
        The graph gets an input for that share on the first call.
        """
        if self.share is None:
            self.share = self._placeholder(
                MICRO_BATCH_SHARE, fake_tensor(output_nodes(self.graph)[0])
            )
        for _ in range(abs(power)):
            with self.graph.inserting_before(before):
                operand = call(
                    self.graph,
                    operand,
                    aten.mul.Tensor if power > 0 else aten.div.Tensor,
                    operand,
                    self.share,
                )
        return operand


class StepGraphs:
    """Cuts two graphs out of a captured graph that compute `targets`, nodes whose values for the
    whole batch are known before forward.
    """

    def __init__(self, captured: Captured, found: RowFacts, targets: list[Node]) -> None:
        self.captured, self.found, self.targets = captured, found, targets

    def values(self, names: tuple[str, ...], vals: tuple, labels: int) -> StepValues:
        """How a step computes the targets, as `StepValues` with these names and fake tensors.
        `labels` is the index of the target that counts labels, or -1.
        """
        sums, whole = self._parts()
        local = step_graph(self.captured, ancestors(sums, reads), sums, {})
        parts = {node: f"part{k}" for k, node in enumerate(sums)}
        joined = step_graph(self.captured, whole, self.targets, parts)
        rows = [
            n.target
            for n in joined.nodes
            if n.op == "placeholder" and n.meta["of"] == "input" and follows_batch(n.meta["val"])
        ]
        tensors = {
            n.target
            for graph in (local, joined)
            for n in graph.nodes
            if n.op == "placeholder" and n.meta["of"] == "tensor"
        }
        return StepValues(
            names, vals, local, joined, tuple(rows), tensors=tuple(sorted(tensors)), labels=labels
        )

    def _parts(self) -> tuple[list[Node], set[Node]]:
        """(the sums over rows from which the targets are computed, in graph order; all nodes from
        these sums to the targets, both included).
        """

        def is_sum(node: Node) -> bool:
            return self.found.of(node).kind == SUM

        whole = ancestors(self.targets, lambda node: () if is_sum(node) else reads(node))
        return in_order(self.captured.graph, filter(is_sum, whole)), whole


def step_graph(
    captured: Captured, nodes: set[Node], returned: list[Node], parts: Mapping[Node, str]
) -> Graph:
    """A graph of its own that computes the nodes `returned` from placeholders, by `nodes` of the
    captured graph. `parts` names nodes that become placeholders too. The meta entry `of` of a
    placeholder is 'input', 'tensor' or 'part'.
    """
    input_names = dict(zip(captured.input_nodes, captured.inputs, strict=True))
    graph, mapping = Graph(), dict[Node, Node]()
    for node in in_order(captured.graph, nodes):
        if node in parts or node.op == "placeholder":
            of = "part" if node in parts else "input" if node.name in input_names else "tensor"
            name = parts.get(node) or input_names.get(node.name) or captured.attributes[node.name]
            mapping[node] = graph.create_node("placeholder", name, name=node.name)
            mapping[node].meta = {"val": node.meta["val"], "of": of}
            continue
        if (value := fill_value(node)) is not None:
            val = node.meta["val"]
            mapping[node] = graph.call_function(
                aten.full.default,
                (list(val.shape), value),
                {"dtype": val.dtype, "device": val.device},
            )
        else:
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), mapping.__getitem__)
            mapping[node] = graph.create_node(node.op, node.target, args, kwargs)
        mapping[node].meta = {"val": node.meta["val"]}
    graph.output(tuple(mapping[node] for node in returned))
    return graph


class Keys:
    """A numbering of nodes in which nodes that compute the same have equal numbers. Random ops and
    inputs have a number each.
    """

    def __init__(self) -> None:
        self.numbers: dict[tuple, int] = {}
        self.known: dict[Node, int] = {}

    def of(self, node: Node) -> int:
        """The number of a node. Numbers it, and what it is computed from, on the first call."""
        for each in in_order(node.graph, ancestors([node]) - self.known.keys()):
            kwargs = tuple(
                (name, self._written(value)) for name, value in sorted(each.kwargs.items())
            )
            unique = each.op != "call_function" or is_random(each)
            key = (each.name,) if unique else (str(each.target), self._written(each.args), kwargs)
            self.known[each] = self.numbers.setdefault(key, len(self.numbers))
        return self.known[node]

    def _written(self, part: Argument) -> tuple:
        if isinstance(part, Node):
            return ("node", self.known[part])
        if isinstance(part, list | tuple):
            return tuple(map(self._written, part))
        return (str(part),)


def in_order(graph: Graph, nodes: Iterable[Node]) -> list[Node]:
    """The nodes as a list in graph order, each once."""
    wanted = set(nodes)
    return [node for node in graph.nodes if node in wanted]


def _fixed(captured: Captured) -> dict[str, bool]:
    """By name of the placeholder of each parameter, buffer and constant: whether its value is known
    before a forward. False for parameters and for buffers that forward changes.
    """
    specs, changed = captured.parameters, set(captured.updates)
    return {
        node: name not in specs or (specs[name].buffer and name not in changed)
        for node, name in captured.attributes.items()
    }


def _carried(captured: Captured, loss: Node) -> str:
    """The name of the first buffer that forward changes and computes the loss with, so that one
    micro-batch would affect the next, or its value be of one alone. '' if there is none.
    """
    found = ancestors(
        [loss],
        lambda node: [input_node(node, 0)] if node.target is _IN_TRAINING else node.all_input_nodes,
    )
    read = {captured.attributes.get(node.name) for node in found}
    news = dict(zip(captured.updates, output_nodes(captured.graph)[1:], strict=False))

    def is_read(name: str) -> bool:
        value = _copied(news[name])
        return name in read or (value in found and _depends_on_rows(captured, value))

    return next(filter(is_read, captured.updates), "")


def _kind(captured: Captured, name: str) -> str:
    return "buffer" if captured.parameters[name].buffer else "parameter"


def _copied(node: Node) -> Node:
    """The node of which `node` is a copy, or itself."""
    while is_op(node, "clone", "detach", "alias", "lift_fresh_copy", "_to_copy"):
        node = input_node(node, 0)
    return node


def _depends_on_rows(captured: Captured, node: Node) -> bool:
    inputs = {n for n in ancestors([node]) if n.name in captured.input_nodes}
    return any(follows_batch(each.meta["val"]) for each in inputs)


def _gates_of(graph: Graph, fixed: Mapping[str, bool]) -> set[Node]:
    """The nodes of router logits (one number per expert), from which the choice or the weights of
    routed experts are computed. Empty without routed experts. `fixed` is that of `row_facts`.
    """
    found: set[Node] = set()
    for experts in graph.nodes:
        if op_name(experts) == ROUTED_EXPERTS:
            number = experts.args[3].meta["val"].shape[0]
            found |= _products_above(experts.args[1:3], number, fixed)
    return found


def _products_above(choices: Iterable[Node], number: int, fixed: Mapping[str, bool]) -> set[Node]:
    """The nearest matrix products with a learned operand from which `choices` are computed, with a
    dim of size `number`. Products further up, such as in a norm of states, are not gates. `fixed`
    is that of `row_facts`.
    """

    def is_gate(node: Node) -> bool:
        learned = any(fixed.get(each.name) is False for each in node.all_input_nodes)
        return (
            is_op(node, *_GATES)
            and (learned or len(node.all_input_nodes) > 1)
            and number in results(node)[0].shape
        )

    return set(
        filter(
            is_gate, ancestors(choices, lambda node: () if is_gate(node) else node.all_input_nodes)
        )
    )


def _widest_input(graph: Graph, fixed: Mapping[str, bool]) -> int:
    """The largest number of elements per row of any integer input of the user that has rows; at
    least 1. Placeholders in `fixed` are no inputs.
    """
    inputs = [
        node
        for node in graph.find_nodes(op="placeholder")
        if node.name not in fixed and follows_batch(node.meta["val"])
    ]
    return max(
        (elements_a_row(node) for node in inputs if not node.meta["val"].is_floating_point()),
        default=1,
    )
