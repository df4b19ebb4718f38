"""Losses in which a row's gradient depends on the outputs of other rows: terms, and functions of losses."""

from __future__ import annotations

import re

from support.loss_trunks import Trunk
from support.loss_writer import Writer


def coupled_term(w: Writer, trunk: Trunk) -> str:
    """A scalar loss whose gradient in one row depends on the outputs of other rows."""
    w.couple("parameters")
    z = w.once("features", "z", f"{trunk.hidden}.{w.pick('mean(1)', 'sum(1)', 'flatten(1)')}")
    scores = w.once(
        "scores",
        "score",
        f"{trunk.output}.square().{'mean((1, 2))' if trunk.ndim == 2 else 'mean(1)'}",
    )
    name = w.pick(*_TERMS)
    w.tag(f"coupled: {name}")
    lines = [
        line.format(z=z, s=scores, out=trunk.output, b=f"{z}.shape[0]") for line in _TERMS[name]
    ]
    names: dict[str, str] = {}
    for line in lines[:-1]:
        targets, expression = line.split(" = ", 1)
        expression = _renamed(expression, names)
        names |= {f"${target}": w.fresh(target) for target in targets.split(", ")}
        w.lines.append(
            f"{', '.join(names[f'${target}'] for target in targets.split(', '))} = {expression}"
        )
    return w.let("pairs", _renamed(lines[-1], names))


def _renamed(expression: str, names: dict[str, str]) -> str:
    return re.sub(r"\$\w+", lambda found: names[found[0]], expression)


_TERMS = {
    "chunk(2), chosen and rejected": (
        "halves = {s}.chunk(2)",
        "margin = $halves[0] - $halves[1]",
        "-F.logsigmoid($margin).mean()",
    ),
    "chunk(2) of the outputs": (
        "chosen, rejected = {out}.chunk(2, dim=0)",
        "($chosen - $rejected).square().mean()",
    ),
    "first half and second half": (
        "half = {b} // 2",
        "F.softplus({s}[$half:] - {s}[:$half]).mean()",
    ),
    "strided pairs": ("({z}[0::2] - {z}[1::2]).pow(2).mean()",),
    "strided pairs, logistic": ("-F.logsigmoid({s}[::2] - {s}[1::2]).mean()",),
    "pairs by view": (
        "paired = {z}.view(-1, 2, {z}.shape[1])",
        "F.cosine_similarity($paired[:, 0], $paired[:, 1]).mean()",
    ),
    "split in halves": (
        "halves = torch.split({z}, {b} // 2)",
        "($halves[0] * $halves[1]).sum(-1).mean()",
    ),
    "roll": (
        "(F.relu(1 - ({z} - {z}.roll(1, 0)).norm(dim=-1)) ** 2).sum() / {b} + {z}.square().mean()",
    ),
    "flip": ("({z} * {z}.flip(0)).sum(-1).square().mean()",),
    "neighbouring rows": ("({s}[1:] - {s}[:-1]).square().mean()",),
    "contrastive": (
        "similar = F.normalize({z}, dim=-1) @ F.normalize({z}, dim=-1).t()",
        "F.cross_entropy($similar / 0.5, (torch.arange({b}) + 1) % {b})",
    ),
    "contrastive, symmetric": (
        "similar = {z} @ {z}.detach().t()",
        "-torch.diagonal(F.log_softmax($similar, 1)).mean()",
    ),
    "all pairs": ("(torch.cdist({z}, {z}.detach() + 1) + 1).log().mean()",),
    "all pairs by broadcasting": (
        "({z}[:, None] - {z}[None]).square().sum(-1).add(1).log().mean()",
    ),
    "margin ranking of halves": (
        "halves = {s}.chunk(2)",
        "F.margin_ranking_loss($halves[0], $halves[1], torch.ones_like($halves[0]), margin=2.0)",
    ),
    "triplets with negatives of other rows": (
        "F.triplet_margin_loss({z}[:, :2], {z}[:, 1:3], {z}.roll(1, 0)[:, :2], margin=3.0) + {s}.mean()",
    ),
    "MMD": (
        "first, second = {z}.chunk(2)",
        "torch.exp(-torch.cdist($first, $second + 2)).mean() - torch.exp(-torch.cdist($first, $first.detach() + 1)).mean()",
    ),
    "KL between rows": (
        "F.kl_div(F.log_softmax({z}, -1), torch.softmax({z}.flip(0), -1), reduction='batchmean')",
    ),
    "attention over rows": (
        "mixed = torch.softmax({z} @ {z}.t(), -1) @ {z}",
        "$mixed.pow(2).mean()",
    ),
    "gram matrix": (
        "gram = {z} @ {z}.t()",
        "($gram - torch.eye({b}, dtype=$gram.dtype)).square().mean()",
    ),
    "covariance": (
        "centred = {z} - {z}.mean(0)",
        "(($centred.t() @ $centred) / ({b} - 1)).square().sum()",
    ),
    "std over the batch": ("F.relu(2 - {z}.std(0)).mean()",),
    "variance of scores": ("{s}.var()",),
    "variance of the outputs": ("{out}.var(0).mean()",),
    "normalised by hand": (
        "normed = ({z} - {z}.mean(0)) / torch.sqrt({z}.var(0, unbiased=False) + 1e-5)",
        "($normed ** 3).mean()",
    ),
    "scores normalised over the batch": (
        "advantage = (({s} - {s}.mean()) / ({s}.std() + 1e-6)).detach()",
        "($advantage * {s}).mean()",
    ),
    "baseline": ("(({s} - {s}.mean().detach()) ** 2).mean()",),
    "softmax over the batch": ("(torch.softmax({s}, 0) * {s}).sum()",),
    "detached softmax over the batch": ("(torch.softmax({s}.detach(), 0) * {s}).sum()",),
    "logsumexp over the batch": ("torch.logsumexp({s}, 0)",),
    "largest of the batch": ("{s}.max() + 0.1 * {s}.mean()",),
    "top 2 of the batch": ("{s}.topk(2).values.mean()",),
    "sorted": ("ordered = {s}.sort().values", "($ordered * torch.arange({b})).sum() / {b}"),
    "median": ("{s}.median() + {s}.square().mean()",),
    "cumsum over rows": ("{s}.cumsum(0).square().mean()",),
    "norm over the batch": ("{out}.norm()",),
    "entropy of the mean": (
        "mean_probs = torch.softmax({out}, -1).flatten(0, -2).mean(0)",
        "($mean_probs * $mean_probs.log()).sum()",
    ),
    "mean embedding": ("{z}.mean(0).square().sum()",),
    "distance of means": ("({z}[: {b} // 2].mean(0) - {z}[{b} // 2 :].mean(0)).norm()",),
    "mean of scores, squared": ("{s}.mean() ** 2",),
    "above the mean": ("F.relu({s} - 0.5 * {s}.mean()).mean()",),
    "where above the mean": (
        "torch.where({s}.detach() > {s}.detach().mean(), {s}, 0.1 * {s}).mean()",
    ),
    "correlation": (
        "left, right = {z}[:, 0], {z}[:, 1:].sum(1)",
        "(($left - $left.mean()) * ($right - $right.mean())).sum() / {b}",
    ),
    "rows mixed": ("mixed = 0.7 * {z} + 0.3 * {z}.flip(0)", "$mixed.pow(4).mean()"),
    "prototypes": ("(({z} - {z}.mean(0, keepdim=True)) ** 2).sum(-1).mean()",),
    "scan over rows": ("torch.stack([{s}[0], ({s}[1:] * {s}[:-1]).sum()]).sum()",),
    "similarities": ("({z} @ {z}.t()).tanh().mean() + {s}.mean()",),
    "self-normalised": (
        "confidence = torch.exp(-{s})",
        "($confidence * {s}).sum() / $confidence.sum()",
    ),
    "detached normaliser": ("{s}.sum() / {s}.sum().detach()",),
    "share of the total": ("share = {s} / {s}.sum()", "($share * $share).sum()"),
}


def coupled_function(w: Writer, trunk: Trunk, losses: list[str]) -> str:
    """A scalar that is not linear in whole losses."""
    w.couple("parameters")
    loss = losses[0]
    other = (
        losses[1] if len(losses) > 1 else w.let("other", f"{trunk.hidden}.square().mean() + 0.5")
    )
    options = {
        "perplexity": f"torch.exp(0.5 * {loss})",
        "expm1": f"torch.expm1(0.1 * {loss})",
        "root": f"torch.sqrt({loss} + 0.1)",
        "RMSE": f"({loss} ** 2 + 1e-8).sqrt().sqrt()",
        "log": f"torch.log({loss} + 0.1)",
        "log1p": f"({loss}).log1p()",
        "square": f"{loss}.square()",
        "power": f"{loss}.pow(1.5)",
        "product": f"{loss} * {other}",
        "ratio": f"{loss} / ({other} + 1)",
        "geometric mean": f"torch.sqrt({loss} * {other} + 1e-6)",
        "harmonic mean": f"2 / (1 / ({loss} + 1) + 1 / ({other} + 1))",
        "over its own value": f"{loss} / {loss}.detach() + {other} / {other}.detach()",
        "scaled by another's value": f"{loss} + {other} * ({loss} / {other}).detach()",
        "maximum": f"torch.maximum({loss}, {other}) + 0.1 * {loss}",
        "minimum": f"torch.min({loss}, {other}) + 0.1 * {other} + 0.2 * {loss}",
        "softmax of losses": f"torch.logsumexp(torch.stack([{loss}, {other}]), 0)",
        "weights by losses": f"(torch.softmax(torch.stack([{loss}, {other}]).detach(), 0) * torch.stack([{loss}, {other}])).sum()",
        "flooding": f"({loss} - 1.0).abs() + 1.0",
        "huber of the loss": f"F.smooth_l1_loss({loss}, torch.zeros_like({loss}))",
        "clamp": f"{loss}.clamp(max=1.2) + 0.3 * {loss}",
        "where on the loss": f"torch.where({loss} > 1.0, {loss}, 0.5 * {loss} ** 2)",
        "focal on the mean": f"(1 - torch.exp(-{loss})) ** 2 * {loss}",
        "detached focal on the mean": f"((1 - torch.exp(-{loss})) ** 2).detach() * {loss}",
        "tanh": f"torch.tanh(0.3 * {loss})",
        "hypot": f"torch.hypot({loss}, {other})",
        "norm of losses": f"torch.stack([{loss}, {other}]).norm()",
        "sigmoid of difference": f"-F.logsigmoid({loss} - {other})",
        "gate on the loss": f"torch.sigmoid({loss} - 1).detach() * {loss}",
    }
    name = w.pick(*options)
    w.tag(f"function: {name}")
    return w.let("loss", options[name])
