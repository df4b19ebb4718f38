"""Models for the solver's tests: random small ones, and transformer-like ones of realistic size."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from autopar.ir.annotated import (
    AnnotatedBlock,
    AnnotatedModel,
    AnnotatedOp,
    AnnotatedValue,
    BoundaryEdge,
    Conversion,
    Saved,
    Strategy,
)
from autopar.ir.sharding import RP, P, R, S
from benchmarks.search.random_instances import borrowed

LAYOUTS = (R, RP, P, S(0), S(1))


def random_model(seed: int, max_combinations: int = 1200) -> AnnotatedModel:
    """2-3 classes of 2-5 ops: shared values, ties, edges with multiplicity, recompute, forbidden conversions."""
    rng = random.Random(seed)
    budget = [max_combinations]
    palette = rng.sample(LAYOUTS, rng.randint(2, 4))
    forbid = rng.choice([0.0, 0.0, 0.1, 0.3])
    classes = tuple(
        _random_block(rng, number, palette, forbid, budget) for number in range(rng.randint(2, 3))
    )
    edges = []
    for _ in range(rng.randint(1, 4)):
        source, target = rng.randrange(len(classes)), rng.randrange(len(classes))
        edges.append(
            BoundaryEdge(
                source,
                rng.randrange(len(classes[source].outputs)),
                target,
                rng.randrange(len(classes[target].inputs)),
                rng.randint(0, 5),
                _conversions(rng, palette, forbid),
            )
        )
    parameters = [
        (c, op.name)
        for c, block in enumerate(classes)
        for op in block.ops
        if op.kind == "parameter"
    ]
    rng.shuffle(parameters)
    tied = rng.random() < 0.5 and len(parameters) > 1
    ties = (tuple(parameters[: rng.randint(2, len(parameters))]),) if tied else ()
    for index, name in (member for group in ties for member in group[1:]):
        classes = tuple(
            borrowing(block, name) if place == index else block
            for place, block in enumerate(classes)
        )
    classes = tuple(replace(block, workspace_bytes=rng.choice([0, 15, 40])) for block in classes)
    once = [index for index, block in enumerate(classes) if block.count == 1]
    last = rng.choice([*once, None])
    return AnnotatedModel(
        classes, tuple(edges), ties, rng.randint(1, 4), _seconds(rng), rng.randint(0, 50), last=last
    )


def borrowing(block: AnnotatedBlock, name: str) -> AnnotatedBlock:
    """The class, of which a parameter is that of another."""
    return replace(block, ops=tuple(borrowed(op) if op.name == name else op for op in block.ops))


def _seconds(rng: random.Random) -> float:
    return rng.choice([0.0, rng.randint(1, 4) * 1e-3, rng.random() * 1e-2])


def _conversions(rng: random.Random, palette: list, forbid: float) -> dict:
    return {
        (a, d): Conversion(_seconds(rng), _seconds(rng))
        for a in palette
        for d in palette
        if a != d and rng.random() >= forbid
    }


def _random_block(
    rng: random.Random, number: int, palette: list, forbid: float, budget: list[int]
) -> AnnotatedBlock:
    keys = [f"k{i}" for i in range(3)]
    values, ops, available = {}, [], []

    def add(kind: str, reads: int, writes: int) -> None:
        name = f"{kind}{len(ops)}"
        inputs = tuple(rng.choice(available) for _ in range(reads))
        outputs = tuple(f"v{len(values) + i}" for i in range(writes))
        strategies = []
        wanted = min(rng.choice([1, 2, 2, 3]), budget[0])
        budget[0] //= wanted
        for index in range(wanted):
            saved = tuple(
                Saved(rng.choice(keys), rng.randint(0, 30)) for _ in range(rng.randint(0, 2))
            )
            strategies.append(
                Strategy(
                    f"s{index}",
                    tuple(rng.choice(palette) for _ in inputs),
                    tuple(rng.choice(palette) for _ in outputs),
                    _seconds(rng),
                    _seconds(rng),
                    _seconds(rng),
                    rng.randint(0, 40),
                    saved,
                )
            )
        ops.append(AnnotatedOp(name, kind, "aten.some", inputs, outputs, tuple(strategies)))
        for value in outputs:
            values[value] = AnnotatedValue(value, 8, _conversions(rng, palette, forbid))
            available.append(value)

    add("input", 0, 1)
    for kind in rng.sample(["input", "parameter", "op", "op"], rng.randint(0, 3)):
        add(
            kind,
            rng.randint(1, 3) if kind == "op" else 0,
            rng.choice([1, 1, 2]) if kind == "op" else 1,
        )
    add("output", 1, 0)
    inputs = tuple(op.name for op in ops if op.kind == "input")
    sizes = {name: {layout: rng.randint(0, 20) for layout in palette} for name in inputs}
    outputs = tuple(op.name for op in ops if op.kind == "output")
    return AnnotatedBlock(
        f"block{number}",
        rng.randint(1, 4),
        tuple(ops),
        values,
        inputs,
        outputs,
        rng.random() < 0.4,
        sizes,
    )


def transformer(
    tp: int = 8,
    layers: int = 32,
    hidden: int = 4096,
    ffn: int = 14336,
    tokens: int = 8192,
    vocab: int = 128256,
    num_microbatches: int = 8,
    recompute: bool = False,
    jitter: int | None = None,
) -> AnnotatedModel:
    """Prologue, `layers` decoder blocks of about 50 ops with up to 6 strategies each, epilogue; H100-like costs."""
    rng = random.Random(jitter) if jitter is not None else None
    build = _Builder(tp, rng)
    embed = build.block("prologue", 1, recompute, lambda b: _embedding(b, tokens, hidden, vocab))
    layer = build.block("layer", layers, recompute, lambda b: _layer(b, tokens, hidden, ffn))
    head = build.block("epilogue", 1, recompute, lambda b: _head(b, tokens, hidden, vocab))
    conversions = build.conversions(tokens * hidden * 2)
    edges = (
        BoundaryEdge(0, 0, 1, 0, 1, conversions),
        BoundaryEdge(1, 0, 1, 0, layers - 1, conversions),
        BoundaryEdge(1, 0, 2, 0, 1, conversions),
    )
    head = borrowing(head, "w_head")
    return AnnotatedModel(
        (embed, layer, head),
        edges,
        (((0, "w_embed"), (2, "w_head")),),
        num_microbatches,
        1e-3,
        2 << 30,
    )


_SHAPES = {"B": 0, "T": 1, "H": 2}


class _Builder:
    """Ops over activations [B, T, H] (S(1) is sequence parallel, S(2) feature sharded) and weights [out, in]."""

    def __init__(self, tp: int, rng: random.Random | None):
        self.tp, self.rng = tp, rng

    def noise(self) -> float:
        return 1.0 if self.rng is None else self.rng.uniform(0.5, 2.0)

    def conversions(self, size_bytes: int) -> dict:
        gather = size_bytes * (self.tp - 1) / self.tp / 300e9 + 10e-6
        cost = {"R": 0.0, "RP": gather, "P": 2 * gather, "S": gather}
        named = {R: "R", RP: "R", P: "P", S(0): "S", S(1): "S", S(2): "S"}
        table = {}
        for a, ka in named.items():
            for d, kd in named.items():
                if a == d or d == P:
                    continue
                forward = cost["P"] if (ka, kd) == ("P", "R") else gather if ka in "PS" else 2e-6
                backward = (
                    2 * gather if d == RP and a == R else gather if kd == "S" or d == RP else 2e-6
                )
                table[a, d] = Conversion(forward * self.noise(), backward * self.noise())
        return table

    def block(self, name: str, count: int, recompute: bool, fill) -> AnnotatedBlock:
        self.ops, self.values = [], {}
        fill(self)
        inputs = tuple(op.name for op in self.ops if op.kind == "input")
        outputs = tuple(op.name for op in self.ops if op.kind == "output")
        sizes = {
            n: {
                a: (1 << 26) // (self.tp if a.is_shard else 1) for a in (R, RP, P, S(0), S(1), S(2))
            }
            for n in inputs
        }
        return AnnotatedBlock(
            name, count, tuple(self.ops), self.values, inputs, outputs, recompute, sizes
        )

    def op(
        self,
        kind: str,
        name: str,
        reads: tuple[str, ...],
        size_bytes: int,
        rules: list[tuple],
        seconds: float,
        static: int = 0,
        keep: bool = True,
    ) -> str:
        """`rules`: (input layouts, output layout or None); work and bytes shrink by tp where anything is sharded."""
        strategies = []
        for index, (inputs, output) in enumerate(rules):
            sharded = any(a.is_shard for a in (*inputs, *((output,) if output else ())))
            share = self.tp if sharded else 1
            saved = tuple(
                Saved(f"{v}@{a}", self.values[v].size_bytes // (self.tp if a.is_shard else 1))
                for v, a in zip(reads, inputs, strict=True)
                if keep and not v.startswith("w_")
            )
            cost = seconds / share * self.noise()
            strategies.append(
                Strategy(
                    f"{name}{index}",
                    inputs,
                    (output,) if output else (),
                    cost,
                    2 * cost,
                    static / share / 3e12,
                    static // share,
                    saved,
                )
            )
        outputs = (name,) if rules[0][1] else ()
        self.ops.append(
            AnnotatedOp(
                f"out_{name}" if not outputs else name,
                kind,
                f"aten.{name}",
                reads,
                outputs,
                tuple(strategies),
            )
        )
        if outputs:
            self.values[name] = AnnotatedValue(name, size_bytes, self.conversions(size_bytes))
        return name

    def parameter(self, name: str, elements: int) -> str:
        return self.op(
            "parameter",
            name,
            (),
            elements * 2,
            [((), R), ((), RP), ((), S(0)), ((), S(1))],
            0.0,
            elements * 18,
        )

    def input(self, name: str, size: int) -> str:
        return self.op(
            "input",
            name,
            (),
            size,
            [((), R), ((), RP), ((), S(0)), ((), S(1)), ((), S(2)), ((), P)],
            0.0,
        )

    def output(self, value: str) -> None:
        rules = [((a,), None) for a in (R, RP, P, S(0), S(1), S(2))]
        self.op("output", value, (value,), 0, rules, 0.0, keep=False)

    def linear(self, name: str, x: str, tokens: int, inner: int, outer: int) -> str:
        w = self.parameter(f"w_{name}", inner * outer)
        rules = [
            ((R, R), R),
            ((S(0), RP), S(0)),
            ((S(1), RP), S(1)),
            ((RP, S(0)), S(2)),
            ((S(2), S(1)), P),
            ((RP, RP), RP),
        ]
        return self.op(
            "op",
            name,
            (x, w),
            tokens * outer * 2,
            rules,
            2 * tokens * inner * outer / 500e12 + 5e-6,
        )

    def pointwise(self, name: str, reads: tuple[str, ...], size: int, linear: bool = False) -> str:
        rules = [((a,) * len(reads), a) for a in (R, RP, S(0), S(1), S(2))] + (
            [((P,) * len(reads), P)] if linear else []
        )
        return self.op("op", name, reads, size, rules, (len(reads) + 1) * size / 2.5e12 + 5e-6)

    def norm(self, name: str, x: str, size: int, hidden: int) -> str:
        w = self.parameter(f"w_{name}", hidden)
        square = self.pointwise(f"{name}_square", (x,), size)
        mean = self.op(
            "op",
            f"{name}_mean",
            (square,),
            size // hidden,
            [((a,), a) for a in (R, RP, S(0), S(1))] + [((S(2),), P)],
            size / 2e12,
        )
        rsqrt = self.op(
            "op",
            f"{name}_rsqrt",
            (mean,),
            size // hidden,
            [((a,), a) for a in (R, RP, S(0), S(1))],
            5e-6,
        )
        scaled = self.op(
            "op",
            f"{name}_scaled",
            (x, rsqrt),
            size,
            [((a, a), a) for a in (R, RP, S(0), S(1))] + [((S(2), RP), S(2))],
            3 * size / 2.5e12,
        )
        rules = [((a, b), a) for a, b in ((R, R), (RP, RP), (S(0), RP), (S(1), RP), (S(2), S(0)))]
        return self.op("op", name, (scaled, w), size, rules, 2 * size / 2.5e12)


def _layer(b: _Builder, tokens: int, hidden: int, ffn: int) -> None:
    size = tokens * hidden * 2
    x = b.input("x", size)
    normed = b.norm("norm1", x, size, hidden)
    heads = []
    for letter in "qkv":
        flat = b.linear(letter, normed, tokens, hidden, hidden)
        view = b.pointwise(f"{letter}_view", (flat,), size)
        heads.append(b.pointwise(f"{letter}_rot", (view,), size) if letter != "v" else view)
    rules = [((a,) * 3, a) for a in (R, RP, S(0), S(2))]
    attention = b.op(
        "op", "attention", tuple(heads), size, rules, 4 * tokens * 4096 * hidden / 400e12
    )
    merged = b.pointwise("merge", (attention,), size)
    projected = b.linear("proj", merged, tokens, hidden, hidden)
    after = b.pointwise("residual1", (x, projected), size, linear=True)
    normed = b.norm("norm2", after, size, hidden)
    gate = b.linear("gate", normed, tokens, hidden, ffn)
    up = b.linear("up", normed, tokens, hidden, ffn)
    act = b.pointwise("act", (gate,), tokens * ffn * 2)
    product = b.pointwise("product", (act, up), tokens * ffn * 2)
    down = b.linear("down", product, tokens, ffn, hidden)
    b.output(b.pointwise("residual2", (after, down), size, linear=True))


def _embedding(b: _Builder, tokens: int, hidden: int, vocab: int) -> None:
    ids = b.op("input", "ids", (), tokens * 8, [((), R), ((), S(0)), ((), S(1))], 0.0)
    w = b.parameter("w_embed", vocab * hidden)
    rules = [((R, R), R), ((R, S(0)), P), ((S(0), RP), S(0)), ((S(1), RP), S(1)), ((R, S(1)), S(2))]
    b.output(b.op("op", "embed", (ids, w), tokens * hidden * 2, rules, tokens * hidden * 2 / 1e12))


def _head(b: _Builder, tokens: int, hidden: int, vocab: int) -> None:
    x = b.input("x", tokens * hidden * 2)
    normed = b.norm("norm", x, tokens * hidden * 2, hidden)
    logits = b.linear("head", normed, tokens, hidden, vocab)
    rules = [((R,), R), ((S(0),), P), ((S(1),), P), ((S(2),), R)]
    b.op("op", "loss", (logits,), 4, rules, tokens * vocab * 6 / 2.5e12)
    b.op("output", "loss", ("loss",), 0, [((R,), None), ((P,), None)], 0.0)


MODES = ("none", "selective", "full")


def random_modes(seed: int, max_combinations: int = 150) -> dict[str, AnnotatedModel]:
    """`random_model` in three recompute modes, with segments in some order that read from those before."""
    rng = random.Random(seed)
    base = random_model(seed, max_combinations)
    counts = [rng.choice([1, 1, 2, 3]) for _ in base.classes]
    segments = [index for index, count in enumerate(counts) for _ in range(count)]
    rng.shuffle(segments)
    last = segments[-1] if counts[segments[-1]] == 1 and rng.random() < 0.7 else None
    outputs: list[tuple[int, int]] = [(-1, 0)]
    reads, found = [], Counter()
    for number, index in enumerate(segments):
        reads.append(tuple(rng.choice(outputs) for _ in base.classes[index].inputs))
        found.update(
            (segments[s], k, index, entry) for entry, (s, k) in enumerate(reads[-1]) if s >= 0
        )
        outputs += [(number, k) for k in range(len(base.classes[index].outputs))]
    palette, forbid = rng.sample(LAYOUTS, 4), rng.choice([0.0, 0.1])
    edges = tuple(
        BoundaryEdge(*ends, count, _conversions(rng, palette, forbid))
        for ends, count in sorted(found.items())
    )
    base = replace(base, edges=edges, last=last, segments=tuple(segments), reads=tuple(reads))
    repeating = [index for index, count in enumerate(counts) if count > 1] or list(
        range(len(counts))
    )
    workspaces = [rng.choice([0, 0, 15, 40]) for _ in counts]
    models = {}
    for mode in MODES:
        classes = []
        for index, block in enumerate(base.classes):
            block = replace(
                block, count=counts[index], recompute=False, workspace_bytes=workspaces[index]
            )
            classes.append(_in_mode(rng, block, mode if index in repeating else "none"))
        models[mode] = replace(
            base,
            classes=tuple(classes),
            fixed_bytes=base.fixed_bytes + (rng.choice([0, 9]) if mode == "full" else 0),
        )
    return models


def _in_mode(rng: random.Random, block: AnnotatedBlock, mode: str) -> AnnotatedBlock:
    """What a block costs where it keeps less."""
    if mode == "none":
        return block
    ops = []
    for op in block.ops:
        strategies = []
        for s in op.strategies:
            again_s = s.forward_s * (1.0 if mode == "full" else rng.choice([0.0, 0.3]))
            less = rng.choice([1, 2]) if mode == "selective" else 1
            kept = tuple(replace(saved, size_bytes=saved.size_bytes // less) for saved in s.saved)
            strategies.append(
                replace(s, backward_s=s.backward_s + again_s, rerun_s=again_s, saved=kept)
            )
        ops.append(replace(op, strategies=tuple(strategies)))
    if mode == "selective":
        return replace(block, ops=tuple(ops))
    values = {
        name: replace(v, conversions={pair: _again(c) for pair, c in v.conversions.items()})
        for name, v in block.values.items()
    }
    return replace(block, ops=tuple(ops), values=values, recompute=True)


def _again(conversion: Conversion) -> Conversion:
    """A conversion that backward makes once more."""
    return replace(
        conversion,
        backward_s=conversion.backward_s + conversion.forward_s,
        rerun_s=conversion.forward_s,
    )
