"""Means over groups of elements (positions, labels, domains, outputs), and means that skip NaN."""

from __future__ import annotations

from support.loss_elements import element_losses, safe
from support.loss_masks import Labels, token_mask
from support.loss_trunks import Trunk
from support.loss_writer import OUTPUTS, VOCAB, Writer


def grouped_term(w: Writer, trunk: Trunk, labels: Labels | None) -> str:
    """A scalar loss that is put together from several means, each with its own count."""
    makers = [_by_domain, _by_domain_index]
    if trunk.ndim == 2:
        makers += [_nan_mean, _step_by_step]
    if labels:
        makers += [_by_label]
    if labels and trunk.ndim == 2:
        makers += [_positions_in_a_loop, _vocabulary_masked, _two_horizons, _several_masks]
    if not labels and trunk.ndim == 2:
        makers += [_outputs_masked, _both_sides_masked]
    maker = w.pick(*makers)
    w.tag(f"groups: {maker.__name__.strip('_').replace('_', ' ')}")
    return maker(w, trunk, labels)


def _rows(w: Writer, trunk: Trunk, labels: Labels | None) -> str:
    values = element_losses(w, trunk, labels)
    return (
        values
        if trunk.ndim == 1
        else w.let("row_losses", f"{values}.{w.pick('mean(1)', 'sum(-1)')}")
    )


def _mean_of_groups(w: Writer, sums: str, counts: str) -> str:
    """A scalar from sums and counts of groups, [G] each; groups may be empty."""
    means = w.let(
        "means",
        w.pick(f"{sums} / {counts}.clamp(min=1)", f"{sums} * (1 / ({counts} + 1).double())"),
    )
    form = w.pick("mean", "sum", "nonempty", "worst", "learned")
    if form == "nonempty":
        return w.let("mean", f"{means}.sum() / ({counts} > 0).sum()")
    if form == "worst":
        w.tag("worst group")
        w.couple("parameters")
        return w.let(
            "mean", w.pick(f"{means}.max() + 0.1 * {means}.mean()", f"torch.logsumexp({means}, 0)")
        )
    if form == "learned":
        w.tag("learned weights of groups")
        return w.let(
            "mean",
            f"(torch.softmax({w.parameter('group_scale', 3)}, 0) * {means}[:3]).sum() + 0.1 * {means}.sum()",
        )
    return w.let("mean", f"{means}.{form}()")


def _by_domain(w: Writer, trunk: Trunk, labels: Labels | None) -> str:
    rows, domains = _rows(w, trunk, labels), w.input("domains")
    of_domain = w.let(
        "of_domain", f"F.one_hot({domains}, 3)" + w.pick(".double()", ".to(torch.float64)")
    )
    return _mean_of_groups(
        w, w.let("sums", f"{of_domain}.t() @ {rows}"), w.let("counts", f"{of_domain}.sum(0)")
    )


def _by_domain_index(w: Writer, trunk: Trunk, labels: Labels | None) -> str:
    rows, domains = _rows(w, trunk, labels), w.input("domains")
    zeros = w.let("zeros", f"torch.zeros(3, dtype={rows}.dtype, device={rows}.device)")
    adding = w.pick("{0}.index_add(0, {1}, {2})", "{0}.scatter_add(0, {1}, {2})")
    sums = w.let("sums", adding.format(zeros, domains, rows))
    return _mean_of_groups(
        w, sums, w.let("counts", adding.format(zeros, domains, f"torch.ones_like({rows})"))
    )


def _by_label(w: Writer, trunk: Trunk, labels: Labels) -> str:
    """The macro average: a mean for each label, then the mean of these."""
    values, target = element_losses(w, trunk, labels), safe(w, labels)
    if w.chance(0.5):
        means = f"({values} * ({target} == label)).sum() / ({target} == label).sum().clamp(min=1) for label in range({VOCAB})"
        return w.let("mean", w.pick(f"sum({means}) / {VOCAB}", f"torch.stack([{means}]).mean()"))
    of_label = w.let("of_label", f"F.one_hot({target}.flatten(), {VOCAB}).double()")
    sums = w.let(
        "sums",
        w.pick(
            f"{values}.flatten() @ {of_label}",
            f"({of_label} * {values}.flatten().unsqueeze(-1)).sum(0)",
        ),
    )
    return _mean_of_groups(w, sums, w.let("counts", f"{of_label}.sum(0)"))


def _nan_mean(w: Writer, trunk: Trunk, labels: Labels | None) -> str:
    values, mask = element_losses(w, trunk, labels), token_mask(w, labels)
    known = w.let("known", f"torch.where({mask.boolean}, {values}, float('nan'))")
    return w.let(
        "mean",
        w.pick(
            f"{known}.nanmean()",
            f"torch.nanmean({known})",
            f"{known}.nanmean(1).nanmean()",
            f"{known}.nansum() / (~{known}.isnan()).sum()",
        ),
    )


def _step_by_step(w: Writer, trunk: Trunk, labels: Labels | None) -> str:
    """A mean for each position."""
    values, mask = element_losses(w, trunk, labels), token_mask(w, labels)
    sums = w.let("sums", f"({values} * {mask.float}).sum(0)")
    means = w.let("means", f"{sums} / {mask.float}.sum(0).clamp(min=1)")
    return w.let(
        "mean",
        w.pick(f"{means}.mean()", f"{means}.sum()", f"{means}[-1] + 0.5 * {means}[:-1].mean()"),
    )


def _positions_in_a_loop(w: Writer, trunk: Trunk, labels: Labels) -> str:
    steps = w.seq - w.shifted
    option = ", ignore_index=0" if labels.kind == "padded labels" else ""
    counted = f"F.cross_entropy({trunk.output}[:, t], {labels.name}[:, t]{option}, reduction='sum')"
    if not option and not labels.ignored and w.chance(0.5):
        counted = counted.replace("'sum'", "'mean'")
    return w.let("mean", f"sum({counted} for t in range({steps})) / {steps}")


def _vocabulary_masked(w: Writer, trunk: Trunk, labels: Labels) -> str:
    mask, target = token_mask(w, labels), safe(w, labels)
    logp = w.let("logp", f"torch.log_softmax({trunk.output}, -1)")
    return w.let(
        "mean",
        f"-(F.one_hot({target}, {VOCAB}) * {mask.float}[..., None] * {logp}).sum() / {mask.name}.sum()",
    )


def _two_horizons(w: Writer, trunk: Trunk, labels: Labels) -> str:
    """The next label and the one after it, each with its own count."""
    output, option = trunk.output, ", ignore_index=0" if labels.kind == "padded labels" else ""
    near = f"F.cross_entropy({output}.flatten(0, 1), {labels.name}.flatten(){option})"
    far = f"F.cross_entropy({output}[:, :-1].flatten(0, 1), {labels.name}[:, 1:].flatten(){option})"
    return w.let("mean", f"{near} + 0.5 * {far}")


def _several_masks(w: Writer, trunk: Trunk, labels: Labels) -> str:
    """Prompt and answer: one loss, two masks, two counts."""
    values, first = element_losses(w, trunk, labels), token_mask(w, labels)
    other = w.let("other", f"~{first.boolean}")
    parts = [
        f"({values} * {mask}).sum() / {mask}.sum().clamp(min=1)" for mask in (first.boolean, other)
    ]
    return w.let("mean", f"{parts[0]} + 0.1 * {parts[1]}")


def _outputs_masked(w: Writer, trunk: Trunk, labels: None) -> str:
    """A mask of tokens spread over outputs, which then count one by one."""
    mask, target = token_mask(w, None), w.input("target", "targets")
    spread = w.let("spread", f"{mask.name}.unsqueeze(-1).expand_as({trunk.output})")
    errors = w.let("errors", f"({trunk.output} - {target}) ** 2")
    divisor = w.pick(
        f"{spread}.sum()",
        f"({mask.name}.sum() * {OUTPUTS})",
        f"{spread}.double().sum((1, 2)).sum()",
        f"torch.count_nonzero({spread})",
    )
    return w.let("mean", f"({errors} * {spread}).sum() / {divisor}")


def _both_sides_masked(w: Writer, trunk: Trunk, labels: None) -> str:
    mask, target = token_mask(w, None), w.input("target", "targets")
    spread = f"{mask.float}[..., None]"
    loss = w.pick("F.mse_loss", "F.smooth_l1_loss", "F.l1_loss")
    return w.let(
        "mean",
        f"{loss}({trunk.output} * {spread}, {target} * {spread}, reduction='sum') / {mask.name}.sum().clamp(min=1)",
    )
