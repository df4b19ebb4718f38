"""Masks of generated losses, and the many ways in which training code counts what a mask keeps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from support.loss_writer import VOCAB, Writer


@dataclass(frozen=True, slots=True)
class Labels:
    """Integer labels: `kind` is one of `loss_batches.KINDS`, `ndim` is 2 for tokens and 1 for rows."""

    name: str
    kind: str
    ndim: int

    @property
    def ignored(self) -> bool:
        return self.kind.startswith("ignored")


@dataclass(frozen=True, slots=True)
class Mask:
    """A mask: `kind` is 'bool', 'int' or 'float', `ndim` is 2 for tokens and 1 for rows or flat tokens.

    `position_dim` is the dim of positions: 1, or 0 where positions come first.
    """

    name: str
    kind: str
    ndim: int
    position_dim: int = 1

    @property
    def boolean(self) -> str:
        return self.name if self.kind == "bool" else f"({self.name} != 0)"

    @property
    def float(self) -> str:
        return self.name if self.kind == "float" else f"{self.name}.double()"

    @property
    def letters(self) -> str:
        return "bt"[: self.ndim]


# -------------------------------------------------------------------------------------------- masks


def token_mask(w: Writer, labels: Labels | None) -> Mask:
    """A mask [B, T], of the batch or computed from integers of the batch."""
    mask = w.pick(_given, _by_length, *([_by_label] * 3 if labels else []))(w, labels)
    if w.chance(0.2):
        other = w.pick(*_other_masks(w, labels))
        w.tag("mask from two tensors")
        joined = w.pick(
            f"{mask.boolean} & ({other})", f"torch.logical_and({mask.boolean}, {other})"
        )
        mask = Mask(w.let("both", joined), "bool", 2)
        if w.chance(0.3):
            mask = Mask(w.let("kept", f"~(~{mask.name})"), "bool", 2)
    return cast(w, mask) if w.chance(0.5) else mask


def row_mask(w: Writer) -> Mask:
    """A mask [B]."""
    options = {
        "row mask": lambda: w.input("row_mask", "row mask"),
        "mask from domains": lambda: w.let(
            "kept", f"{w.input('domains')} {w.pick('!= 0', '> 0', '== 1', '< 2')}"
        ),
        "mask from lengths": lambda: w.let(
            "kept", f"{w.input('lengths')} {w.pick('> 1', '!= 2', '<= 3')}"
        ),
    }
    tag = w.pick(*options)
    w.tag(tag)
    mask = Mask(options[tag](), "bool", 1)
    return cast(w, mask) if w.chance(0.5) else mask


def cast(w: Writer, mask: Mask) -> Mask:
    """The same mask in another dtype."""
    kind, expression = w.pick(
        ("float", f"{mask.name}.double()"),
        ("float", f"{mask.name}.to(torch.float64)"),
        ("float", f"torch.where({mask.boolean}, 1.0, 0.0).double()"),
        ("int", f"{mask.name}.long()"),
        ("int", f"{mask.name}.to(torch.int32)"),
        ("bool", f"{mask.name}.bool()"),
    )
    w.tag(f"mask cast to {kind}")
    return Mask(w.let("m", expression), kind, mask.ndim)


def _given(w: Writer, labels: Labels | None) -> Mask:
    kind = w.pick("bool", "int", "float")
    w.tag(f"{kind} mask")
    return Mask(w.token_input(f"{kind}_mask", f"{kind} mask"), kind, 2)


def _by_length(w: Writer, labels: Labels | None) -> Mask:
    w.tag("mask from lengths")
    lengths = w.input("lengths")
    steps = f"torch.arange({w.seq}, device={lengths}.device)"
    name = w.let(
        "valid",
        w.pick(
            f"{steps} < {lengths}.unsqueeze(1)",
            f"{steps}[None, :] < {lengths}[:, None]",
            f"{lengths}.view(-1, 1).gt({steps})",
            f"{steps}.expand({lengths}.shape[0], {w.seq}) < {lengths}[:, None]",
        ),
    )
    return Mask(w.let("valid", f"{name}[:, 1:]") if w.shifted else name, "bool", 2)


def _by_label(w: Writer, labels: Labels) -> Mask:
    w.tag("mask from labels")
    name = labels.name
    if labels.kind == "ignored labels":
        ignore_index = w.constant("ignore_index", -100)
        options = (
            f"{name} != -100",
            f"{name}.ne(-100)",
            f"{name} >= 0",
            f"~{name}.eq(-100)",
            f"{name} > -1",
            f"torch.logical_not({name} == {ignore_index})",
        )
    elif labels.kind == "padded labels":
        options = (
            f"{name} != 0",
            f"{name}.ne(0)",
            f"{name} > 0",
            f"~({name} == 0)",
            f"{name}.bool()",
            f"torch.logical_not({name}.eq(0))",
            f"{name}.clamp(max=1)",
        )
    else:
        first, second = sorted(w.rng.sample(range(1, VOCAB), 2))
        special = w.part("special", torch.tensor([first, second]), f"buffer {[first, second]}")
        options = (
            f"{name} != {first}",
            f"{name} > {min(first, 4)}",
            f"{name} % 3 != 0",
            f"({name} != {first}) & ({name} != {second})",
            f"~torch.isin({name}, {special})",
            f"({name} == {first}) | ({name} > 3)",
            f"({name}[..., None] != {special}).all(-1)",
        )
    expression = w.pick(*options)
    return Mask(w.let("keep", expression), "int" if "clamp" in expression else "bool", 2)


def _other_masks(w: Writer, labels: Labels | None) -> list[str]:
    first = "0" if w.shifted else "1"
    masks = [
        f"torch.arange({w.seq - w.shifted}) >= {first}",
        f"({w.input('domains')} < 2)[:, None]",
    ]
    if labels:
        masks += [
            f"{labels.name} != 3",
            f"{labels.name} != {labels.name}.max(1, keepdim=True).values",
        ]
    if "ids" in w.inputs:
        masks.append(f"{w.token_input('ids')} != 0")
    if "x" in w.inputs and not w.shifted and w.chance(0.1):
        w.tag("mask from floats")
        w.couple("float inputs")
        return ["x.sum(-1) > -1.0"]
    return masks


# ------------------------------------------------------------------------------------------- counts


def count(w: Writer, mask: Mask) -> str:
    """The name of a scalar tensor: how many elements the mask keeps, in one of many spellings."""
    b, f, m, p = mask.boolean, mask.float, mask.name, mask.position_dim
    spellings = {
        "sum": f"{m}.sum()",
        "sum of floats": f"{f}.sum()",
        "sum of float32": f"{m}.float().sum()",
        "torch.sum": f"torch.sum({m})",
        "sum with a dtype": f"{m}.sum(dtype=torch.float64)",
        "count_nonzero": f"torch.count_nonzero({m})",
        "long": f"{b}.long().sum()",
        "int then double": f"{b}.int().sum().double()",
        "numel minus the rest": f"{m}.numel() - (~{b}).sum()",
        "numel minus the rest as floats": f"{m}.numel() - (1 - {f}).sum()",
        "where": f"torch.where({b}, 1.0, 0.0).sum().double()",
        "not not": f"torch.logical_not(~{b}).sum()",
        "eq False": f"(~{b}).eq(False).sum()",
        "one minus": f"(1 - (~{b}).long()).sum()",
        "cumsum": f"{m}.flatten().cumsum(0)[-1]",
        "einsum": f"torch.einsum('{mask.letters}->', {f})",
        "matmul with ones": f"{f}.flatten() @ torch.ones_like({f}.flatten())",
        "dot with itself": f"torch.dot({f}.flatten(), {f}.flatten())",
        "square": f"({f} ** 2).sum()",
        "norm": f"{f}.norm(p=1)",
        "mean times numel": f"{f}.mean() * {m}.numel()",
        "flat": f"{m}.reshape(-1).sum(0)",
        "masked_fill": f"torch.ones_like({f}).masked_fill(~{b}, 0.0).sum()",
        "detach": f"{f}.sum().detach()",
        "clone": f"{f}.sum().clone()",
        "relu": f"F.relu({f}).sum()",
        "bincount by one_hot": f"F.one_hot({b}.long(), 2)[..., 1].sum()",
        "new_tensor": f"{f}.new_zeros(()) + {m}.sum()",
        "sum of stacked": f"torch.stack([{f}.sum(), {f}.new_zeros(())]).sum()",
        "trace": f"torch.trace(torch.diag({f}.flatten()))",
    }
    if mask.ndim == 2:
        spellings |= {
            "one dim at a time": f"{m}.sum(-1).sum()",
            "first dim first": f"{m}.sum(0).sum(0)",
            "both dims": f"{m}.sum(dim=(0, 1))",
            "last of cumsum": f"{m}.cumsum(1)[:, -1].sum()",
            "count_nonzero by row": f"{b}.count_nonzero(dim=1).sum()",
            "transposed": f"{m}.t().sum(1).sum()",
            "matmul twice": f"({f} @ torch.ones({f}.shape[1], dtype=torch.float64)).sum()",
            "mean of row sums": f"{f}.sum(1).mean() * {m}.shape[0]",
            "row means": f"({f}.mean(1) * {m}.shape[1]).sum()",
            "any and sum": f"torch.where({b}.any(1), {f}.sum(1), 0.0).sum()",
            "column by column": f"sum(column.sum() for column in {m}.unbind({p}))",
            "splits": f"sum(part.sum() for part in {m}.split(2, dim={p}))",
            "topk": f"{m}.long().topk({w.seq - w.shifted}, dim={p}).values.sum()",
            "sorted": f"{m}.long().sort({p}).values.sum()",
        }
    spelling = w.pick(*spellings)
    w.tag(f"count: {spelling}")
    name = w.let("count", spellings[spelling])
    return guarded(w, name) if w.chance(0.45) else name


def guarded(w: Writer, name: str) -> str:
    """A count that cannot be zero, or is changed in another way that keeps it nearly the same."""
    spellings = {
        "clamp": f"{name}.clamp(min=1)",
        "torch.clamp": f"torch.clamp({name}, min=1)",
        "clamp_min": f"{name}.clamp_min(1)",
        "maximum": f"torch.maximum({name}, torch.ones_like({name}))",
        "max with a tensor": f"torch.max({name}, torch.tensor(1, dtype={name}.dtype))",
        "eps": f"({name} + 1e-8)",
        "eps in double": f"{name}.double() + 1e-6",
        "where": f"torch.where({name} > 0, {name}, torch.ones_like({name}))",
        "double": f"{name}.double()",
        "detach": f"{name}.detach()",
        "masked_fill": f"{name}.masked_fill({name} == 0, 1)",
        "clip": f"{name}.clip(1, 1000)",
        "plus not": f"{name} + ({name} == 0)",
    }
    spelling = w.pick(*spellings)
    w.tag(f"guard: {spelling}")
    return w.let("count", spellings[spelling])


def other_divisor(w: Writer, mask: Mask) -> str:
    """A scalar by which losses are divided that is no count: a function of the mask alone."""
    b, f = mask.boolean, mask.float
    counted = w.let("kept", f"{b}.sum()")
    spellings = {
        "sqrt of a count": f"{counted}.double().sqrt()",
        "log of a count": f"torch.log1p({counted}.double())",
        "count plus ten": f"{counted} + 10",
        "count to a power": f"{counted}.double() ** 0.75",
        "exp of log": f"torch.exp(torch.log({counted}.double()))",
        "sum of squared counts": f"({counted}.double() ** 2)",
        "norm of the mask": f"{f}.norm()",
        "std of the mask": f"{f}.std() + 0.5",
        "mean and sum": f"({f}.sum() + {f}.mean())",
        "product of counts": f"{counted} * (~{b}).sum().clamp(min=1).double()",
        "ratio of counts": f"{counted} / ({b}.numel() + {counted}).double()",
    }
    if mask.ndim == 2:
        spellings |= {
            "rows that keep something": f"{b}.any({mask.position_dim}).sum()",
            "longest row": f"{b}.sum({mask.position_dim}).max()",
            "median length": f"{b}.sum(1).double().median() + 1",
            "sqrt of row counts": f"{f}.sum(1).sqrt().sum()",
            "counts weighted by counts": f"({f}.sum(1) ** 2).sum() / {f}.sum()",
            "longest times rows": f"{b}.sum(1).amax() * {b}.shape[0]",
            "positions that keep something": f"{b}.any(0).sum()",
            "norm of row counts": f"torch.linalg.vector_norm({f}.sum(1))",
            "logsumexp of row counts": f"torch.logsumexp({f}.sum(1), 0)",
        }
    spelling = w.pick(*spellings)
    w.tag(f"divisor: {spelling}")
    return w.let("divisor", spellings[spelling])
