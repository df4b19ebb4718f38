"""The dimensions of a model in the options of Megatron-LM and of what is built on it."""

from __future__ import annotations

import re

from autopar.foreign.frameworks.arguments import Arguments
from autopar.foreign.target import vocabulary_of
from autopar.ir.model_shape import ModelShape


def megatron_shape(args: Arguments, resolved: bool) -> ModelShape:
    """The dimensions that options of Megatron-LM say; `resolved` as for `megatron_job`."""
    layers, hidden = args.whole("num_layers") or 0, args.whole("hidden_size") or 0
    heads = args.whole("num_attention_heads") or 0
    grouped = args.flag("group_query_attention")
    groups = args.whole("num_query_groups", "num_key_value_heads", "n_head_kv", least=0)
    # argparse: groups count only with the switch; YAML of Bridge has no switch
    counted = groups and (
        grouped
        or "num_query_groups" not in args.values
        or (grouped is None and not resolved and "group_query_attention" not in args.values)
    )
    args.text("activation")
    gated = any([args.flag(name) for name in ("swiglu", "gated_linear_unit", "quick_geglu")])
    ffn = args.whole("ffn_hidden_size") or _default_ffn(args, hidden, gated)
    experts = args.whole("num_experts", "num_moe_experts", least=0) or 0
    experts = 0 if experts == 1 else experts  # one that all tokens take is a dense layer
    dense, expert_layers = _expert_layers(args, layers) if experts else (0, "")
    untied = args.flag("untie_embeddings_and_output_weights")
    shared = args.flag("share_embeddings_and_output_weights")
    args.text("position_embedding_type")
    positions = args.values.get("position_embedding_type", "learned_absolute").lower()
    if args.flag("use_rotary_position_embeddings"):
        positions = "rope"
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=1
        if args.text("attention_head_type") == "multiquery"
        else int(groups)
        if counted and groups
        else heads,
        head_dim=args.whole("kv_channels") or (hidden // heads if heads else 0),
        ffn=ffn,
        vocab=_vocabulary(args),
        experts=experts,
        top_k=_top_k(args) if experts else 0,
        moe_ffn=(args.whole("moe_ffn_hidden_size") or ffn) if experts else 0,
        shared_ffn=args.whole("moe_shared_expert_intermediate_size", least=0) or 0,
        first_dense=dense,
        expert_layers=expert_layers,
        mtp=args.whole("mtp_num_layers", least=0) or 0,
        gated=gated,
        tied=not untied if shared is None else shared,
        positions={"learned_absolute": "learned", "none": "none", "alibi": "alibi"}.get(
            positions, "rope"
        ),
        latent=_latent(args),
    )


def _default_ffn(args: Arguments, hidden: int, gated: bool) -> int:
    """The width of an MLP that no option says. FlagScale rounds it up as Llama's presets do."""
    multiple, factor = args.whole("multiple_of"), args.number("hidden_dim_multiplier")
    if not gated:
        return 4 * hidden
    if multiple:
        width = int(int(4 * hidden * 2 / 3) * (factor or 1))
        return -(-width // multiple) * multiple
    return int(4 * hidden * 2 / 3) // 64 * 64


def _top_k(args: Arguments) -> int:
    """The experts of a token; the default of Megatron-DeepSpeed is one."""
    default = 1 if "moe_expert_parallel_size" in args.values else 2
    return args.whole("moe_router_topk", "topk") or default


def _latent(args: Arguments) -> tuple[int, ...]:
    if not args.flag("multi_latent_attention"):
        return ()
    names = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    defaults = (0, 512, 128, 64, 128)
    return tuple(args.whole(n, least=0) or d for n, d in zip(names, defaults, strict=True))


def _expert_layers(args: Arguments, layers: int) -> tuple[int, str]:
    """Which layers of a model with experts are dense, from `--moe-layer-freq`: how many before the
    first one with experts, and `ModelShape.expert_layers` if they alternate.
    """
    if "moe_expert_parallel_size" in args.values:  # of Megatron-DeepSpeed
        every = args.whole("expert_interval") or 2
        return _dense("0" * (min(every, 1000) - 1) + "1", layers)
    text = args.text("moe_layer_freq")
    if text in (None, "", "1"):
        return 0, ""
    pattern = re.sub(r"\s", "", str(text))
    if re.fullmatch(r"\d{1,4}", pattern) and int(pattern):
        return _dense("1" + "0" * (int(pattern) - 1), layers)
    sums = re.fullmatch(r"\(?((?:\+?\[(?:[01],?)+\](?:\*\d{1,4})?)+)\)?", pattern)
    if sums is None:
        args.leave_out("dense layers among those with experts", f"moe_layer_freq={text}")
        return 0, ""
    parts = re.findall(r"\[([01,]+)\](?:\*(\d+))?", sums[1])
    counted = [(part.replace(",", ""), int(count or 1)) for part, count in parts]
    if sum(len(part) * count for part, count in counted) > MOST_PERIOD:
        args.find("refused", f"moe_layer_freq has more than {MOST_PERIOD:,} layers")
        return 0, ""
    bits = "".join(part * count for part, count in counted)
    if layers and len(bits) != layers:
        args.find("refused", f"moe_layer_freq {text} has {len(bits)} layers, and the model {layers}",
                  "Invalid length of moe_layer_pattern", (f"a list of {layers} numbers",))  # fmt: skip
    return _dense(bits, layers)


MOST_PERIOD = 10_000
"""The most layers after which experts repeat."""


def _dense(bits: str, layers: int) -> tuple[int, str]:
    """(dense layers before the first with experts, `ModelShape.expert_layers` if others are dense
    too), for layers whose `bits` repeat.
    """
    if layers > MOST_PERIOD:
        return 0, bits
    whole = (bits * (layers // len(bits) + 1))[:layers] if layers else bits
    first = len(whole) - len(whole.lstrip("0"))
    if "0" not in whole[first:] and first < len(whole):
        return first, ""
    # equal to itself, moved by a period
    period = next(n for n in range(1, len(whole) + 1) if whole.startswith(whole[n:]))
    return 0, whole[:period]


def _vocabulary(args: Arguments) -> int:
    padded = args.whole("pad_vocab_size_to", "override_vocab_size")
    size = padded or args.whole("vocab_size", "padded_vocab_size", "padded_vocab") or 0
    model = args.values.get("tokenizer_model", args.values.get("vocab_file", ""))
    kind = args.values.get("tokenizer_type", "")
    if size:
        return size
    known = vocabulary_of(model) or (50257 if kind.startswith("GPT2BPE") else 0)
    if known:
        args.find("note", f"the vocabulary of {known} is that of the tokenizer {model or kind}")
    return known
