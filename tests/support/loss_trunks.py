"""Small models under generated losses: what they read, and what they make for the loss."""

from __future__ import annotations

from dataclasses import dataclass

from support.loss_masks import Labels
from support.loss_writer import HIDDEN, OUTPUTS, VOCAB, Writer
from torch import nn


@dataclass(frozen=True, slots=True)
class Trunk:
    """What a model makes: `hidden` [B, T, H], and `output`, which has `ndim` dims and then a last one.

    With labels the output are logits, [B, T, V] or [B, V]; without, predictions, [B, T, K] or [B, K].
    """

    hidden: str
    output: str
    ndim: int
    labels: Labels | None


def build_trunk(w: Writer) -> Trunk:
    kind = w.pick("tokens", "tokens", "tokens", "sequences", "regression", "row regression")
    w.tag(f"model: {kind}")
    if kind == "tokens":
        return _tokens(w)
    hidden = _read(w)
    if kind == "regression":
        return Trunk(hidden, w.let("pred", f"{_linear(w, 'head', OUTPUTS)}({hidden})"), 2, None)
    pooled = w.let("pooled", _pool(w, hidden))
    if kind == "row regression":
        return Trunk(hidden, w.let("pred", f"{_linear(w, 'head', OUTPUTS)}({pooled})"), 1, None)
    logits = w.let("logits", f"{_linear(w, 'head', VOCAB)}({pooled})")
    return Trunk(hidden, logits, 1, row_labels(w))


def row_labels(w: Writer) -> Labels:
    kind = w.pick("row labels", "row labels", "ignored row labels")
    return Labels(w.input("labels", kind), kind, 1)


def second_labels(w: Writer, trunk: Trunk) -> Labels:
    """Other labels of the same logits."""
    w.tag("two label tensors")
    if trunk.ndim == 1:
        return Labels(w.input("other_labels", "row labels"), "row labels", 1)
    kind = w.inputs.get("other_labels") or w.pick("labels", "padded labels", "ignored labels")
    return Labels(w.token_input("other_labels", kind), kind, 2)


def _tokens(w: Writer) -> Trunk:
    hidden = _embed(w)
    if w.chance(0.15):
        w.tag("tied head")
        table = next(name for name, part in w.parts.items() if isinstance(part, nn.Embedding))
        logits = w.let("logits", f"F.linear({hidden}, self.{table}.weight)")
    else:
        logits = w.let("logits", f"{_linear(w, 'head', VOCAB)}({hidden})")
    kind = w.pick("labels", "padded labels", "ignored labels")
    w.input("labels", kind)
    if w.chance(0.25):
        w.tag("shifted")
        w.shifted = True
        logits = w.let("logits", f"{logits}[:, :-1]" + w.pick("", ".contiguous()"))
        hidden = w.let("hidden", f"{hidden}[:, :-1]")
    return Trunk(hidden, logits, 2, Labels(w.token_input("labels"), kind, 2))


def _embed(w: Writer) -> str:
    ids = w.input("ids")
    options = {}
    if w.chance(0.15):
        options = {"padding_idx": 0}
        w.tag("padding_idx")
    elif w.chance(0.02):
        options = {"scale_grad_by_freq": True}
        w.tag("scale_grad_by_freq")
        w.couple("parameters")
    of = ", ".join(["VOCAB", "HIDDEN", *(f"{name}={value}" for name, value in options.items())])
    embed = w.part("embed", nn.Embedding(VOCAB, HIDDEN, **options), f"Embedding({of})")
    hidden = w.let("hidden", f"{embed}({ids})")
    return (
        w.let("hidden", f"torch.tanh({_linear(w, 'inner', HIDDEN)}({hidden}))")
        if w.chance(0.5)
        else hidden
    )


def _read(w: Writer) -> str:
    if w.chance(0.3):
        return _embed(w)
    x = w.input("x", "features")
    if w.chance(0.04):
        w.tag("inputs of other rows mixed in")
        w.couple("float inputs")
        x = w.let(
            "x",
            w.pick(
                f"0.7 * {x} + 0.3 * {x}.flip(0)",
                f"{x} - {x}.mean(0)",
                f"({x} - {x}.mean()) / {x}.std()",
            ),
        )
    return w.let("hidden", f"torch.tanh({_linear(w, 'inner', HIDDEN)}({x}))")


def _pool(w: Writer, hidden: str) -> str:
    mask = lambda: w.input("float_mask", "float mask")  # noqa: E731
    return w.pick(
        lambda: f"{hidden}.mean(1)",
        lambda: f"{hidden}[:, -1]",
        lambda: f"{hidden}.sum(1) / {w.seq}",
        lambda: (
            f"({hidden} * {mask()}[..., None]).sum(1) / {mask()}.sum(1, keepdim=True).clamp(min=1)"
        ),
        lambda: f"torch.einsum('bth,bt->bh', {hidden}, {mask()})",
    )()


def _linear(w: Writer, hint: str, outputs: int) -> str:
    bias = w.chance(0.6)
    of = f"Linear(HIDDEN, {outputs}{'' if bias else ', bias=False'})"
    return w.part(hint, nn.Linear(HIDDEN, outputs, bias=bias), of)
