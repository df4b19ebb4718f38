"""Attention over a sharded sequence against torch's attention over the whole one, value and gradients, in fp64.

The oracle is `scaled_dot_product_attention` of whole tensors and a list of the positions that each rank holds (`positions`); nothing of
the implementation's view of positions is used.  Methods that communicate run on gloo ranks, `gather` in this process on simulated ones.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import every, examples
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from autopar.rewrite.collectives.axes import AxisGroup, active_axes
from autopar.rewrite.lowerings import attention_blocks, context_attention

TOLERANCE = 1e-12
"""Largest difference, relative to the largest element of the reference."""

METHODS = context_attention.METHODS


@dataclass(frozen=True)
class Case:
    """`mask` is '', 'window' or 'random' (boolean), 'additive' (with a gradient) or 'bias' (without), of shape (mask_heads, mask_rows)."""

    method: str
    ranks: int
    seq: int
    kv_seq: int = 0  # 0: seq
    heads: int = 2
    kv_heads: int = 2
    dim: int = 4
    value_dim: int = 4
    batch: int = 2
    is_causal: bool = False
    zigzag: bool = False
    mask: str = ""
    mask_heads: int = 1
    mask_rows: int = 0  # 0: seq
    scale: float | None = None
    dtype: torch.dtype = torch.float64

    @property
    def keys(self) -> int:
        return self.kv_seq or self.seq


# ------------------------------------------------------------------------------------------------------------------------ oracle


def positions(case: Case, size: int, rank: int) -> list[int]:
    if case.zigzag:
        chunk = size // (2 * case.ranks)
        return [chunk * c + i for c in (rank, 2 * case.ranks - 1 - rank) for i in range(chunk)]
    step = -(-size // case.ranks)
    return list(range(size))[step * rank : step * (rank + 1)]


def tensors(case: Case) -> tuple[list[Tensor], Tensor]:
    """Whole query, key, value and, if there is one, mask; and the gradient of the result."""
    g = torch.Generator().manual_seed(case.seq + 31 * case.heads)
    shapes = (
        (case.heads, case.seq, case.dim),
        (case.kv_heads, case.keys, case.dim),
        (case.kv_heads, case.keys, case.value_dim),
    )
    inputs = [
        torch.randn(case.batch, *shape, generator=g, dtype=torch.float64)
        .to(case.dtype)
        .requires_grad_()
        for shape in shapes
    ]
    if case.mask:
        inputs.append(make_mask(case, g))
    grad = torch.randn(
        case.batch, case.heads, case.seq, case.value_dim, generator=g, dtype=torch.float64
    ).to(case.dtype)
    return inputs, grad


def make_mask(case: Case, g: torch.Generator) -> Tensor:
    """Every boolean mask has a row that attends to nothing, where there are rows."""
    rows = case.mask_rows or case.seq
    shape = (case.mask_heads, rows, case.keys) if case.mask_heads > 1 else (rows, case.keys)
    if case.mask in ("additive", "bias"):
        mask = torch.randn(shape, generator=g, dtype=torch.float64).to(case.dtype)
        return mask.requires_grad_(case.mask == "additive")
    if case.mask == "random":
        mask = torch.rand(shape, generator=g) < 0.5
    else:
        distance = torch.arange(rows).unsqueeze(1) - torch.arange(case.keys)
        mask = ((distance >= 0) & (distance < 3)).expand(shape).clone()
    if rows > 1:
        mask[..., rows // 2, :] = False
    return mask


def reference(case: Case, dtype: torch.dtype | None = None) -> list[Tensor]:
    """The result and the gradients of query, key, value and mask, whole; computed in `dtype`, if given."""
    inputs, grad = tensors(case)
    if dtype is not None:
        inputs = [x.detach().to(dtype).requires_grad_(x.requires_grad) for x in inputs]
        grad = grad.to(dtype)
    mask = inputs[3] if case.mask else None
    if mask is not None and case.is_causal:
        past = torch.arange(case.seq).unsqueeze(1) >= torch.arange(case.keys)
        mask = mask & past if mask.dtype == torch.bool else mask.masked_fill(~past, -torch.inf)
    causal = case.is_causal and mask is None
    out = scaled_dot_product_attention(
        *inputs[:3], mask, 0.0, causal, scale=case.scale, enable_gqa=case.heads != case.kv_heads
    )
    return [out.detach(), *torch.autograd.grad(out, [x for x in inputs if x.requires_grad], grad)]


def local_inputs(case: Case, rank: int) -> tuple[list[Tensor], Tensor]:
    inputs, grad = tensors(case)
    rows, columns = positions(case, case.seq, rank), positions(case, case.keys, rank)
    held = [rows, columns, columns] if case.method != "gather" else [rows, slice(None), slice(None)]
    local = [x.detach()[:, :, part] for x, part in zip(inputs, held, strict=False)]
    if case.mask:
        mask = inputs[3].detach()
        local.append(
            mask if case.method == "ulysses" or mask.shape[-2] == 1 else mask[..., rows, :]
        )
    requires = [x.requires_grad for x in inputs]
    return [x.clone().requires_grad_(r) for x, r in zip(local, requires, strict=True)], grad[
        :, :, rows
    ]


def run_case(case: Case, rank: int, device: str = "cpu") -> list[Tensor]:
    """This rank's result and gradients, under the active axes."""
    inputs, grad = local_inputs(case, rank)
    inputs = [x.detach().to(device).requires_grad_(x.requires_grad) for x in inputs]
    out = attend(case, inputs)
    return [
        out.detach(),
        *torch.autograd.grad(out, [x for x in inputs if x.requires_grad], grad.to(device)),
    ]


def attend(case: Case, inputs: list[Tensor]) -> Tensor:
    mask = inputs[3] if case.mask else None
    options = (mask, case.is_causal, case.scale, case.zigzag)
    return context_attention.context_attention(
        *inputs[:3], "cp", case.method, case.seq, case.keys, *options
    )


def joined(case: Case, parts: list[Tensor], slot: int, like: Tensor) -> Tensor:
    """The whole that the ranks' tensors of one slot (result, dquery, dkey, dvalue, dmask) stand for."""
    rows_are_sharded = slot == 4 and case.method != "ulysses" and like.shape[-2] > 1
    if (slot in (2, 3) and case.method == "gather") or (slot == 4 and not rows_are_sharded):
        return torch.stack(parts).sum(0)
    dim, size = (-2, case.keys) if slot in (2, 3) else (-2, case.seq)
    order = [p for rank in range(case.ranks) for p in positions(case, size, rank)]
    return torch.cat(parts, dim).index_select(dim, torch.tensor(order, dtype=torch.long).argsort())


def errors(case: Case, results: list[list[Tensor]]) -> list[float]:
    """Of the result and of each gradient: the largest difference over the largest element."""
    found = []
    for slot, expected in enumerate(reference(case)):
        whole = joined(case, [result[slot] for result in results], slot, expected)
        assert whole.shape == expected.shape and whole.dtype == expected.dtype, case
        if not expected.numel():
            continue
        largest, difference = expected.abs().max().item(), (whole - expected).abs().max().item()
        found.append(difference / largest if largest else difference)
    return found


# ---------------------------------------------------------------------------------------------------------------- running on ranks

_groups: dict[int, AxisGroup | None] = {}


def axes_of(rank: int, ranks: int) -> dict[str, AxisGroup]:
    """In a worker: the group of the first `ranks` ranks."""
    if not _groups:  # every rank takes part in making every group
        for size in (2, 3, 4):
            group = dist.new_group(list(range(size)))
            _groups[size] = AxisGroup("cp", size, rank, group.group_name) if rank < size else None
    return {"cp": _groups[ranks]}


def run_cases(
    rank: int, cases: list[Case], mutation: tuple[str, int] | None = None
) -> list[list[Tensor] | None]:
    """In a worker: its results of all cases, with the ring tampered with."""
    originals = {name: getattr(context_attention, name) for name in ("_visiting", "_exchange")}
    if mutation is not None:
        MUTATIONS[mutation[0]](mutation[1])
    try:
        results = []
        for case in cases:
            axes = axes_of(rank, case.ranks)
            if rank < case.ranks:
                with active_axes(axes):
                    results.append(run_case(case, rank))
            else:
                results.append(None)
        return results
    finally:
        for name, original in originals.items():
            setattr(context_attention, name, original)


def simulated(case: Case, rank: int) -> dict[str, AxisGroup]:
    return {"cp": AxisGroup("cp", case.ranks, rank, simulate=True)}


def run_simulated(case: Case, device: str = "cpu") -> list[list[Tensor]]:
    results = []
    for rank in range(case.ranks):
        with active_axes(simulated(case, rank)):
            results.append(run_case(case, rank, device))
    return results


def all_errors(
    pool, cases: list[Case], mutation: tuple[str, int] | None = None
) -> list[list[float]]:
    by_rank = pool.run(run_cases, cases, mutation)
    return [
        errors(case, list(results)[: case.ranks])
        for case, results in zip(cases, zip(*by_rank, strict=True), strict=True)
    ]


def check(pool, cases: list[Case]) -> None:
    worst = 0.0
    communicating = [case for case in cases if case.method != "gather"]
    found = zip(
        communicating, all_errors(pool, communicating) if communicating else [], strict=True
    )
    for case, error in itertools.chain(
        found, ((c, errors(c, run_simulated(c))) for c in cases if c.method == "gather")
    ):
        assert all(e <= TOLERANCE for e in error), f"{case}: {error}"  # a nan fails
        worst = max([worst, *error])
    print(f"{len(cases)} cases, worst relative error {worst:.1e}")


# ------------------------------------------------------------------------------------------------------------------------- exactness


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ranks", every(2, [4, 2, 3]))
def test_even_shards(pool4, method, ranks):
    check(
        pool4,
        [
            Case(
                method,
                ranks,
                24,
                heads=12,
                kv_heads=12 // group,
                value_dim=value_dim,
                is_causal=causal,
                zigzag=zigzag,
            )
            for group, value_dim, causal, zigzag in itertools.product(
                (1, 2, 4), (4, 3), (False, True), (False, True)
            )
        ],
    )


@pytest.mark.parametrize("method", METHODS)
def test_uneven_shards_and_ranks_without_rows(pool4, method):
    """Over 4 ranks 9 = 3+3+3+0, 10 = 3+3+3+1, 5 = 2+2+1+0, 1 = 1+0+0+0; over 3 ranks 10 = 4+4+2, 4 = 2+2+0."""
    sizes = ((4, 9), (4, 10), (4, 5), (4, 1), (3, 10), (3, 4), (2, 7), (2, 1))
    check(
        pool4,
        [
            Case(
                method,
                ranks,
                seq,
                heads=12,
                kv_heads=kv_heads,
                is_causal=causal,
                value_dim=value_dim,
            )
            for (ranks, seq), kv_heads, causal, value_dim in itertools.product(
                sizes, (12, 3), (False, True), (4, 5)
            )
        ],
    )


@pytest.mark.parametrize("method", METHODS)
def test_other_keys_than_queries(pool4, method):
    cases = [
        Case(method, ranks, seq, kv_seq, heads=12, kv_heads=6)
        for ranks, seq, kv_seq in ((2, 5, 9), (3, 9, 4), (4, 5, 11), (4, 11, 3))
    ]
    check(
        pool4,
        [
            *cases,
            Case(method, 2, 8, 12, zigzag=True),
            Case(method, 3, 12, 6, heads=3, kv_heads=1, zigzag=True),
        ],
    )


@pytest.mark.parametrize(
    ("method", "mask"),
    [
        (method, mask)
        for method in METHODS
        for mask in ("window", "random", "bias" if method == "ring" else "additive")
    ],
)
def test_masks(pool4, method, mask):
    """Boolean masks have a row that attends to nothing: zero result, zero gradient, as in torch."""
    shapes = [{"mask_heads": 1}, {"mask_heads": 4}] + (
        [] if mask == "window" else [{"mask_rows": 1}, {"mask_heads": 4, "mask_rows": 1}]
    )
    layouts = [(2, 8, False), (2, 8, True), (4, 16, True), (4, 9, False), (2, 7, False)]
    check(
        pool4,
        [
            Case(
                method,
                ranks,
                seq,
                heads=4,
                kv_heads=2,
                mask=mask,
                zigzag=zigzag,
                is_causal=causal,
                value_dim=value_dim,
                **shape,
            )
            for shape, (ranks, seq, zigzag), (causal, value_dim) in itertools.product(
                shapes, layouts, ((False, 4), (True, 4), (True, 3))
            )
        ],
    )


def run_shards_of_heads(rank: int, case: Case, shards: int) -> list[Tensor] | None:
    """In a worker: result and gradients of all heads, computed one tensor-parallel rank's heads after the other."""
    axes = axes_of(rank, case.ranks) if case.method != "gather" else simulated(case, rank)
    if rank >= case.ranks:
        return None
    inputs, grad = local_inputs(case, rank)
    found = []
    for shard in range(shards):
        held = [
            slice(step * shard, step * (shard + 1))
            for step in (-(-heads // shards) for heads in (case.heads, case.kv_heads))
        ]
        local = [
            x.detach()[:, held[k > 0]].clone().requires_grad_() for k, x in enumerate(inputs[:3])
        ]
        if case.mask:
            local.append(
                inputs[3].detach()[held[0]].clone().requires_grad_(inputs[3].requires_grad)
            )
        with active_axes(axes):
            out = attend(case, local)
            found.append(
                [
                    out.detach(),
                    *torch.autograd.grad(
                        out, [x for x in local if x.requires_grad], grad[:, held[0]]
                    ),
                ]
            )
    return [
        torch.cat(parts, 1 if slot < 4 else 0)
        for slot, parts in enumerate(zip(*found, strict=True))
    ]


@pytest.mark.parametrize("method", METHODS)
def test_ranks_without_heads(pool4, method):
    """Over 3 tensor-parallel ranks 4 heads = 2+2+0 and 2 = 1+1+0; the third rank computes nothing, sends nothing, and has gradients."""
    masks = ("", "random", "bias" if method == "ring" else "additive")
    for kv_heads, causal, zigzag, mask in itertools.product(
        (4, 2), (False, True), (False, True), masks
    ):
        case = Case(
            method,
            2,
            8,
            heads=4,
            kv_heads=kv_heads,
            is_causal=causal,
            zigzag=zigzag,
            mask=mask,
            mask_heads=4,
        )
        if method == "gather":
            results = [run_shards_of_heads(rank, case, 3) for rank in range(2)]
        else:
            results = pool4.run(run_shards_of_heads, case, 3, timeout_s=60.0)[:2]
        assert all(error <= TOLERANCE for error in errors(case, results)), case


def test_no_query_heads_over_whole_keys():
    """Gradients of keys that nobody reads are zero, not absent."""
    inputs, grad = local_inputs(case := Case("ring", 2, 8, mask="bias"), 0)
    with active_axes(simulated(case, 0)):
        out = attend(case, [inputs[0][:, :0], *inputs[1:]])
    gradients = torch.autograd.grad(out, inputs[:3], grad[:, :0])
    assert out.shape == (2, 0, 4, 4) and all(
        g.shape == x.shape and not g.any() for g, x in zip(gradients, inputs, strict=False)
    )


@st.composite
def cases(draw) -> Case:
    method, ranks = draw(st.sampled_from(METHODS)), draw(st.sampled_from((2, 3, 4)))
    zigzag, causal = draw(st.booleans()), draw(st.booleans())
    seq, kv_seq = (
        draw(st.integers(1, 3)) * 2 * ranks if zigzag else draw(st.integers(1, 13))
        for _ in range(2)
    )
    kv_heads, grouped = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    if method == "ulysses":
        grouped *= ranks
    mask = draw(
        st.sampled_from(
            ("", "random", "window", "bias")
            if method == "ring"
            else ("", "random", "window", "additive")
        )
    )
    return Case(
        method,
        ranks,
        seq,
        seq if causal or mask == "window" else kv_seq,
        heads=kv_heads * grouped,
        kv_heads=kv_heads,
        dim=draw(st.integers(1, 9)),
        value_dim=draw(st.integers(1, 9)),
        batch=draw(st.integers(1, 3)),
        is_causal=causal,
        zigzag=zigzag,
        mask=mask,
        mask_heads=draw(st.sampled_from((1, kv_heads * grouped))),
        mask_rows=draw(st.sampled_from((0, 1))) if mask in ("random", "bias", "additive") else 0,
        scale=draw(st.sampled_from((None, 0.3, 1.0))),
    )


def well_conditioned(case: Case) -> bool:
    """Whether fp64 determines the gradients to TOLERANCE of their size.

    Where the softmax is saturated, probability * (grad . value - grad . result) cancels: an error of 1e-16 of its terms, which any
    order of summation makes, torch's included, can be any share of what is left.  A thousandfold cancellation still leaves 1e-13.
    """
    inputs, grad = tensors(case)
    query, key, value = (x.detach().abs().max() for x in inputs[:3])
    terms = grad.abs().sum(-1).max() * value
    scale = case.dim**-0.5 if case.scale is None else case.scale
    _, dquery, dkey, _, *dmask = reference(case)
    pairs = [
        (dquery, scale * terms * key),
        (dkey, scale * terms * query),
        *((d, terms) for d in dmask),
    ]
    return all((largest := x.abs().max()) == 0 or largest > bound / 1000 for x, bound in pairs)


@settings(max_examples=examples(6, 25))
@given(st.lists(cases(), min_size=8, max_size=8))
def test_any_case(pool4, drawn):
    check(pool4, [case for case in drawn if well_conditioned(case)])


def test_one_rank_is_ordinary_attention():
    for method, causal, zigzag, mask in itertools.product(
        METHODS, (False, True), (False, True), ("", "random", "additive")
    ):
        case = Case(method, 1, 6, heads=4, kv_heads=2, is_causal=causal, zigzag=zigzag, mask=mask)
        with active_axes({"cp": AxisGroup("cp", 1)}):
            result = run_case(case, 0)
        assert all(error <= TOLERANCE for error in errors(case, [result])), case


def test_half_precision_is_as_good_as_whole_attention(pool4):
    """bf16: a result merged from blocks is no further from fp64 than twice what torch's whole attention is."""
    causal = Case(
        "ring",
        4,
        64,
        heads=4,
        kv_heads=2,
        dim=16,
        value_dim=16,
        is_causal=True,
        zigzag=True,
        dtype=torch.bfloat16,
    )
    biased = replace(causal, is_causal=False, mask="bias")
    for case in (
        *(replace(causal, method=method) for method in METHODS),
        biased,
        replace(biased, value_dim=8),
    ):
        results = (
            run_simulated(case)
            if case.method == "gather"
            else [r[0] for r in pool4.run(run_cases, [case])]
        )
        for slot, (fp64, whole) in enumerate(
            zip(reference(case, torch.float64), reference(case), strict=True)
        ):
            found = joined(case, [result[slot].double() for result in results], slot, fp64)
            assert (found - fp64).norm() <= 2 * (whole.double() - fp64).norm(), (case, slot)


# --------------------------------------------------------------------------------------------------- the tests catch what they are for


def _skip_step(dropped: int) -> None:
    """The keys of one step arrive and are not used."""
    original = context_attention._visiting

    def visiting(*args):
        for number, (step, *tensors) in enumerate(original(*args)):
            yield (step._replace(blocks=()) if number == dropped else step, *tensors)

    context_attention._visiting = visiting


class _Lost:
    def __init__(self, incoming: Tensor) -> None:
        self.incoming = incoming

    def wait(self) -> None:
        self.incoming.zero_()


def _lose_message(dropped: int) -> None:
    """One message of gradients is lost."""
    original, sent = context_attention._exchange, itertools.count()

    def exchange(ring, outgoing, incoming, tag):
        works = original(ring, outgoing, incoming, tag)
        return (
            [*works, _Lost(incoming)] if tag == 1 and next(sent) % ring.size == dropped else works
        )

    context_attention._exchange = exchange


MUTATIONS = {"step": _skip_step, "gradients": _lose_message}


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize("dropped", every(3, [1, 0, 2]))
def test_a_dropped_ring_step_is_caught(pool4, mutation, dropped):
    tampered = [
        Case("ring", 3, 12, is_causal=causal, zigzag=zigzag)
        for causal, zigzag in itertools.product((False, True), (False, True))
    ]
    for out, dquery, dkey, dvalue in all_errors(pool4, tampered, (mutation, dropped)):
        assert (out > 1e-3) == (dquery > 1e-3) == (mutation == "step")
        assert dkey > 1e-3 and dvalue > 1e-3
    check(pool4, tampered)


# -------------------------------------------------------------------------------------------------- work, memory, communication


def pairs_computed(case: Case, monkeypatch) -> list[int]:
    """How many (query, key) pairs the kernels of each rank take, a causal block counted by its triangle."""
    counts = []

    def counting(operands):
        queries, keys = operands.query.shape[2], operands.key.shape[2]
        counts[-1] += queries * (queries + 1) // 2 if operands.is_causal else queries * keys
        return attention_blocks.block_forward(operands)

    with monkeypatch.context() as patch:
        patch.setattr(context_attention, "block_forward", counting)
        for rank in range(case.ranks):
            counts.append(0)
            with active_axes(simulated(case, rank)):
                attend(case, local_inputs(case, rank)[0])
    return counts


@pytest.mark.parametrize("method", ["gather", "ring"])
@pytest.mark.parametrize("ranks", every(3, [4, 2, 3]))
def test_causal_attention_computes_no_masked_block_and_zigzag_is_balanced(
    monkeypatch, method, ranks
):
    seq = 8 * ranks
    zigzag, contiguous = (
        pairs_computed(Case(method, ranks, seq, is_causal=True, zigzag=z), monkeypatch)
        for z in (True, False)
    )
    assert sum(zigzag) == sum(contiguous) == seq * (seq + 1) // 2
    assert len(set(zigzag)) == 1
    assert len(set(contiguous)) == ranks


def test_the_ring_sends_before_it_computes_and_waits_after(monkeypatch):
    case, events = Case("ring", 3, 12), []

    def recorded(name):
        original = getattr(context_attention, name)

        def call(*args, **kwargs):
            events.append(
                name if name != "_exchange" else ("send keys", "send gradients")[kwargs["tag"]]
            )
            return original(*args, **kwargs)

        monkeypatch.setattr(context_attention, name, call)

    for name in ("_exchange", "_wait", "block_forward", "block_backward"):
        recorded(name)
    inputs, grad = local_inputs(case, 0)
    with active_axes(simulated(case, 0)):
        out = attend(case, inputs)
    assert events == 2 * ["send keys", "block_forward", "_wait"] + ["block_forward"]
    events.clear()
    out.backward(grad)
    hop = ["send keys", "block_backward", "_wait", "send gradients"]
    assert [e for e in events if e != "_wait"] == [e for e in hop + hop + hop[1:] if e != "_wait"]
    sends = [number for number, event in enumerate(events) if event == "send gradients"]
    assert [events[s + 1 : s + 4].count("block_backward") for s in sends] == [
        1,
        1,
        0,
    ]  # gradients travel during the next block


def test_ring_keeps_inputs_result_and_logsumexp_only():
    case = Case("ring", 2, 8, is_causal=True, zigzag=True)
    inputs, _ = local_inputs(case, 0)
    kept = []
    with (
        active_axes(simulated(case, 0)),
        torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept.append(tuple(t.shape)) or t, lambda t: t
        ),
    ):
        out = attend(case, inputs)
    assert sorted(kept) == sorted(
        [*(tuple(x.shape) for x in inputs), tuple(out.shape), tuple(out.shape[:3])]
    )


def recomputed(rank: int, case: Case) -> list[list[Tensor]]:
    results = []
    with active_axes(axes_of(rank, case.ranks)):
        for recompute in (False, True):
            inputs, grad = local_inputs(case, rank)
            run = lambda *tensors: attend(case, list(tensors))  # noqa: E731
            out = checkpoint(run, *inputs, use_reentrant=False) if recompute else run(*inputs)
            results.append([out.detach(), *torch.autograd.grad(out, inputs, grad)])
    return results


@pytest.mark.parametrize("method", METHODS)
def test_recomputation(pool4, method):
    for plain, again in pool4.run(
        recomputed, Case(method, 4, 8, heads=4, is_causal=True, zigzag=True)
    ):
        assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


# ------------------------------------------------------------------------------------------------------------------ simulated groups


def _describe(results: list[list[Tensor]]) -> list[list[tuple]]:
    return [[(x.shape, x.dtype) for x in result] for result in results]


@pytest.mark.parametrize("method", METHODS)
def test_simulation_gives_the_shapes_of_the_real_run(pool4, method):
    plain = Case(method, 4, 16, heads=4, kv_heads=2, value_dim=3)
    cases = [
        plain,
        replace(plain, is_causal=True, zigzag=True),
        replace(plain, seq=9, is_causal=True),
        replace(plain, mask="random", seq=5),
    ]
    for number, real in enumerate(zip(*pool4.run(run_cases, cases), strict=True)):
        for device in ("cpu", "meta"):
            found = run_simulated(cases[number], device)
            assert _describe(found) == _describe(list(real))
            assert all(x.device.type == device for result in found for x in result)


@pytest.mark.parametrize("method", METHODS)
def test_fake_tensors_with_a_symbolic_batch(method):
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * 3])
    case = Case(method, 2, 8, heads=4, kv_heads=2, batch=5, is_causal=True, zigzag=True)
    inputs = [mode.from_tensor(x, symbolic_context=context) for x in local_inputs(case, 1)[0]]
    with mode, active_axes(simulated(case, 1)):
        out = attend(case, inputs)
        gradients = torch.autograd.grad(out.sum(), inputs)
    assert str(out.shape[0]) == str(inputs[0].shape[0]) and out.shape[1:] == inputs[0].shape[1:]
    assert [g.shape[1:] for g in gradients] == [x.shape[1:] for x in inputs]


# ------------------------------------------------------------------------------------------------------------------------- kernels


@pytest.mark.parametrize(
    ("mask", "is_causal"), [("", False), ("", True), ("random", False), ("bias", False)]
)
def test_fused_and_plain_blocks_agree(monkeypatch, mask, is_causal):
    """Also in how a query that sees no key is reported."""
    case = Case("ring", 1, 7, heads=6, kv_heads=2, mask=mask, mask_heads=6, scale=0.4)
    (query, key, value, *rest), grad = tensors(case)
    bias = rest[0].detach()[None] if rest else None
    query, key, value = (x.detach() for x in (query, key, value))
    operands = attention_blocks.Operands(query, key, value, bias, is_causal, 0.4)
    results = []
    for kernel in ("flash_cpu", "plain"):
        monkeypatch.setattr(attention_blocks, "_kernel", lambda *args, kernel=kernel: kernel)
        out, lse = attention_blocks.block_forward(operands)
        safe = lse.masked_fill(lse.isneginf(), torch.inf)
        back = attention_blocks.block_backward(operands, grad, out, safe)
        results.append((out, lse, *back))
    for fused, plain in zip(*results, strict=True):
        torch.testing.assert_close(fused, plain, rtol=TOLERANCE, atol=TOLERANCE)
    assert results[0][1].isneginf().any() == (mask == "random")


@pytest.mark.parametrize("kernel", ["flash", "efficient"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_cuda_kernels_are_called_as_they_are_declared(monkeypatch, kernel, kv_heads):
    """On fake tensors: arguments and shapes, not values."""
    monkeypatch.setattr(attention_blocks, "_kernel", lambda *args: kernel)
    with FakeTensorMode():
        query, grad = (
            torch.empty(2, 4, 40, 16, device="cuda", dtype=torch.bfloat16) for _ in range(2)
        )
        key, value = (
            torch.empty(2, kv_heads, 24, 16, device="cuda", dtype=torch.bfloat16) for _ in range(2)
        )
        operands = attention_blocks.Operands(query, key, value, None, False, 0.3)
        out, lse = attention_blocks.block_forward(operands)
        back = attention_blocks.block_backward(operands, grad, out, lse)
    assert (out.shape, lse.shape) == (query.shape, query.shape[:3])
    assert [g.shape for g in back] == [x.shape for x in (query, key, value)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_cuda_kernels_agree_with_plain_blocks(monkeypatch, dtype, is_causal, kv_heads):
    case = Case("ring", 1, 72, heads=4, kv_heads=kv_heads, dim=32, value_dim=32, dtype=dtype)
    (query, key, value), grad = tensors(case)
    query, key, value, grad = (x.detach().cuda() for x in (query, key, value, grad))
    operands = attention_blocks.Operands(query, key, value, None, is_causal, None)
    assert attention_blocks._kernel(operands) == (
        "flash" if dtype == torch.bfloat16 else "efficient"
    )
    results = []
    for patched in (False, True):
        if patched:
            monkeypatch.setattr(attention_blocks, "_kernel", lambda *args: "plain")
        out, lse = attention_blocks.block_forward(operands)
        back = attention_blocks.block_backward(operands, grad, out, lse)
        results.append((out, lse, *back))
    for fused, plain in zip(*results, strict=True):
        tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-5
        assert (fused.float() - plain.float()).abs().max() <= tolerance * plain.float().abs().max()


# ------------------------------------------------------------------------------------------------------------------------- refusals


def test_mistakes_are_explained():
    def refused(match: str, case: Case, **changes) -> None:
        inputs, _ = local_inputs(case, 0)
        with active_axes(simulated(case, 0)), pytest.raises(ValueError, match=match):
            attend(replace(case, **changes), inputs)

    case = Case("ring", 2, 8, heads=4)
    refused("the methods are gather, ring, ulysses", case, method="star")
    refused(
        "as many keys as queries; there are 8 queries and 12 keys",
        replace(case, kv_seq=12),
        is_causal=True,
    )
    refused("zigzag cuts into 4 equal chunks", replace(case, seq=6), zigzag=True)
    refused("3 key heads do not divide 4 query heads", replace(case, kv_heads=3))
    refused("0 key heads do not divide 4 query heads", replace(case, kv_heads=0))
    refused(
        "2 ranks do not divide 3 query heads", replace(case, heads=3, kv_heads=1), method="ulysses"
    )
    refused(r"do not have 5 of 10 queries and 4 of 8 keys", replace(case, kv_seq=8), seq=10)
    refused("gives no gradient to a mask", replace(case, mask="additive"))
    refused(
        r"a mask of shape \(4, 8\) does not broadcast to \(.., 4, 8, 8\)",
        replace(case, mask="bias"),
        method="ulysses",
        seq=8,
        kv_seq=8,
    )
