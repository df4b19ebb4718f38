"""Terms of generated losses: losses of torch.nn.functional that reduce by themselves, and regularisers."""

from __future__ import annotations

import torch
from support.loss_elements import safe
from support.loss_masks import Labels, Mask, count
from support.loss_terms import average, mask_for, quotient
from support.loss_trunks import Trunk
from support.loss_writer import VOCAB, Writer
from torch import nn


def fused_term(w: Writer, trunk: Trunk, labels: Labels | None) -> str:
    """A loss of torch.nn.functional that reduces by itself."""
    w.tag("fused loss")
    if labels is None:
        return _regression(w, trunk)
    if w.chance(0.2):
        return _other_classification(w, trunk, labels)
    if w.chance(0.15):
        return _criterion(w, trunk, labels)
    return _cross_entropy(w, trunk, labels)


def _cross_entropy(w: Writer, trunk: Trunk, labels: Labels) -> str:
    logits, target = _as_cross_entropy_reads(w, trunk, labels)
    options = []
    if labels.kind == "padded labels":
        options.append("ignore_index=0")
    elif not labels.ignored and w.chance(0.3):
        options.append(f"ignore_index={w.rng.randrange(VOCAB)}")
        w.tag("ignore_index is a label")
    if w.chance(0.25):
        options.append(f"weight={w.buffer('class_weight', VOCAB)}")
        w.tag("class weights")
    if summed := w.chance(0.25):
        options.append("reduction='sum'")
    if smoothed := w.chance(0.25):
        options.append("label_smoothing=0.1")
        w.tag("label smoothing")
    name = "F.nll_loss" if not smoothed and w.chance(0.3) else "F.cross_entropy"
    scores = f"F.log_softmax({logits}, dim=1)" if name == "F.nll_loss" else logits
    w.tag(f"fused: {name} {'sum' if summed else 'mean'}")
    loss = w.let("fused", f"{name}({', '.join([scores, target, *options])})")
    if not summed:
        return loss
    keep = w.let("keep", f"{labels.name} != {-100 if labels.ignored else 0}")
    return quotient(w, loss, count(w, Mask(keep, "bool", trunk.ndim)))


def _criterion(w: Writer, trunk: Trunk, labels: Labels) -> str:
    """A loss that is a submodule."""
    w.tag("fused: nn.CrossEntropyLoss")
    logits, target = _as_cross_entropy_reads(w, trunk, labels)
    options = {
        "ignore_index": 0 if labels.kind == "padded labels" else -100,
        "label_smoothing": w.pick(0.0, 0.1),
        "weight": 0.4 + torch.rand(VOCAB, dtype=torch.float64) if w.chance(0.3) else None,
    }
    of = ", ".join(f"{name}={value}" for name, value in options.items() if name != "weight")
    if options["weight"] is not None:
        of += ", weight=buffer[7]"
    criterion = w.part("criterion", nn.CrossEntropyLoss(**options), f"CrossEntropyLoss({of})")
    return w.let("fused", f"{criterion}({logits}, {target})")


def _as_cross_entropy_reads(w: Writer, trunk: Trunk, labels: Labels) -> tuple[str, str]:
    """Logits and labels, the vocabulary in dim 1."""
    output, name = trunk.output, labels.name
    if trunk.ndim == 1:
        return output, name
    return w.pick(
        (f"{output}.flatten(0, 1)", f"{name}.flatten()"),
        (f"{output}.reshape(-1, {VOCAB})", f"{name}.reshape(-1)"),
        (f"{output}.contiguous().view(-1, {output}.size(-1))", f"{name}.contiguous().view(-1)"),
        (f"{output}.transpose(1, 2)", name),
    )


def _other_classification(w: Writer, trunk: Trunk, labels: Labels) -> str:
    tokens, output = trunk.ndim == 2, trunk.output
    target = safe(w, labels)
    flat = f"{output}.flatten(0, 1)" if tokens else output
    flat_target = f"{target}.flatten()" if tokens else target
    one_hot = f"F.one_hot({target}, {VOCAB}).to({output}.dtype)"
    soft = w.input("soft_labels", "soft labels" if tokens else "row soft labels")
    soft = f"{soft}[:, 1:]" if w.shifted else soft
    moved, moved_soft = (
        (f"{output}.transpose(1, 2)", f"{soft}.transpose(1, 2)") if tokens else (output, soft)
    )
    spellings = {
        "cross_entropy of soft labels": lambda: f"F.cross_entropy({moved}, {moved_soft})",
        "multi_margin_loss": lambda: f"F.multi_margin_loss({flat}, {flat_target})",
        "multi_margin_loss with weights": lambda: (
            f"F.multi_margin_loss({flat}, {flat_target}, weight={w.buffer('class_weight', VOCAB)})"
        ),
        "bce of one_hot": lambda: f"F.binary_cross_entropy_with_logits({output}, {one_hot})",
        "bce with pos_weight": lambda: (
            "F.binary_cross_entropy_with_logits("
            f"{output}, {one_hot}, pos_weight={w.buffer('pos_weight', VOCAB)})"
        ),
        "bce with weight": lambda: (
            "F.binary_cross_entropy_with_logits("
            f"{output}, {one_hot}, weight=({target} != 3)[..., None].double())"
        ),
        "bce of probabilities": lambda: (
            f"F.binary_cross_entropy(torch.sigmoid({output}), {one_hot})"
        ),
        "kl_div of soft labels": lambda: (
            f"F.kl_div(F.log_softmax({output}, -1), {soft}, reduction='batchmean')"
        ),
        "mse of one_hot": lambda: f"F.mse_loss(torch.softmax({output}, -1), {one_hot})",
    }
    name = w.pick(*spellings)
    w.tag(f"fused: {name}")
    return w.let("fused", spellings[name]())


def _regression(w: Writer, trunk: Trunk) -> str:
    tokens = trunk.ndim == 2
    target = w.input("target", "targets" if tokens else "row targets")
    pred = trunk.output
    flat, flat_target = (
        (f"{pred}.flatten(0, 1)", f"{target}.flatten(0, 1)") if tokens else (pred, target)
    )
    spellings = {
        "mse_loss": f"F.mse_loss({pred}, {target})",
        "l1_loss": f"F.l1_loss({pred}, {target})",
        "smooth_l1_loss": f"F.smooth_l1_loss({pred}, {target})",
        "huber_loss": f"F.huber_loss({pred}, {target}, delta=0.7)",
        "mse_loss, sum over rows": f"F.mse_loss({pred}, {target}, reduction='sum') / {pred}.size(0)",
        "mse_loss, sum": f"F.mse_loss({pred}, {target}, reduction='sum')",
        "binary_cross_entropy_with_logits": f"F.binary_cross_entropy_with_logits({pred}, torch.sigmoid({target}))",
        "kl_div batchmean": f"F.kl_div(F.log_softmax({pred}, -1), torch.softmax({target}, -1), reduction='batchmean')",
        "kl_div log_target": f"F.kl_div(F.log_softmax({pred}, -1), F.log_softmax({target}, -1), log_target=True, reduction='mean')",
        "poisson_nll_loss": f"F.poisson_nll_loss({pred}, {target}.abs())",
        "gaussian_nll_loss": f"F.gaussian_nll_loss({pred}, {target}, 1 + {target} ** 2)",
        "soft_margin_loss": f"F.soft_margin_loss({pred}, {target}.sign())",
        "cosine_similarity": f"(1 - F.cosine_similarity({pred}, {target}, dim=-1)).mean()",
        "cosine_embedding_loss": f"F.cosine_embedding_loss({flat}, {flat_target}, {flat_target}[:, 0].sign())",
        "multilabel_soft_margin_loss": f"F.multilabel_soft_margin_loss({flat}, ({flat_target} > 0).double())",
        "triplet_margin_loss": f"F.triplet_margin_loss({flat}, {flat_target}, -{flat_target}, margin=2.0)",
    }
    name = w.pick(*spellings)
    w.tag(f"fused: {name}")
    return w.let("fused", spellings[name])


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
    return average(w, term, None, mask_for(w, trunk, trunk.labels))
