"""Losses of single elements, [B, T] or [B], and weights of elements, in the spellings of training code."""

from __future__ import annotations

import torch
from support.loss_masks import Labels
from support.loss_trunks import Trunk
from support.loss_writer import HIDDEN, OUTPUTS, VOCAB, Writer
from torch import nn


def element_losses(w: Writer, trunk: Trunk, labels: Labels | None) -> str:
    """The name of a tensor with the `ndim` dims of the trunk: one loss for each element."""
    values = _classification(w, trunk, labels) if labels else _regression(w, trunk)
    if w.chance(0.08):
        w.tag("loss of detached confidence")
        values = w.let("values", f"(1 - torch.exp(-{values})).detach() ** 2 * {values}")
    return values


def _classification(w: Writer, trunk: Trunk, labels: Labels) -> str:
    logits, tokens = trunk.output, trunk.ndim == 2
    target = safe(w, labels)
    logp = w.once(
        f"logp {logits}",
        "logp",
        f"{w.pick('F.log_softmax', 'torch.log_softmax')}({logits}, dim=-1)",
    )
    moved, moved_logp = (
        (f"{logits}.transpose(1, 2)", f"{logp}.transpose(1, 2)") if tokens else (logits, logp)
    )
    shape = "(0, 1)" if tokens else ""
    raw, index = labels.name, f"{target}.unsqueeze(-1)"
    one_hot = f"F.one_hot({target}, {VOCAB})"
    gold = f"{logits}.gather(-1, {index}).squeeze(-1)"
    ignore = {} if labels.kind != "padded labels" else {"ignore_index": 0}
    option = "".join(f", {name}={value}" for name, value in ignore.items())
    spellings = {
        "cross_entropy none": f"F.cross_entropy({moved}, {raw}, reduction='none'{option})",
        "nll_loss none": f"F.nll_loss({moved_logp}, {raw}, reduction='none'{option})",
        "label smoothing": f"F.cross_entropy({moved}, {raw}, reduction='none', label_smoothing=0.1{option})",
        "gather": f"-{logp}.gather(-1, {index}).squeeze(-1)",
        "gather by [..., 0]": f"-torch.gather({logp}, -1, {target}[..., None])[..., 0]",
        "logsumexp minus gold": f"{logits}.logsumexp(-1) - {gold}",
        "torch.logsumexp": f"torch.logsumexp({logits}, dim=-1) - torch.take_along_dim({logits}, {index}, -1)[..., 0]",
        "one_hot times logp": f"-({one_hot} * {logp}).sum(-1)",
        "one_hot einsum": f"-torch.einsum('...v,...v->...', {one_hot}.to({logp}.dtype), {logp})",
        "smoothing by hand": f"-0.9 * {logp}.gather(-1, {index}).squeeze(-1) - 0.1 * {logp}.mean(-1)",
        "bce of one_hot": "F.binary_cross_entropy_with_logits("
        f"{logits}, {one_hot}.to({logits}.dtype), reduction='none').{w.pick('sum', 'mean')}(-1)",
        "brier": f"(torch.softmax({logits}, -1) - {one_hot}).pow(2).sum(-1)",
        "hinge": f"F.relu(1 + {logits} - {gold}.unsqueeze(-1)).mean(-1)",
        "focal": f"(1 - {logp}.gather(-1, {index}).squeeze(-1).exp()) ** 2 * F.cross_entropy("
        f"{moved}, {target}, reduction='none')",
        "log of softmax": f"-torch.log(torch.softmax({logits}, dim=-1).gather(-1, {index}).squeeze(-1) + 1e-9)",
        "soft labels": f"-({_soft(w, tokens)} * {logp}).sum(-1)",
        "kl_div none": f"F.kl_div({logp}, {_soft(w, tokens)}, reduction='none').sum(-1)",
        "in double": f"F.cross_entropy({moved}.double(), {target}, reduction='none')",
        "squared margin": f"({logits}.logsumexp(-1) - {gold}) ** 2",
    }
    if tokens:
        spellings["flat view"] = (
            f"F.cross_entropy({logits}.flatten{shape}, {raw}.flatten(), reduction='none'{option}).view({raw}.shape)"
        )
        spellings["reshape"] = (
            f"F.cross_entropy({logits}.reshape(-1, {VOCAB}), {raw}.reshape(-1), reduction='none'{option})"
            f".reshape({logits}.size(0), -1)"
        )
    spelling = w.pick(*spellings)
    w.tag(f"elements: {spelling}")
    expression = spellings[spelling]
    if "soft_labels" in expression:
        w.token_input("soft_labels", "soft labels") if tokens else w.input(
            "soft_labels", "row soft labels"
        )
    return w.let("values", expression)


def safe(w: Writer, labels: Labels) -> str:
    """Labels that can be an index: -100 made something else."""
    if not labels.ignored:
        return labels.name
    expression = w.pick(
        f"{labels.name}.clamp(min=0)",
        f"{labels.name}.masked_fill({labels.name} == -100, 0)",
        f"torch.where({labels.name} == -100, 1, {labels.name})",
        f"{labels.name} * ({labels.name} != -100)",
    )
    return w.once(f"safe {labels.name}", "target", expression)


def _soft(w: Writer, tokens: bool) -> str:
    return "soft_labels[:, 1:]" if tokens and w.shifted else "soft_labels"


def _regression(w: Writer, trunk: Trunk) -> str:
    target = w.input("target", "targets" if trunk.ndim == 2 else "row targets")
    pred = trunk.output
    over = w.pick("mean", "sum")
    spellings = {
        "mse by hand": f"(({pred} - {target}) ** 2).{over}(-1)",
        "mse_loss none": f"F.mse_loss({pred}, {target}, reduction='none').{over}(-1)",
        "l1 by hand": f"({pred} - {target}).abs().{over}(-1)",
        "smooth_l1": f"F.smooth_l1_loss({pred}, {target}, reduction='none').{over}(-1)",
        "huber": f"F.huber_loss({pred}, {target}, reduction='none', delta=0.5).{over}(-1)",
        "log cosh": f"torch.log(torch.cosh({pred} - {target})).{over}(-1)",
        "pinball": f"torch.maximum(0.7 * ({target} - {pred}), -0.3 * ({target} - {pred})).{over}(-1)",
        "bce": f"F.binary_cross_entropy_with_logits({pred}, torch.sigmoid({target}), reduction='none').{over}(-1)",
        "cosine": f"1 - F.cosine_similarity({pred}, {target}, dim=-1)",
        "norm": f"({pred} - {target}).norm(dim=-1)",
        "first output": f"({pred}[..., 0] - {target}[..., 0]) ** 2 + {pred}[..., 1:].square().{over}(-1)",
        "gaussian nll": f"(0.5 * ({pred} - {target}) ** 2 * torch.exp(-{{s}}) + 0.5 * {{s}}).{over}(-1)",
        "poisson": f"(torch.exp({pred}) - {target}.abs() * {pred}).{over}(-1)",
    }
    spelling = w.pick(*spellings)
    w.tag(f"elements: {spelling}")
    expression = spellings[spelling]
    return w.let(
        "values",
        expression.format(s=w.parameter("log_var", OUTPUTS)) if "{s}" in expression else expression,
    )


# ------------------------------------------------------------------------------------------ weights


def element_weights(w: Writer, trunk: Trunk, labels: Labels | None, ndim: int) -> str:
    """The name of a tensor that broadcasts against element losses of `ndim` dims.

    [B, T], [B, 1] or [T] for two dims, [B] for one.  It is learned, or depends on integers, positions or
    floats of the batch.
    """
    makers = [_by_row_index, _by_domain, _by_float, _by_other_rows]
    if ndim == 2:
        makers += [_by_position, _by_position, _by_length]
    if labels:
        makers += [_by_label, _by_label, _by_label, _by_frequency]
    return w.let("weight", w.pick(*makers)(w, trunk, labels, ndim))


def _by_label(w: Writer, trunk: Trunk, labels: Labels, ndim: int) -> str:
    target = safe(w, labels)
    learned = w.chance(0.3)
    w.tag("weights: learned by label" if learned else "weights: by label")
    if learned:
        w.note_weights("parameters")
    if w.chance(0.25):
        table = nn.Embedding(VOCAB, 1)
        with torch.no_grad():
            table.weight.uniform_(0.4, 2.0)
        table.weight.requires_grad_(learned)
        name = w.part("label_table", table, f"Embedding(VOCAB, 1){'' if learned else ', frozen'}")
        if learned:
            w.note_weights("parameters")
        return f"{name}({target}).squeeze(-1)"
    table = w.parameter("label_scale", VOCAB) if learned else w.buffer("label_weight", VOCAB)
    return w.pick(
        f"{table}[{target}]",
        f"{table}.gather(0, {target}.flatten()).view({target}.shape)",
        f"{table}.index_select(0, {target}.reshape(-1)).reshape({target}.shape)",
        f"F.one_hot({target}, {VOCAB}).double() @ {table}",
        f"(F.one_hot({target}, {VOCAB}) * {table}).sum(-1)",
        f"F.embedding({target}, {table}.unsqueeze(-1))[..., 0]",
        f"torch.take({table}, {target})",
        f"torch.exp(-{table})[{target}]",
        f"torch.where({target} == 3, {table}[3], {table}[0])",
    )


def _by_frequency(w: Writer, trunk: Trunk, labels: Labels, ndim: int) -> str:
    """Balanced classes: of all labels of the batch."""
    target = safe(w, labels)
    w.tag("weights: by label frequency in the batch")
    seen = w.let("seen", f"F.one_hot({target}.flatten(), {VOCAB}).sum(0).double()")
    return w.pick(
        f"1 / {seen}[{target}]",
        f"({seen}.sum() / ({VOCAB} * {seen}.clamp(min=1)))[{target}]",
        f"((1 - 0.9) / (1 - 0.9 ** {seen}.clamp(min=1)))[{target}]",
        f"torch.rsqrt({seen} + 1)[{target}]",
    )


def _by_position(w: Writer, trunk: Trunk, labels: Labels | None, ndim: int) -> str:
    length = w.seq - w.shifted
    w.tag("weights: by position")
    steps = f"torch.arange({length}, device={trunk.output}.device)"
    kind = w.pick(
        "linspace",
        "arange",
        "decay",
        "buffer",
        "learned",
        "softmax of learned",
        "cumsum of the mask",
        "outer",
    )
    if "learned" in kind:
        w.note_weights("parameters")
    if kind == "cumsum of the mask":
        mask = w.token_input("int_mask", "int mask")
        return f"1 / ({mask}.cumsum(1) + 1).double()"
    return {
        "linspace": lambda: f"torch.linspace(0.5, 2.0, {length}, dtype=torch.float64)",
        "arange": lambda: f"(1 + {steps}).double() / {length}",
        "decay": lambda: f"0.8 ** {steps}.double()",
        "buffer": lambda: w.buffer("position_weight", length),
        "learned": lambda: w.parameter("position_scale", length),
        "softmax of learned": lambda: f"torch.softmax({w.parameter('position_logits', length)}, 0)",
        "outer": lambda: f"({steps} % 2 + 1)[None, :] * torch.ones_like({trunk.output}[..., 0])",
    }[kind]()


def _by_length(w: Writer, trunk: Trunk, labels: Labels | None, ndim: int) -> str:
    lengths = w.input("lengths")
    w.tag("weights: by length")
    return w.pick(
        f"(1 / ({lengths} + 1).double())[:, None]",
        f"({lengths}.double() / {lengths}.sum())[:, None]",
        f"({lengths}.double() / {lengths}.max()).unsqueeze(1)",
        f"torch.softmax({lengths}.double(), 0).unsqueeze(1)",
        f"{lengths}.double().sqrt().view(-1, 1) + 1",
    )


def _by_row_index(w: Writer, trunk: Trunk, labels: Labels | None, ndim: int) -> str:
    w.tag("weights: by row index")
    rows = w.pick(f"{trunk.output}.shape[0]", f"{trunk.output}.size(0)", f"len({trunk.output})")
    index = f"torch.arange({rows}, device={trunk.output}.device)"
    weight = w.pick(
        f"1 / (1 + {index}).double()",
        f"({index} % 2 + 1).double()",
        f"0.9 ** {index}.double()",
        f"torch.linspace(1, 2, {rows}, dtype=torch.float64)",
        f"torch.where({index} < {rows} // 2, 1.0, 0.25).double()",
        f"{index}.flip(0).double() + 1",
    )
    return weight if ndim == 1 else f"({weight}).unsqueeze(1)"


def _by_other_rows(w: Writer, trunk: Trunk, labels: Labels | None, ndim: int) -> str:
    """Weights of a row that integers of other rows give."""
    w.tag("weights: by integers of other rows")
    lengths, domains = w.input("lengths"), w.input("domains")
    weight = w.pick(
        f"1 / ({domains}[:, None] == {domains}[None, :]).sum(1).double()",
        f"({lengths}.argsort(stable=True).argsort(stable=True) + 1).double()",
        f"1 / (1 + {lengths}.cumsum(0)).double()",
        f"({lengths} + {lengths}.roll(1, 0) + 1).double()",
        f"torch.where({lengths} >= {lengths}.double().mean(), 1.0, 0.5).double()",
        f"1 / torch.bincount({domains}, minlength=3)[{domains}].double()"
        if w.chance(0.1)
        else f"({lengths} - {lengths}.min() + 1).double()",
        f"({lengths}.double() - {lengths}.double().mean()) / ({lengths}.double().std() + 1) + 2",
        f"1 / F.one_hot({domains}, 3).sum(0)[{domains}].double()",
    )
    return weight if ndim == 1 else f"({weight})[:, None]"


def _by_domain(w: Writer, trunk: Trunk, labels: Labels | None, ndim: int) -> str:
    learned = w.chance(0.3)
    w.tag("weights: learned by domain" if learned else "weights: by domain")
    table = w.parameter("domain_scale", HIDDEN) if learned else w.buffer("domain_weight", HIDDEN)
    if learned:
        w.note_weights("parameters")
    weight = f"{table}[{w.input('domains')}]"
    return weight if ndim == 1 else f"{weight}[:, None]"


def _by_float(w: Writer, trunk: Trunk, labels: Labels | None, ndim: int) -> str:
    """Weights that the batch brings: as they are, normalised in the row, or over the batch."""
    w.note_weights("float inputs")
    if ndim == 2 and w.chance(0.5):
        weight = w.token_input("token_weight", "token floats")
        if w.chance(0.3):
            w.tag("weights: floats of the batch, by row")
            return w.pick(
                f"{weight} / {weight}.sum(1, keepdim=True)", f"torch.softmax({weight}, 1)"
            )
        w.tag("weights: floats of the batch")
        return weight
    weight = w.input("row_weight", "row floats")
    if w.chance(0.25):
        w.tag("weights: floats normalised over the batch")
        w.couple("float inputs")
        weight = w.pick(
            f"{weight} / {weight}.sum()",
            f"torch.softmax({weight}, 0)",
            f"{weight} / {weight}.max()",
            f"F.relu(({weight} - {weight}.mean()) / {weight}.std()) + 0.1",
            f"({weight}.argsort().argsort() + 1).double()",
        )
    else:
        w.tag("weights: floats of the batch")
    return weight if ndim == 1 else f"({weight})[:, None]"
