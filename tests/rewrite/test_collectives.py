"""Every transition between layouts, forward and backward, against an oracle that only knows what a layout means.

The oracle places a known whole tensor on the ranks (`place`) and reads the whole back from the ranks' tensors (`read`).  A transition is
right if what it makes of a placed value reads as the same value in the new layout, and what its backward makes of a placed gradient
reads as the same gradient.  Elements are small whole numbers, so that all comparisons are exact.
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import every, examples, tried
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from autopar.errors import AutoparError
from autopar.ir.mesh import AXES, MeshShape
from autopar.ir.sharding import (
    REPLICATE,
    RP,
    AxisLayout,
    P,
    Pattern,
    Placement,
    R,
    S,
    conversion_path,
    parse_layout,
    transition,
)
from autopar.rewrite.collectives import primitives, transitions
from autopar.rewrite.collectives.axes import AxisGroup, active_axes, simulated_axes
from autopar.rewrite.collectives.primitives import Started
from autopar.rewrite.collectives.transitions import (
    all_gather,
    all_reduce,
    identity,
    make_transition,
    shard,
    wait,
)
from autopar.runtime.ranks.process_groups import mesh_axes

LAYOUTS = (R, RP, S(0), S(1), S(2), P)
PAIRS = tuple(itertools.product(LAYOUTS, LAYOUTS))
SHAPES = ((8, 4, 12), (7, 2, 1), (2, 1, 7), (1, 7, 2), (5, 6, 9), (0, 4, 3))
"""Over 4 ranks: even, 7 = 2+2+2+1, 2 = 1+1+0+0, 1 = 1+0+0+0, 5 = 2+2+1+0, 6 = 2+2+2+0, 9 = 3+3+3+0, and no rows at all."""

PATTERNS = (
    Pattern((2, 1, 1)),
    Pattern(zigzag=True),
    Pattern(rows=True),
    Pattern((3, 1), rows=True, zigzag=True),
)
PATTERNED = (
    R,
    RP,
    P,
    S(0),
    S(1),
    *(S(1, pattern) for pattern in PATTERNS),
    S(2, Pattern(zigzag=True)),
)
PATTERNED_SHAPE, ROWS = (4, 64, 16), 2

# ----------------------------------------------------------------------------------------------------------------------- oracle


def indices_of(size: int, ranks: int, pattern: Pattern) -> list[list[int]]:
    """The indices that each rank holds of a dim, element by element from what a pattern says; `ROWS` batch rows are flattened."""
    rows = ROWS if pattern.rows else 1
    held: list[list[int]] = [[] for _ in range(ranks)]
    for row in range(rows):
        start = row * size // rows
        for section in pattern.sections:
            length = size // rows * section // sum(pattern.sections)
            chunks = 2 * ranks if pattern.zigzag else ranks
            for rank in range(ranks):
                for chunk in (rank, chunks - 1 - rank) if pattern.zigzag else (rank,):
                    held[rank] += [
                        start + chunk * length // chunks + k for k in range(length // chunks)
                    ]
            start += length
    return held


def place(whole: Tensor, placement: Placement, ranks: int) -> list[Tensor]:
    """Each rank's tensor, together representing `whole`."""
    if placement.kind == "R":
        return [whole.clone() for _ in range(ranks)]
    if placement.kind == "S" and not placement.pattern.is_contiguous:
        found = indices_of(whole.shape[placement.dim], ranks, placement.pattern)
        return [
            whole.index_select(placement.dim, torch.tensor(held, dtype=torch.int64))
            for held in found
        ]
    if placement.kind == "S":
        chunks = list(whole.chunk(ranks, placement.dim)) if whole.shape[placement.dim] else []
        return [chunk.clone() for chunk in chunks] + [
            whole.narrow(placement.dim, 0, 0).clone() for _ in range(ranks - len(chunks))
        ]
    if whole.dtype == torch.bool:
        return [whole.clone() for _ in range(ranks - 1)] + [torch.zeros_like(whole)]
    generator = torch.Generator().manual_seed(ranks)
    summands = [
        torch.randint(-9, 9, whole.shape, generator=generator).to(whole.dtype)
        for _ in range(ranks - 1)
    ]
    return [*summands, whole - sum(summands)]


def read(parts: list[Tensor], placement: Placement) -> Tensor:
    """The whole that the ranks' tensors represent; fails if they are not placed like that."""
    if placement.kind == "R":
        for part in parts[1:]:
            torch.testing.assert_close(part, parts[0], rtol=0, atol=0)
        return parts[0]
    if placement.kind == "S" and not placement.pattern.is_contiguous:
        joined = torch.cat(parts, placement.dim)
        order = [
            index
            for held in indices_of(joined.shape[placement.dim], len(parts), placement.pattern)
            for index in held
        ]
        assert [part.shape for part in parts] == [
            part.shape for part in place(joined, placement, len(parts))
        ]
        return joined.index_select(placement.dim, torch.tensor(order).argsort())
    if placement.kind == "S":
        whole = torch.cat(parts, placement.dim)
        assert [part.shape for part in parts] == [
            part.shape for part in place(whole, placement, len(parts))
        ]
        return whole
    return (
        torch.stack(parts).any(0)
        if parts[0].dtype == torch.bool
        else torch.stack(parts).sum(0).to(parts[0].dtype)
    )


def numbers(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Whole numbers other than zero."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    return (
        torch.randint(1, 20, shape, generator=generator)
        * (1 - 2 * torch.randint(0, 2, shape, generator=generator))
    ).to(dtype)


# ------------------------------------------------------------------------------------------------------------ running transitions


@dataclass(frozen=True)
class Case:
    """A tensor of `shape` that goes from one layout to the next along each of the named axes, one axis after the other."""

    shape: tuple[int, ...]
    moves: tuple[tuple[str, AxisLayout, AxisLayout], ...]
    dtype: torch.dtype = torch.float64
    strided: bool = False

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype} " + ", ".join(
            f"{axis}: {src} -> {dst}" for axis, src, dst in self.moves
        )


ONLY_LOCAL = (transitions.mask, transitions.pad)
"""Functions that communicate in neither direction."""


def place_on(mesh: MeshShape, whole: Tensor, moves: list[tuple[str, Placement]]) -> list[Tensor]:
    """`place` along each axis, outermost first: the tensor of every rank of the mesh."""
    if not moves:
        return [whole]
    (axis, placement), *inner = moves
    return [
        tensor
        for part in place(whole, placement, mesh.size(axis))
        for tensor in place_on(mesh, part, inner)
    ]


def read_from(mesh: MeshShape, parts: list[Tensor], moves: list[tuple[str, Placement]]) -> Tensor:
    if not moves:
        return parts[0]
    (axis, placement), *inner = moves
    step = len(parts) // mesh.size(axis)
    return read(
        [
            read_from(mesh, parts[start : start + step], inner)
            for start in range(0, len(parts), step)
        ],
        placement,
    )


def run_case(
    case: Case, mesh: MeshShape, rank: int, device: str = "cpu", late: bool = False
) -> tuple[Tensor, Tensor | None]:
    """This rank's output and input gradient, under the active axes.  `late`: started first, waited for later, where that is possible."""
    out = x = local_input(
        case, mesh, rank, 1, [(axis, src.value) for axis, src, _ in case.moves]
    ).to(device)
    x.requires_grad_(case.dtype.is_floating_point)
    for axis, src, dst in case.moves:
        function, arguments = make_transition(src, dst, case.shape, ROWS)
        later = late and function not in ONLY_LOCAL
        out = (
            wait(function(out, axis, **arguments, async_op=True))
            if later
            else function(out, axis, **arguments)
        )
    if not case.dtype.is_floating_point:
        assert not out.requires_grad
        return out, None
    grad = local_input(case, mesh, rank, 2, [(axis, dst.grad) for axis, _, dst in case.moves]).to(
        device
    )
    return out.detach(), torch.autograd.grad(out, x, grad)[0]


def local_input(
    case: Case, mesh: MeshShape, rank: int, seed: int, placements: list[tuple[str, Placement]]
) -> Tensor:
    x = place_on(mesh, numbers(case.shape, seed, case.dtype), placements)[rank]
    return x.transpose(0, -1).contiguous().transpose(0, -1) if case.strided else x


_axes: dict[MeshShape, dict[str, AxisGroup]] = {}


def run_cases(
    rank: int, mesh: MeshShape, cases: list[Case], mutation: tuple[str, str] | None = None
) -> list:
    """In a worker: the results of all cases, with one primitive tampered with."""
    if mesh not in _axes:
        _axes[mesh] = mesh_axes(mesh, "cpu")[1]
    table = primitives._PRIMITIVES
    original = dict(table)
    if mutation is not None:
        table[mutation[0]] = MUTATIONS[mutation](original[mutation[0]])
    try:
        with active_axes(_axes[mesh]):
            results = [run_case(case, mesh, rank) for case in cases]
            for case, (value, grad) in zip(cases, results, strict=True):
                later = run_case(case, mesh, rank, late=True)
                assert torch.equal(later[0], value) and (
                    grad is None or torch.equal(later[1], grad)
                ), f"asynchronous {case}"
            return results
    finally:
        table.update(original)


def value_is_right(mesh: MeshShape, case: Case, outputs: list[Tensor]) -> bool:
    return _reads_as(
        mesh,
        outputs,
        [(axis, dst.value) for axis, _, dst in case.moves],
        numbers(case.shape, 1, case.dtype),
    )


def gradient_is_right(mesh: MeshShape, case: Case, gradients: list[Tensor]) -> bool:
    return _reads_as(
        mesh,
        gradients,
        [(axis, src.grad) for axis, src, _ in case.moves],
        numbers(case.shape, 2, case.dtype),
    )


def _reads_as(
    mesh: MeshShape, parts: list[Tensor], placements: list[tuple[str, Placement]], whole: Tensor
) -> bool:
    try:
        found = read_from(mesh, parts, placements)
    except (AssertionError, RuntimeError):
        return False
    return found.dtype == whole.dtype and torch.equal(found, whole)


def check(pool, mesh: MeshShape, cases: list[Case]) -> None:
    by_rank = pool.run(run_cases, mesh, cases)
    for case, results in zip(cases, zip(*by_rank, strict=True), strict=True):
        assert value_is_right(mesh, case, [value for value, _ in results]), f"value of {case}"
        if case.dtype.is_floating_point:
            assert gradient_is_right(mesh, case, [grad for _, grad in results]), (
                f"gradient of {case}"
            )
        assert all(value.is_contiguous() for value, _ in results) or case.strided, (
            f"strides of {case}"
        )


TP4 = MeshShape(tp=4)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_transition_on_one_axis(pool4, shape):
    check(pool4, TP4, [Case(shape, (("tp", src, dst),)) for src, dst in PAIRS])


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.bool], ids=str
)
def test_every_transition_of_every_dtype(pool4, dtype):
    check(pool4, TP4, [Case((7, 2, 5), (("tp", src, dst),), dtype) for src, dst in PAIRS])


def test_every_transition_of_strided_tensors(pool4):
    check(
        pool4,
        TP4,
        [
            Case(shape, (("tp", src, dst),), strided=True)
            for src, dst in PAIRS
            for shape in SHAPES[:2]
        ],
    )


@pytest.mark.slow
def test_every_pair_of_transitions_on_two_axes(pool4):
    cases = [
        Case((4, 3, 6), (("dp", *first), ("tp", *second)))
        for first, second in itertools.product(PAIRS, PAIRS)
        if not _dims(first)
        # a dim sharded by both axes is sharded by tp within dp, and dp cannot move first
        & _dims(second)
    ]
    assert len(cases) > 500
    check(pool4, MeshShape(dp=2, tp=2), cases)


def _dims(layouts: tuple[AxisLayout, AxisLayout]) -> set[int]:
    return {layout.dim for layout in layouts if layout.is_shard}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bool], ids=str)
def test_every_transition_between_patterns(pool4, dtype):
    pairs = list(itertools.product(PATTERNED, PATTERNED))
    check(pool4, TP4, [Case(PATTERNED_SHAPE, (("tp", src, dst),), dtype) for src, dst in pairs])
    assert {transition(src, dst)[0] for src, dst in pairs} == set(transitions.NODE_FUNCTIONS)


@pytest.mark.parametrize(
    "mutation",
    every(3, [("reshuffle", "drop"), ("reshuffle", "double"), ("all_gather", "double")]),
    ids=" ".join,
)
def test_a_wrong_primitive_on_patterns_is_caught(pool4, mutation):
    pairs = list(itertools.product(PATTERNED, PATTERNED))
    cases = [Case(PATTERNED_SHAPE, (("tp", src, dst),)) for src, dst in pairs]
    by_rank = pool4.run(run_cases, TP4, cases, mutation)
    for (src, dst), case, results in zip(pairs, cases, zip(*by_rank, strict=True), strict=True):
        forward, backward = transition(src, dst)
        assert value_is_right(TP4, case, [value for value, _ in results]) == (
            forward != mutation[0]
        ), f"value of {case}"
        assert gradient_is_right(TP4, case, [grad for _, grad in results]) == (
            backward != mutation[0]
        ), f"gradient of {case}"


def run_paths(rank: int, paths: list[tuple[dict, dict]]) -> list[tuple[Tensor, Tensor]]:
    """In a worker: each path's output and input gradient on this rank, along `conversion_path`."""
    mesh = MeshShape(dp=2, tp=2)
    axes, results = mesh_axes(mesh, "cpu")[1], []
    for have, want in paths:
        x = place_on(
            mesh, numbers(PATH_SHAPE, 1), [(axis, have[axis].value) for axis in ("dp", "tp")]
        )[rank].requires_grad_()
        out, current = x, dict(have)
        with active_axes(axes):
            for axis, to in conversion_path(have, want, ("dp", "tp")):
                sizes = list(PATH_SHAPE)
                for other, layout in current.items():
                    if other != axis and layout.is_shard:
                        sizes[layout.dim] //= 2
                function, arguments = make_transition(current[axis], to, sizes)
                out, current[axis] = function(out, axis, **arguments), to
        assert current == want
        grad = place_on(
            mesh, numbers(PATH_SHAPE, 2), [(axis, want[axis].grad) for axis in ("dp", "tp")]
        )[rank]
        found = torch.autograd.grad(out, x, grad)[0] if out.requires_grad and out is not x else grad
        results.append((out.detach(), found))
    return results


PATH_SHAPE = (8, 16)


@pytest.mark.slow
def test_axes_that_split_one_dim_nest(pool4):
    """Any layouts on two axes to any others, both on the same dims, contiguous and zigzag: the value and its gradient survive."""
    mesh = MeshShape(dp=2, tp=2)
    layouts = (R, RP, P, S(0), S(1), S(1, Pattern(zigzag=True)))
    states = [{"dp": a, "tp": b} for a, b in itertools.product(layouts, layouts)]
    paths = [(have, want) for have in states for want in states]
    for (have, want), results in zip(
        paths, zip(*pool4.run(run_paths, paths), strict=True), strict=True
    ):
        value = [(axis, layout.value) for axis, layout in want.items()]
        grad = [(axis, layout.grad) for axis, layout in have.items()]
        what = (
            f"{ {a: str(x) for a, x in have.items()} } -> { {a: str(x) for a, x in want.items()} }"
        )
        assert _reads_as(mesh, [v for v, _ in results], value, numbers(PATH_SHAPE, 1)), (
            f"value of {what}"
        )
        assert _reads_as(mesh, [g for _, g in results], grad, numbers(PATH_SHAPE, 2)), (
            f"gradient of {what}"
        )


def test_layouts_print_and_parse():
    for layout in (*PATTERNED, S(3, Pattern((8, 3), rows=True))):
        assert parse_layout(str(layout)) == layout
    assert str(S(1, Pattern((3, 1), rows=True, zigzag=True))) == "S(1, rows 3:1 zigzag)"
    for text in ("S(1, )", "S(1, zag)", "S(1, 2:2)", "S(1, 0:1)", "S(-1)", "Q"):
        with pytest.raises(AutoparError):
            parse_layout(text)


def test_scalars_are_summed(pool4):
    check(
        pool4,
        TP4,
        [Case((), (("tp", src, dst),)) for src, dst in itertools.product((R, RP, P), repeat=2)],
    )


@settings(max_examples=examples(10, 40))
@given(shape=st.lists(st.integers(0, 9), min_size=1, max_size=4), data=st.data())
def test_chains_of_transitions_keep_the_value(pool4, shape, data):
    layouts = [R, RP, P, *(S(dim) for dim in range(len(shape)))]
    path = data.draw(st.lists(st.sampled_from(layouts), min_size=2, max_size=6))
    strided = data.draw(st.booleans())
    check(
        pool4,
        TP4,
        [
            Case(tuple(shape), (("tp", src, dst),), strided=strided)
            for src, dst in itertools.pairwise(path)
        ],
    )


# --------------------------------------------------------------------------------------------------- the tests catch what they are for


def _drop(primitive):
    """Nothing is communicated: the result that a simulated group gives."""

    def dropped(x, group, src, dst):
        fake = AxisGroup(group.name, group.size, group.index, simulate=True)
        return (
            Started(x)
            if src is None and dst is None
            else primitives.start_primitive(NAMES[primitive], x, fake, src, dst)
        )

    return dropped


def _double(primitive):
    return lambda x, group, src, dst: Started(2 * primitive(x, group, src, dst).wait())


def _unmask(primitive):
    return lambda x, group, src, dst: Started(x)


NAMES = {primitive: name for name, primitive in primitives._PRIMITIVES.items()}
MUTATIONS = {
    (name, "drop"): _drop
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "reshuffle")
}
MUTATIONS |= {(name, "double"): _double for name in primitives._PRIMITIVES} | {
    ("mask", "drop"): _unmask
}


@pytest.mark.parametrize(
    "mutation", every(3, [m for m in MUTATIONS if m[0] != "reshuffle"]), ids=" ".join
)
def test_a_wrong_primitive_is_caught_in_both_directions(pool4, mutation):
    cases = [Case((7, 8, 5), (("tp", src, dst),)) for src, dst in PAIRS]
    by_rank = pool4.run(run_cases, TP4, cases, mutation)
    for (src, dst), case, results in zip(PAIRS, cases, zip(*by_rank, strict=True), strict=True):
        forward, backward = transition(src, dst)
        assert value_is_right(TP4, case, [value for value, _ in results]) == (
            forward != mutation[0]
        ), f"value of {case}"
        assert gradient_is_right(TP4, case, [grad for _, grad in results]) == (
            backward != mutation[0]
        ), f"gradient of {case}"


# ------------------------------------------------------------------------------------------------------------------ simulated groups


def test_simulation_gives_the_shapes_of_the_real_run(pool4):
    dtypes = (torch.float64, torch.bool)
    cases = [
        Case(shape, (("tp", *pair),), dtype)
        for shape, pair, dtype in itertools.product(SHAPES[: tried(1, 4)], PAIRS, dtypes)
    ]
    for rank, real in enumerate(pool4.run(run_cases, TP4, cases)):
        for device in ("cpu", "meta"):
            with active_axes(simulated_axes(TP4, rank)):
                simulated = [run_case(case, TP4, rank, device) for case in cases]
            assert _describe(simulated) == _describe(real)
            assert all(out.device.type == device for out, _ in simulated)


def _describe(results: list[tuple[Tensor, Tensor | None]]) -> list[tuple]:
    return [
        (out.shape, out.dtype, None if grad is None else (grad.shape, grad.dtype))
        for out, grad in results
    ]


def test_simulation_on_fake_tensors_with_a_symbolic_batch():
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    for index, (src, dst) in itertools.product(
        range(2), itertools.product((R, RP, S(1), P), repeat=2)
    ):
        length = 6 if not src.is_shard else 3
        x = mode.from_tensor(torch.empty(5, length, requires_grad=True), symbolic_context=context)
        function, arguments = make_transition(src, dst, (x.shape[0], 6))
        with mode, active_axes({"tp": AxisGroup("tp", 2, index, simulate=True)}):
            out = function(x, "tp", **arguments)
            out.sum().backward()
        assert out.shape[0] is x.shape[0] or str(out.shape[0]) == str(x.shape[0])
        assert out.shape[1] == (3 if dst.is_shard else 6) and x.grad.shape[1] == length


def trace_real_groups(rank: int) -> list[tuple[int, ...]]:
    """Fake tensors through real process groups: nothing is sent, shapes are right."""
    axes = mesh_axes(TP4, "cpu")[1]
    shapes = []
    with FakeTensorMode(), active_axes(axes):
        for src, dst in PAIRS:
            x = torch.empty(
                place(torch.empty(7, 5, 8), src.value, 4)[rank].shape, requires_grad=True
            )
            function, arguments = make_transition(src, dst, (7, 5, 8))
            out = function(x, "tp", **arguments)
            out.sum().backward()
            assert x.grad.shape == x.shape
            shapes.append(tuple(out.shape))
    return shapes


def test_fake_tensors_trace_through_real_groups(pool4):
    for rank, shapes in enumerate(pool4.run(trace_real_groups)):
        assert shapes == [
            tuple(place(torch.empty(7, 5, 8), dst.value, 4)[rank].shape) for _, dst in PAIRS
        ]


# ----------------------------------------------------------------------------------------------------------------- nodes and context


def test_a_single_rank_moves_nothing():
    whole = numbers((3, 4, 5), 1)
    with active_axes({axis: AxisGroup(axis, 1) for axis in AXES}):
        for src, dst in PAIRS:
            x = whole.clone().requires_grad_()
            function, arguments = make_transition(src, dst, whole.shape)
            out = function(x, "tp", **arguments)
            out.backward(2 * whole)
            assert torch.equal(out, whole) and torch.equal(x.grad, 2 * whole)


def test_the_table_of_legal_pairs_is_that_of_transition():
    found = {
        (name, backward)
        for name, options in transitions._LEGAL_BACKWARD.items()
        for backward in options
    }
    assert found == {
        transition(src, dst) for src, dst in (*PAIRS, *itertools.product(PATTERNED, PATTERNED))
    }
    for src, dst in PAIRS:
        assert (
            transitions.NODE_FUNCTIONS[transition(src, dst)[0]]
            is make_transition(src, dst, (4, 4, 4))[0]
        )


def test_nodes_print_readably():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    function, arguments = make_transition(S(1), RP, (4, 10))
    graph.output(graph.call_function(function, (x, "tp"), arguments))
    module = torch.fx.GraphModule({}, graph)
    assert (
        "transitions_all_gather(x, 'tp', dim = 1, size = 10, backward = 'reduce_scatter')"
        in module.code.replace(".", "_")
    )
    with active_axes({"tp": AxisGroup("tp", 2, 1, simulate=True)}):
        assert module(torch.ones(4, 5)).shape == (4, 10)


def test_mistakes_are_explained():
    x = torch.ones(4, 5)
    with pytest.raises(AutoparError, match="'tp' ran with no active mesh"):
        all_reduce(x, "tp")
    with (
        active_axes({"dp": AxisGroup("dp", 1)}),
        pytest.raises(AutoparError, match="names mesh axis 'tp'; the active mesh has dp"),
    ):
        all_reduce(x, "tp")
    with active_axes({"tp": AxisGroup("tp", 2, simulate=True)}):
        with pytest.raises(
            ValueError,
            match=r"expects 4 elements in dim 1 \(of 8 before sharding\) and got a tensor of shape \(4, 5\)",
        ):
            all_gather(x, "tp", 1, 8)
        with pytest.raises(
            ValueError,
            match="'slice' is not the backward of all_reduce; identity or all_reduce can be",
        ):
            all_reduce(x, "tp", "slice")
        with pytest.raises((ValueError, IndexError)):
            shard(x, "tp", 2)
    with pytest.raises(AutoparError, match="needs a dim 3"):
        make_transition(R, S(3), (4, 4))
    for wrong in (
        {"size": 2},
        {"size": 2, "index": 2, "group_name": "g"},
        {"size": 1, "group_name": "g"},
    ):
        with pytest.raises(ValueError, match="axis 'tp'"):
            AxisGroup("tp", **wrong)


def test_contexts_nest_and_threads_are_separate():
    two, three = ({"tp": AxisGroup("tp", size, simulate=True)} for size in (2, 3))
    seen = {}

    def in_thread(name, axes=None):
        def body():
            try:
                if axes is None:
                    seen[name] = shard(torch.ones(6), "tp", 0).shape[0]
                else:
                    with active_axes(axes):
                        seen[name] = shard(torch.ones(6), "tp", 0).shape[0]
            except AutoparError as error:
                seen[name] = str(error)

        thread = threading.Thread(target=body)
        thread.start()
        thread.join()

    with active_axes(two):
        with active_axes(three):
            assert shard(torch.ones(6), "tp", 0).shape[0] == 2
        assert shard(torch.ones(6), "tp", 0).shape[0] == 3
        in_thread("own", three)
        in_thread("inherited")
    in_thread("none")
    assert seen["own"] == 2 and seen["inherited"] == 3 and "no active mesh" in seen["none"]


def checkpointed(rank: int) -> tuple[Tensor, Tensor]:
    """Column-parallel then row-parallel linear, with and without recomputation; backward outside of the block without it."""
    axes = mesh_axes(TP4, "cpu")[1]
    gradients = []
    for recompute in (False, True):
        x = numbers((3, 8), 3).requires_grad_()
        up, down = (
            place(numbers((8, 8), seed), S(dim).value, 4)[rank] for seed, dim in ((4, 0), (5, 1))
        )

        def block(x, up=up, down=down):
            return all_reduce((identity(x, "tp") @ up.T) @ down.T, "tp")

        with active_axes(axes):
            out = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
            if recompute:
                out.sum().backward()
        if not recompute:
            out.sum().backward()
        gradients.append(x.grad)
    return tuple(gradients)


def test_recomputation_communicates_again(pool4):
    x = numbers((3, 8), 3).requires_grad_()
    (x @ numbers((8, 8), 4).T @ numbers((8, 8), 5).T).sum().backward()
    for plain, recomputed in pool4.run(checkpointed):
        assert torch.equal(plain, x.grad) and torch.equal(recomputed, x.grad)


def compiled(rank: int) -> list[bool]:
    """Whether each transition gives the same, value and gradient, inside a graph captured whole by torch.compile."""
    same = []
    with active_axes(mesh_axes(TP4, "cpu")[1]):
        for src, dst in ((R, RP), (S(1), RP), (S(0), S(1))):
            function, arguments = make_transition(src, dst, (7, 6))

            def program(x, function=function, arguments=arguments):
                return function(x * 2, "tp", **arguments) * 3

            results = []
            for run in (program, torch.compile(program, fullgraph=True, backend="aot_eager")):
                torch._dynamo.reset()
                x = place(numbers((7, 6), 1), src.value, 4)[rank].requires_grad_()
                out = run(x)
                out.backward(place(numbers((7, 6), 2), dst.grad, 4)[rank])
                results.append((out.detach(), x.grad))
            same.append(all(torch.equal(a, b) for a, b in zip(*results, strict=True)))
    return same


@pytest.mark.slow
def test_transitions_compile_without_graph_breaks(pool4):
    assert all(all(same) for same in pool4.run(compiled))


def test_paths_of_conversions_keep_axes_nested():
    """Whenever an axis changes how it splits a dim, no inner axis splits that dim, over all pairs of layouts on three axes."""
    axes, layouts = ("dp", "cp", "tp"), list(itertools.product((R, RP, S(0), S(1)), repeat=3))
    for have, want in itertools.product(layouts, layouts):
        current, wanted = dict(zip(axes, have, strict=True)), dict(zip(axes, want, strict=True))
        path = conversion_path(current, wanted, axes)
        for axis, to in path:
            touched = {current[axis].dim, to.dim} - {-1}
            assert not touched & {current[inner].dim for inner in axes[axes.index(axis) + 1 :]}, (
                have,
                want,
                path,
            )
            current[axis] = to
        assert current == wanted
        assert len(path) <= 5  # the outer axis once, each other one at most twice


def test_an_inner_axis_goes_straight_where_it_is_wanted():
    """Keys on their way to attention under cp x tp: positions change to heads, then come together; nothing is gathered to be cut."""
    have, want = {"cp": S(2), "tp": S(2)}, {"cp": RP, "tp": S(1)}
    assert conversion_path(have, want, ("cp", "tp")) == [("tp", S(1)), ("cp", RP)]
    assert conversion_path(want, have, ("cp", "tp")) == [("cp", S(2)), ("tp", S(2))]


def test_oracle_knows_layouts():
    whole = numbers((7, 3), 1)
    for placement in (REPLICATE, P.value, S(0).value, S(1).value):
        parts = place(whole, placement, 4)
        assert len(parts) == 4 and torch.equal(read(parts, placement), whole)
        assert prod(parts[0].shape) > 0
    assert [part.shape[0] for part in place(whole, S(0).value, 4)] == [2, 2, 2, 1]
