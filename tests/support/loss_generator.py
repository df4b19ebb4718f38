"""Random losses like those of training code: a small model, its batches, and a scalar loss.

`generate(seed)` is deterministic.  It writes the text of forward and executes it, so that a report can
show the code that was tested.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from support.loss_batches import sample_batch
from support.loss_couplings import coupled_function, coupled_term
from support.loss_fused import auxiliary_term, fused_term
from support.loss_groups import grouped_term
from support.loss_masks import Mask, count, row_mask, token_mask
from support.loss_terms import average_term
from support.loss_trunks import Trunk, build_trunk, second_labels
from support.loss_writer import SEQ, Writer
from torch import Tensor, nn

STEPS = 2
ATTEMPTS = 50
MOVE = 0.05
"""How far a step of the reference moves the parameters, relative to their norm."""
LEAST_GRADIENT = 1e-5
"""A parameter with a smaller share of the largest gradient has none by construction, only rounding."""


@dataclass(frozen=True)
class GeneratedLoss:
    """`coupling` says what rows of a batch have in common: one of `loss_writer.COUPLINGS`."""

    seed: int
    source: str
    coupling: str
    tags: frozenset[str]
    rows: int
    micro_batch: int
    learning_rate: float
    model: nn.Module
    batches: tuple[dict[str, Tensor], ...]


def generate(seed: int) -> GeneratedLoss:
    """The loss of this seed: finite, with a gradient for each parameter."""
    for attempt in range(ATTEMPTS):
        loss = _attempt(seed, random.Random(f"{seed} {attempt}"))
        if loss is not None:
            return loss
    raise ValueError(f"no usable loss for seed {seed} in {ATTEMPTS} attempts")


def _attempt(seed: int, rng: random.Random) -> GeneratedLoss | None:
    rows = rng.choice((4, 8))
    w = Writer(rng, rows, seq=rows if rows == 4 and rng.random() < 0.1 else SEQ)
    initial = rng.randrange(2**31)
    with torch.random.fork_rng():
        torch.manual_seed(initial)
        _write(w)
    w.prune()
    model = _module(w).double()
    zero_rows = rng.random() < 0.3
    batches = tuple(
        sample_batch(w.inputs, rows, w.seq, zero_rows, initial + k) for k in range(STEPS)
    )
    rate = _learning_rate(model, batches)
    if rate is None:
        return None
    micro_batch = rng.choice((1, 2))
    return GeneratedLoss(
        seed, w.source(), w.coupling, frozenset(w.tags), rows, micro_batch, rate, model, batches
    )


def _module(w: Writer) -> nn.Module:
    """A module of the parts and the forward that were written."""
    body = "\n".join(f"    {line}" for line in w.lines)
    text = f"def forward(self, {', '.join(w.inputs)}):\n{body}\n"
    names = {"torch": torch, "F": F}
    exec(compile(text, "<generated loss>", "exec"), names)
    module = type("GeneratedModel", (nn.Module,), {"forward": names["forward"]})()
    for name, part in w.parts.items():
        if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
            module.register_buffer(name, part)
        else:
            setattr(module, name, part)
    for name, value in w.constants.items():
        setattr(module, name, value)
    return module


def _learning_rate(model: nn.Module, batches: tuple[dict[str, Tensor], ...]) -> float | None:
    """The rate at which a step moves the parameters by `MOVE`.  None if a step is not finite, or leaves a
    parameter unmoved."""
    model, rate = copy.deepcopy(model), None
    parameters = [p for p in model.parameters() if p.requires_grad]
    for batch in batches:
        loss = model(**batch)
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        norms = torch.tensor([0.0 if g is None else float(g.norm()) for g in gradients])
        if (
            not torch.isfinite(norms.sum() + loss.detach())
            or norms.min() <= LEAST_GRADIENT * norms.max()
        ):
            return None
        rate = rate or MOVE * float(
            torch.stack([p.detach().norm() for p in parameters]).norm() / norms.norm()
        )
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= rate * gradient
    return rate


# ------------------------------------------------------------------------------ the whole of a loss


def _write(w: Writer) -> None:
    trunk = build_trunk(w)
    terms = [_main_term(w, trunk)]
    for _ in range(w.pick(0, 0, 1, 1, 2)):
        terms.append(
            _main_term(w, trunk, other_labels=True) if w.chance(0.4) else auxiliary_term(w, trunk)
        )
    coupling = w.pick("term", "term", "function") if w.chance(0.13) else None
    if coupling == "term":
        terms.append(coupled_term(w, trunk))
        if w.chance(0.3):
            terms = terms[-2:]
    w.tag(f"{len(terms)} term{'s' if len(terms) > 1 else ''}")
    loss = coupled_function(w, trunk, terms[:2]) if coupling == "function" else _combined(w, terms)
    if w.chance(0.1):
        loss = _scaled_by_a_count(w, trunk, loss)
    w.lines.append(
        f"return {loss}{w.pick('', '', '', '.squeeze()', '.double()', ' / 2', '.mean()')}"
    )


def _main_term(w: Writer, trunk: Trunk, other_labels: bool = False) -> str:
    labels = trunk.labels
    if labels and other_labels and w.chance(0.7):
        labels = second_labels(w, trunk)
    return w.pick(*[average_term] * 7, *[fused_term] * 2, grouped_term)(w, trunk, labels)


def _combined(w: Writer, terms: list[str]) -> str:
    """A sum of terms with coefficients."""
    if len(terms) == 1:
        return w.let("loss", _scaled(w, terms[0])) if w.chance(0.15) else terms[0]
    if w.chance(0.35):
        stacked = f"torch.stack([{', '.join(terms)}])"
        tag, expression = w.pick(
            ("stack and sum", f"{stacked}.sum()"),
            ("stack and mean", f"{stacked}.mean()"),
            ("buffer of coefficients", f"{stacked} @ {{buffer}}"),
            ("learned coefficients", f"({stacked} * torch.softmax({{parameter}}, 0)).sum()"),
            (
                "learned uncertainties",
                f"({stacked} * torch.exp(-{{parameter}})).sum() + {{parameter}}.sum()",
            ),
        )
        w.tag(tag)
        maker = w.buffer if "{buffer}" in expression else w.parameter
        name = maker("coefficients", len(terms)) if "{" in expression else ""
        return w.let("loss", expression.format(buffer=name, parameter=name))
    if len(terms) == 2 and w.chance(0.2):
        w.tag("lerp or add")
        return w.let(
            "loss",
            w.pick(
                f"torch.lerp({terms[0]}, {terms[1]}, 0.3)",
                f"torch.add({terms[0]}, {terms[1]}, alpha=0.5)",
            ),
        )
    loss = terms[0]
    for term in terms[1:]:
        loss = w.let("loss", f"{loss} + {_scaled(w, term)}")
    return loss


def _scaled(w: Writer, term: str) -> str:
    kind = w.pick("number", "number", "buffer", "learned", "learned", "quotient")
    w.tag(f"coefficient: {kind}")
    if kind == "learned":
        scale = w.parameter("log_scale", *w.pick((), (1,)))
        return w.pick(
            f"(torch.exp(-{scale}) * {term} + {scale}).sum()",
            f"{term} / (2 * {scale} ** 2).sum() + torch.log({scale}).sum()",
            f"F.softplus({scale}).sum() * {term}",
        )
    if kind == "buffer":
        return f"{w.buffer('alpha')} * {term}"
    return f"0.3 * {term}" if kind == "number" else f"{term} / 4"


def _scaled_by_a_count(w: Writer, trunk: Trunk, loss: str) -> str:
    """Times a number that integers of the whole batch give."""
    w.tag("scaled by a count")
    mask: Mask = token_mask(w, trunk.labels) if trunk.ndim == 2 else row_mask(w)
    counted = count(w, mask)
    return w.let(
        "loss",
        w.pick(
            f"{loss} * {mask.float}.mean()",
            f"{loss} * ({counted}).double().sqrt()",
            f"{loss} * ({counted}) / {mask.name}.numel()",
            f"{loss} * torch.log1p(({counted}).double())",
        ),
    )
