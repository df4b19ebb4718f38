"""Terms of generated losses: masked and weighted means of element losses, in many spellings."""

from __future__ import annotations

from support.loss_elements import element_losses, element_weights
from support.loss_masks import (
    Labels,
    Mask,
    cast,
    count,
    guarded,
    other_divisor,
    row_mask,
    token_mask,
)
from support.loss_trunks import Trunk
from support.loss_writer import HIDDEN, Writer


def average_term(w: Writer, trunk: Trunk, labels: Labels | None) -> str:
    """A scalar loss: losses of elements, perhaps weighted and masked, reduced."""
    values, ndim = element_losses(w, trunk, labels), trunk.ndim
    w.weights_from = "rows"
    weight = element_weights(w, trunk, labels, ndim) if w.chance(0.35) else None
    mask = mask_for(w, trunk, labels) if w.chance(0.8) else None
    if ndim == 2 and w.chance(0.25):
        return _by_row(w, values, weight, mask)
    if ndim == 2 and w.chance(0.2):
        values, weight, mask = _rearranged(w, values, weight, mask)
    return average(w, values, weight, mask)


def mask_for(w: Writer, trunk: Trunk, labels: Labels | None) -> Mask:
    """A mask of the elements that the trunk has."""
    if trunk.ndim == 2:
        return token_mask(w, labels)
    if labels and labels.ignored and w.chance(0.5):
        w.tag("mask from labels")
        mask = Mask(
            w.let("keep", w.pick(f"{labels.name} != -100", f"{labels.name} >= 0")), "bool", 1
        )
        return cast(w, mask) if w.chance(0.5) else mask
    return row_mask(w)


def _rearranged(
    w: Writer, values: str, weight: str | None, mask: Mask | None
) -> tuple[str, str | None, Mask | None]:
    """The same elements, positions first or all in one dim."""
    if weight:
        weight = w.let("weight", f"{weight}.expand_as({values})")
    endings = {
        "positions first": (".transpose(0, 1)", ".t()", ".t().contiguous()", ".permute(1, 0)"),
        "flat": (".flatten()", ".reshape(-1)", ".t().reshape(-1)", ".contiguous().view(-1)"),
    }
    layout = w.pick(*endings)
    ending, ndim = w.pick(*endings[layout]), 2 if layout == "positions first" else 1
    w.tag(layout)
    values = w.let("values", values + ending)
    weight = weight and w.let("weight", weight + ending)
    return values, weight, mask and Mask(w.let("m", mask.name + ending), mask.kind, ndim, 0)


def masked(w: Writer, values: str, mask: Mask) -> str:
    """Values where the mask is set, else zero."""
    return w.pick(
        f"{values} * {mask.name}",
        f"{values} * {mask.float}",
        f"{mask.float} * {values}",
        f"{values}.masked_fill(~{mask.boolean}, 0.0)",
        f"torch.where({mask.boolean}, {values}, 0.0)",
        f"torch.where({mask.boolean}, {values}, torch.zeros_like({values}))",
        f"{values}.mul({mask.float})",
    )


def total(w: Writer, expression: str, ndim: int) -> str:
    """The sum of all elements."""
    name = w.let("kept", expression)
    options = [
        f"{name}.sum()",
        f"torch.sum({name})",
        f"{name}.flatten().sum()",
        f"{name}.flatten() @ torch.ones_like({name}.flatten())",
        f"{name}.mean() * {name}.numel()",
        f"{name}.flatten().cumsum(0)[-1]",
        f"{name}.nansum()",
    ]
    if ndim == 2:
        options += [
            f"{name}.sum(1).sum()",
            f"{name}.sum(0).sum()",
            f"{name}.sum(dim=(0, 1))",
            f"torch.einsum('bt->', {name})",
            f"{name}.sum(-1).mean() * {name}.shape[0]",
            f"{name}.t().sum()",
        ]
    return w.let("numerator", w.pick(*options))


def quotient(w: Writer, numerator: str, divisor: str) -> str:
    spellings = {
        "/": f"{numerator} / {divisor}",
        "torch.div": f"torch.div({numerator}, {divisor})",
        "times 1 over": f"{numerator} * (1 / ({divisor}).double())",
        "times reciprocal": f"{numerator} * ({divisor}).double().reciprocal()",
        "times pow(-1)": f"{numerator} * ({divisor}).double().pow(-1)",
        "times ** -1": f"{numerator} * ({divisor}).double() ** -1",
        "exp of log": f"{numerator} * torch.exp(-torch.log(({divisor}).double()))",
        "true_divide": f"torch.true_divide({numerator}, {divisor})",
        "/ to dtype": f"{numerator} / ({divisor}).to({numerator}.dtype)",
        "sqrt twice": f"{numerator} / ({divisor}).double().sqrt() / ({divisor}).double().sqrt()",
        "div": f"{numerator}.div({divisor})",
        "rsqrt": f"{numerator} * torch.rsqrt(({divisor}).double()) ** 2",
    }
    spelling = w.pick(*spellings)
    w.tag(f"quotient: {spelling}")
    return w.let("mean", spellings[spelling])


def average(w: Writer, values: str, weight: str | None, mask: Mask | None) -> str:
    """A mean of the values over what the mask keeps, perhaps weighted, in some spelling."""
    ndim = mask.ndim if mask else 2
    weighted = (
        w.let("weighted", w.pick(f"{values} * {weight}", f"{weight} * {values}"))
        if weight
        else values
    )
    if mask is None:
        return _unmasked(w, values, weighted, weight)
    kept = masked(w, weighted, mask)
    form = w.pick(
        "count", "count", "count", "count", "weights", "means", "inside", "other", "sum", "where"
    )
    if form == "weights" and weight:
        w.tag("divided by the sum of weights")
        w.couple(w.weights_from)
        summed = w.let("weights", f"({weight} * {mask.float}).sum()")
        return quotient(w, total(w, kept, ndim), guarded(w, summed) if w.chance(0.3) else summed)
    if form == "means":
        w.tag("mean over mean of the mask")
        return quotient(
            w, w.let("numerator", f"({kept}).mean()"), w.let("share", f"{mask.float}.mean()")
        )
    if form == "inside":
        w.tag("divided element by element")
        kept, divisor = w.let("kept", kept), count(w, mask)
        return w.let(
            "mean",
            w.pick(
                f"({kept} / {divisor}).sum()",
                f"({kept} * ({mask.float} / {divisor})).sum()",
                f"torch.sum({kept}.div({divisor}))",
                f"(F.normalize({mask.float}.flatten(), p=1, dim=0) * {kept}.flatten()).sum()",
                f"({mask.float}.flatten() / {divisor}) @ {kept}.reshape(-1)",
                f"({kept}.reshape(-1) * torch.softmax({mask.float}.reshape(-1), 0)).sum()",
                f"torch.einsum('i,i->', {mask.float}.flatten() / {divisor}, {kept}.flatten())",
            ),
        )
    if form == "other":
        return quotient(w, total(w, kept, ndim), other_divisor(w, mask))
    if form == "sum":
        w.tag("no divisor")
        return total(w, kept, ndim)
    if form == "where":
        w.tag("where on a count")
        divisor, summed = count(w, mask), total(w, kept, ndim)
        return w.let(
            "mean",
            w.pick(
                f"torch.where({divisor} > 0, {summed} / {divisor}, 0.0 * {summed})",
                f"torch.where({divisor} > 6, {summed} / {divisor}, {summed} / 6)",
                f"{summed} / torch.where({divisor} > 0, {divisor}, 1)",
            ),
        )
    return quotient(w, total(w, kept, ndim), count(w, mask))


def _unmasked(w: Writer, values: str, weighted: str, weight: str | None) -> str:
    w.tag("no mask")
    if weight and w.chance(0.4):
        w.tag("divided by the sum of weights")
        w.couple(w.weights_from)
        return quotient(
            w,
            w.let("numerator", f"{weighted}.sum()"),
            w.let("weights", f"{weight}.expand_as({values}).sum()"),
        )
    rows = w.pick(f"{weighted}.shape[0]", f"{weighted}.size(0)", f"len({weighted})")
    spellings = {
        "mean": (
            f"{weighted}.mean()",
            f"torch.mean({weighted})",
            f"{weighted}.mean(0).mean()",
            f"{weighted}.flatten().mean(0)",
        ),
        "by numel": (
            f"{weighted}.sum() / {weighted}.numel()",
            f"({weighted} / {weighted}.numel()).sum()",
        ),
        "by rows": (
            f"{weighted}.sum() / {rows}",
            f"{weighted}.sum() * (1.0 / {rows})",
            f"{weighted}.sum(0).sum() / {rows}",
        ),
        "by a function of rows": (
            f"{weighted}.sum() / {rows} ** 0.5",
            f"{weighted}.sum() / ({rows} + 1)",
            f"{weighted}.sum() / {rows} ** 2",
            f"{weighted}.mean() * {rows}",
            f"{weighted}.mean() / {rows}",
        ),
        "no divisor": (f"{weighted}.sum()", f"{weighted}.sum() / 10", f"torch.sum({weighted})"),
    }
    spelling = w.pick("mean", *spellings)
    w.tag(f"divisor of shapes: {spelling}")
    return w.let("mean", w.pick(*spellings[spelling]))


def _by_row(w: Writer, values: str, weight: str | None, mask: Mask | None) -> str:
    """A loss for each row, and a mean of these."""
    w.tag("means of rows")
    weighted = w.let("weighted", f"{values} * {weight}") if weight else values
    if mask is None:
        reduced = w.pick(
            "mean(1)", "sum(-1)", "logsumexp(1)", "max(1).values", "norm(dim=1)", "median(1).values"
        )
        return average_rows(w, w.let("row_losses", f"{weighted}.{reduced}"), None)
    kept = w.let("kept", masked(w, weighted, mask))
    counts = w.let(
        "counts",
        w.pick(
            f"{mask.name}.sum(1)",
            f"{mask.float}.sum(dim=-1)",
            f"torch.count_nonzero({mask.name}, dim=1)",
            f"{mask.boolean}.sum(-1).clamp(min=1)",
            f"{mask.float}.sum(1).clamp_min(1.0)",
            f"{mask.float}.cumsum(1)[:, -1]",
        ),
    )
    rows = w.let(
        "row_losses",
        w.pick(
            f"{kept}.sum(1) / {counts}",
            f"{kept}.sum(-1) * (1 / {counts}.double())",
            f"({kept} / {counts}[:, None]).sum(1)",
            f"{kept}.sum(1)",
            f"{kept}.sum(1) / {counts}.double().sqrt()",
            f"torch.exp({kept}.sum(1) / {counts})",
        ),
    )
    return average_rows(w, rows, counts)


def average_rows(w: Writer, rows: str, counts: str | None) -> str:
    """A scalar from one loss a row; `counts` are integers of rows."""
    form = w.pick("mean", "mean", "mask", "weights", *(("counts", "nonempty") if counts else ()))
    if form == "mask":
        return average(w, rows, None, row_mask(w))
    if form == "counts":
        w.tag("rows weighted by their counts")
        share = w.let("share", f"{counts} / {counts}.sum()")
        return w.let(
            "mean",
            w.pick(
                f"({rows} * {share}).sum()",
                f"{rows} @ {share}.double()",
                f"torch.dot({rows}, {share}.double())",
            ),
        )
    if form == "nonempty":
        w.tag("mean of rows that are not empty")
        full = Mask(w.let("full", f"{counts} > {w.pick(0, 1)}"), "bool", 1)
        return quotient(w, total(w, masked(w, rows, full), 1), count(w, full))
    if form == "weights":
        w.weights_from = "rows"
        return average(w, rows, w.let("weight", _row_weight(w, rows)), None)
    return w.let(
        "mean",
        w.pick(
            f"{rows}.mean()",
            f"{rows}.mean(0)",
            f"{rows}.sum() / {rows}.shape[0]",
            f"{rows}.sum() / len({rows})",
        ),
    )


def _row_weight(w: Writer, rows: str) -> str:
    if w.chance(0.5):
        w.tag("weights: by row index")
        return f"1 / (1 + torch.arange({rows}.shape[0])).double()"
    w.tag("weights: by domain")
    return f"{w.buffer('domain_weight', HIDDEN)}[{w.input('domains')}]"
