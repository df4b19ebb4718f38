"""Terms of generated losses that are sums over rows: means over what masks and weights keep, and losses of torch.nn."""

from __future__ import annotations

from support.loss_elements import element_losses, element_weights
from support.loss_masks import Labels, Mask, cast, count, guarded, other_divisor, row_mask, token_mask
from support.loss_trunks import Trunk, second_labels
from support.loss_writer import HIDDEN, VOCAB, Writer


def main_term(w: Writer, trunk: Trunk, other_labels: bool = False) -> str:
    """The name of a scalar loss."""
    labels = trunk.labels
    if labels and other_labels and w.chance(0.7):
        labels = second_labels(w, trunk)
    if w.chance(0.2):
        return _fused(w, trunk, labels)
    values = element_losses(w, trunk, labels)
    ndim = trunk.ndim
    w.weights_from = "rows"
    weight = element_weights(w, trunk, labels, ndim) if w.chance(0.35) else None
    mask = None
    if w.chance(0.8):
        mask = token_mask(w, labels) if ndim == 2 else _mask_of_rows(w, labels)
    if ndim == 2 and w.chance(0.25):
        return _by_row(w, values, weight, mask)
    if ndim == 2 and w.chance(0.2):
        values, weight, mask = _rearranged(w, values, weight, mask)
    return average(w, values, weight, mask)


def _mask_of_rows(w: Writer, labels: Labels | None) -> Mask:
    if labels and labels.ignored and w.chance(0.5):
        w.tag("mask from labels")
        mask = Mask(w.let("keep", w.pick(f"{labels.name} != -100", f"{labels.name} >= 0")), "bool", 1)
        return cast(w, mask) if w.chance(0.5) else mask
    return row_mask(w)


def _rearranged(w: Writer, values: str, weight: str | None, mask: Mask | None) -> tuple[str, str | None, Mask | None]:
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
    options = [f"{name}.sum()", f"torch.sum({name})", f"{name}.flatten().sum()", f"{name}.flatten() @ torch.ones_like({name}.flatten())",
               f"{name}.mean() * {name}.numel()", f"{name}.flatten().cumsum(0)[-1]", f"{name}.nansum()"]  # fmt: skip
    if ndim == 2:
        options += [f"{name}.sum(1).sum()", f"{name}.sum(0).sum()", f"{name}.sum(dim=(0, 1))", f"torch.einsum('bt->', {name})",
                    f"{name}.sum(-1).mean() * {name}.shape[0]", f"{name}.t().sum()"]  # fmt: skip
    return w.let("numerator", w.pick(*options))


def quotient(w: Writer, numerator: str, divisor: str) -> str:
    spellings = {
        "/": f"{numerator} / {divisor}",
        "torch.div": f"torch.div({numerator}, {divisor})",
        "times 1 over": f"{numerator} * (1 / {divisor})" if "." not in divisor else f"{numerator} / {divisor}",
        "times reciprocal": f"{numerator} * ({divisor}).double().reciprocal()",
        "times pow(-1)": f"{numerator} * ({divisor}).double().pow(-1)",
        "times ** -1": f"{numerator} * ({divisor}).double() ** -1",
        "exp of log": f"{numerator} * torch.exp(-torch.log(({divisor}).double()))",
        "true_divide": f"torch.true_divide({numerator}, {divisor})",
        "/ to dtype": f"{numerator} / ({divisor}).to({numerator}.dtype)",
        "sqrt twice": f"{numerator} / ({divisor}).double().sqrt() / ({divisor}).double().sqrt()",
        "div_ by item tensor": f"{numerator}.div({divisor})",
        "rsqrt": f"{numerator} * torch.rsqrt(({divisor}).double()) ** 2",
    }
    spelling = w.pick(*spellings)
    if spelling == "times 1 over":
        spellings[spelling] = f"{numerator} * (1 / ({divisor}).double())"
    w.tag(f"quotient: {spelling}")
    return w.let("mean", spellings[spelling])


def average(w: Writer, values: str, weight: str | None, mask: Mask | None) -> str:
    """A mean of the values over what the mask keeps, perhaps weighted, in some spelling."""
    ndim = mask.ndim if mask else 2
    weighted = w.let("weighted", w.pick(f"{values} * {weight}", f"{weight} * {values}")) if weight else values
    if mask is None:
        return _unmasked(w, values, weighted, weight)
    kept = masked(w, weighted, mask)
    form = w.pick("count", "count", "count", "count", "weights", "means", "inside", "other", "sum", "where")
    if form == "weights" and weight:
        w.tag("divided by the sum of weights")
        w.couple(w.weights_from)
        summed = w.let("weights", f"({weight} * {mask.float}).sum()")
        return quotient(w, total(w, kept, ndim), guarded(w, summed) if w.chance(0.3) else summed)
    if form == "means":
        w.tag("mean over mean of the mask")
        return quotient(w, w.let("numerator", f"({kept}).mean()"), w.let("share", f"{mask.float}.mean()"))
    if form == "inside":
        w.tag("divided element by element")
        kept, divisor = w.let("kept", kept), count(w, mask)
        return w.let("mean", w.pick(f"({kept} / {divisor}).sum()", f"({kept} * ({mask.float} / {divisor})).sum()",
                                    f"torch.sum({kept}.div({divisor}))"))  # fmt: skip
    if form == "other":
        return quotient(w, total(w, kept, ndim), other_divisor(w, mask))
    if form == "sum":
        w.tag("no divisor")
        return total(w, kept, ndim)
    if form == "where":
        w.tag("where on a count")
        divisor, summed = count(w, mask), total(w, kept, ndim)
        return w.let("mean", w.pick(
            f"torch.where({divisor} > 0, {summed} / {divisor}, 0.0 * {summed})",
            f"torch.where({divisor} > 6, {summed} / {divisor}, {summed} / 6)",
            f"{summed} / torch.where({divisor} > 0, {divisor}, 1)"))  # fmt: skip
    return quotient(w, total(w, kept, ndim), count(w, mask))


def _unmasked(w: Writer, values: str, weighted: str, weight: str | None) -> str:
    w.tag("no mask")
    if weight and w.chance(0.4):
        w.tag("divided by the sum of weights")
        w.couple(w.weights_from)
        return quotient(w, w.let("numerator", f"{weighted}.sum()"), w.let("weights", f"{weight}.expand_as({values}).sum()"))
    return w.let("mean", w.pick(
        f"{weighted}.mean()", f"torch.mean({weighted})", f"{weighted}.mean(0).mean()", f"{weighted}.flatten().mean(0)",
        f"{weighted}.sum() / {weighted}.numel()", f"{weighted}.sum() / {weighted}.shape[0]", f"{weighted}.sum() / len({weighted})",
        f"{weighted}.sum()", f"{weighted}.sum() / 10"))  # fmt: skip


def _by_row(w: Writer, values: str, weight: str | None, mask: Mask | None) -> str:
    """A loss for each row, and a mean of these."""
    w.tag("means of rows")
    weighted = w.let("weighted", f"{values} * {weight}") if weight else values
    if mask is None:
        rows = w.let("row_losses", w.pick(f"{weighted}.mean(1)", f"{weighted}.sum(-1)", f"{weighted}.logsumexp(1)", f"{weighted}.max(1).values"))
        return average_rows(w, rows, None)
    kept = w.let("kept", masked(w, weighted, mask))
    counts = w.let("counts", w.pick(f"{mask.name}.sum(1)", f"{mask.float}.sum(dim=-1)", f"torch.count_nonzero({mask.name}, dim=1)",
                                    f"{mask.boolean}.sum(-1).clamp(min=1)", f"{mask.float}.sum(1).clamp_min(1.0)"))  # fmt: skip
    rows = w.let("row_losses", w.pick(f"{kept}.sum(1) / {counts}", f"{kept}.sum(-1) * (1 / {counts}.double())", f"({kept} / {counts}[:, None]).sum(1)",
                                      f"{kept}.sum(1)", f"{kept}.sum(1) / {counts}.double().sqrt()"))  # fmt: skip
    return average_rows(w, rows, counts)


def average_rows(w: Writer, rows: str, counts: str | None) -> str:
    """A scalar from one loss a row; `counts` are integers of rows."""
    form = w.pick("mean", "mean", "mask", "weights", "counts", "nonempty")
    if form == "mask":
        return average(w, rows, None, row_mask(w))
    if form == "counts" and counts:
        w.tag("rows weighted by their counts")
        share = w.let("share", f"{counts} / {counts}.sum()")
        return w.let("mean", w.pick(f"({rows} * {share}).sum()", f"{rows} @ {share}.double()", f"torch.dot({rows}, {share}.double())"))
    if form == "nonempty" and counts:
        w.tag("mean of rows that are not empty")
        full = Mask(w.let("full", f"{counts} > {w.pick(0, 1)}"), "bool", 1)
        return quotient(w, total(w, masked(w, rows, full), 1), count(w, full))
    if form == "weights":
        w.weights_from = "rows"
        weight = w.let("weight", _row_weight(w, rows))
        return average(w, rows, weight, None)
    return w.let("mean", w.pick(f"{rows}.mean()", f"{rows}.sum() / {rows}.shape[0]", f"{rows}.sum() / len({rows})", f"torch.stack(list({rows}.split(1))).mean()"
                                if w.chance(0.05) else f"{rows}.mean(0)"))  # fmt: skip


def _row_weight(w: Writer, rows: str) -> str:
    index = f"torch.arange({rows}.shape[0])"
    w.tag("weights: by row index" if (by_index := w.chance(0.5)) else "weights: by domain")
    return f"1 / (1 + {index}).double()" if by_index else f"{w.buffer('domain_weight', HIDDEN)}[{w.input('domains')}]"


# ----------------------------------------------------------------------------------------------------- losses of torch.nn


def _fused(w: Writer, trunk: Trunk, labels: Labels | None) -> str:
    """A loss of torch.nn.functional that reduces by itself."""
    w.tag("fused loss")
    if labels is None:
        return _fused_regression(w, trunk)
    tokens = trunk.ndim == 2
    logits = w.pick(f"{trunk.output}.flatten(0, 1)", f"{trunk.output}.reshape(-1, {VOCAB})") if tokens else trunk.output
    target = w.pick(f"{labels.name}.flatten()", f"{labels.name}.reshape(-1)") if tokens else labels.name
    if tokens and w.chance(0.25):
        logits, target = f"{trunk.output}.transpose(1, 2)", labels.name
    options = []
    if labels.kind == "padded labels":
        options.append("ignore_index=0")
    elif not labels.ignored and w.chance(0.3):
        options.append(f"ignore_index={w.rng.randrange(VOCAB)}")
        w.tag("ignore_index is a label")
    weighted = w.chance(0.4)
    if weighted:
        options.append(f"weight={w.buffer('class_weight', VOCAB)}")
    smoothing = w.chance(0.25)
    reduction = w.pick("mean", "mean", "mean", "sum")
    if reduction == "sum":
        options.append("reduction='sum'")
    if not smoothing and w.chance(0.3):
        expression = f"F.nll_loss({', '.join([f'F.log_softmax({logits}, dim={w_dim(logits)})', target, *options])})"
    else:
        options += ["label_smoothing=0.1"] if smoothing else []
        expression = f"F.cross_entropy({', '.join([logits, target, *options])})"
    w.tag(f"fused: {expression.split('(')[0]} {reduction}", *(["class weights"] if weighted else []), *(["label smoothing"] if smoothing else []))
    if reduction == "sum":
        target = labels.name
        counted = w.let("valid", f"({target} != {-100 if labels.ignored else 0})")
        return quotient(w, w.let("summed", expression), count(w, Mask(counted, "bool", trunk.ndim)))
    return w.let("mean", expression)


def w_dim(logits: str) -> int:
    """The dim of the vocabulary in logits as cross_entropy reads them."""
    return 1


def _fused_regression(w: Writer, trunk: Trunk) -> str:
    target = w.input("target", "targets" if trunk.ndim == 2 else "row targets")
    pred = trunk.output
    expression = w.pick(
        f"F.mse_loss({pred}, {target})",
        f"F.l1_loss({pred}, {target})",
        f"F.smooth_l1_loss({pred}, {target})",
        f"F.huber_loss({pred}, {target}, delta=0.7)",
        f"F.mse_loss({pred}, {target}, reduction='sum') / {pred}.size(0)",
        f"F.mse_loss({pred}, {target}, reduction='sum')",
        f"F.binary_cross_entropy_with_logits({pred}, torch.sigmoid({target}))",
        f"F.kl_div(F.log_softmax({pred}, -1), torch.softmax({target}, -1), reduction='batchmean')",
        f"F.kl_div(F.log_softmax({pred}, -1), F.log_softmax({target}, -1), log_target=True, reduction='mean')",
        f"F.poisson_nll_loss({pred}, {target}.abs())",
        f"F.gaussian_nll_loss({pred}, {target}, torch.ones_like({pred}) + {target} ** 2)",
        f"F.soft_margin_loss({pred}, {target}.sign())",
        f"(1 - F.cosine_similarity({pred}, {target}, dim=-1)).mean()",
        f"F.multilabel_soft_margin_loss({pred}.flatten(0, -2), ({target} > 0).double().flatten(0, -2))"
        if trunk.ndim == 2
        else f"F.multilabel_soft_margin_loss({pred}, ({target} > 0).double())",
    )
    w.tag(f"fused: {expression.split('(')[0]}")
    return w.let("mean", expression)


# ------------------------------------------------------------------------------------------------------- auxiliary terms


def auxiliary_term(w: Writer, trunk: Trunk) -> str:
    """A regulariser: of logits, activations or parameters."""
    output, hidden = trunk.output, trunk.hidden
    by_element = {
        "z-loss": f"{output}.logsumexp(-1) ** 2",
        "z-loss by pow": f"torch.logsumexp({output}, dim=-1).pow(2)",
        "entropy": f"-(torch.softmax({output}, -1) * F.log_softmax({output}, -1)).sum(-1)",
        "KL to uniform": f"-F.log_softmax({output}, -1).mean(-1)",
        "squared logits": f"{output}.pow(2).mean(-1)",
        "largest logit": f"{output}.max(-1).values ** 2",
        "variance of logits": f"{output}.var(-1)",
        "softcap": f"torch.tanh({output} / 3).square().sum(-1)",
    }
    by_hidden = {
        "L1 of activations": f"{hidden}.abs()",
        "L2 of activations": f"{hidden}.pow(2)",
        "norms of activations": f"{hidden}.norm(dim=-1)",
        "smoothness": f"({hidden}[:, 1:] - {hidden}[:, :-1]) ** 2",
        "cosine of neighbours": f"F.cosine_similarity({hidden}[:, 1:], {hidden}[:, :-1], dim=-1)",
    }
    of_parameters = {
        "L2 of parameters": "sum(p.pow(2).sum() for p in self.parameters())",
        "L1 of parameters": "sum(p.abs().sum() for p in self.parameters())",
        "norm of parameters": "torch.stack([p.norm() for p in self.parameters()]).norm()",
        "orthogonality": "sum((p.t() @ p - torch.eye(p.shape[1], dtype=p.dtype)).square().sum()"
        " for p in self.parameters() if p.dim() == 2)",
    }
    kind = w.pick("element", "element", "element", "hidden", "parameters")
    if kind == "parameters":
        name = w.pick(*of_parameters)
        w.tag(f"auxiliary: {name}")
        return w.let("penalty", f"0.01 * {of_parameters[name]}")
    if kind == "hidden":
        name = w.pick(*by_hidden)
        w.tag(f"auxiliary: {name}")
        return w.let("penalty", f"({by_hidden[name]}).mean()")
    name = w.pick(*by_element)
    w.tag(f"auxiliary: {name}")
    term = w.let("term", by_element[name])
    if w.chance(0.5):
        return w.let("penalty", w.pick(f"{term}.mean()", f"{term}.sum() / {term}.numel()"))
    w.tag("auxiliary term with its own count")
    return average(w, term, None, token_mask(w, trunk.labels) if trunk.ndim == 2 else _mask_of_rows(w, trunk.labels))
