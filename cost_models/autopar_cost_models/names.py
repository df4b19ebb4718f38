"""Names of devices and nodes as people write them: `NVIDIA H100 80GB HBM3`, `8xH100`, `p5.48xlarge`.

A spelling is read only if it names one entry of the catalogue. What it leaves open (`A100` has two
sizes of memory) or adds (`RTX 4090 Laptop`) is refused, with entries that can be written instead.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches

from autopar_cost_models.catalogue import CARD_LINKS, DEVICES
from autopar_cost_models.topology import NODES, home_of

_WHOLE = {
    "p3dn.24xlarge": "aws-p3dn",
    "p4d.24xlarge": "aws-p4d",
    "p4de.24xlarge": "aws-p4de",
    "p5.48xlarge": "aws-p5",
    "p5e.48xlarge": "aws-p5e",
    "p5en.48xlarge": "aws-p5en",
    "p6-b200.48xlarge": "aws-p6-b200",
    "g5.48xlarge": "aws-g5",
    "g6.48xlarge": "aws-g6",
    "a2-highgpu-8g": "gcp-a2-high",
    "a2-ultragpu-8g": "gcp-a2-ultra",
    "a3-highgpu-8g": "gcp-a3-high",
    "a3-megagpu-8g": "gcp-a3-mega",
    "a3-ultragpu-8g": "gcp-a3-ultra",
    "a4-highgpu-8g": "gcp-a4-high",
    "nd96asr_v4": "azure-nd-a100-v4",
    "nd96amsr_a100_v4": "azure-ndm-a100-v4",
    "nd96isr_h100_v5": "azure-nd-h100-v5",
    "nd96isr_h200_v5": "azure-nd-h200-v5",
    "nd96isr_mi300x_v5": "azure-nd-mi300x-v5",
}
"""Node presets by the name of the instance."""

_CARDS = {1: ("", "2", "4", "8", "16"), 4: ("12", "24")}
"""Numbers of GPUs of Amazon's g5 and g6 instances, by the factor of their sizes."""

_PARTS: dict[str, tuple[str, int]] = {
    **{f"g5.{size}xlarge": ("a10g", n) for n, sizes in _CARDS.items() for size in sizes},
    **{f"g6.{size}xlarge": ("l4", n) for n, sizes in _CARDS.items() for size in sizes},
    **{f"g4dn.{size}xlarge": ("t4", 1) for size in _CARDS[1]},
    "g4dn.12xlarge": ("t4", 4),
    "g4dn.metal": ("t4", 8),
    "p3.2xlarge": ("v100-16g", 1),
    "p5.4xlarge": ("h100", 1),
    **{f"a2-highgpu-{n}g": ("a100-40g", n) for n in (1, 2, 4)},
    **{f"a2-ultragpu-{n}g": ("a100-80g", n) for n in (1, 2, 4)},
    **{f"a3-highgpu-{n}g": ("h100", n) for n in (1, 2, 4)},
    "nc24ads_a100_v4": ("a100-pcie-80g", 1),
    "nc48ads_a100_v4": ("a100-pcie-80g", 2),
    "nc96ads_a100_v4": ("a100-pcie-80g", 4),
}
"""(device, number) of instances that are a part of a node."""

_MOST_SUGGESTIONS = 4


@dataclass(frozen=True, slots=True)
class _Reading:
    """What a text names: `count` nodes of the preset `name`, or devices of that name on one node.

    `name` is '' if the text names nothing or several entries; `suggestions` are then texts that
    name something, and `kind` is the text without the number.
    """

    name: str
    count: int = 1
    suggestions: tuple[str, ...] = ()
    kind: str = ""

    @property
    def text(self) -> str:
        """The text that names the same in the words of the catalogue: `h100:8`."""
        return f"{self.name}:{self.count}"


def read_hardware(text: str) -> _Reading:
    """What a text such as `8 x A100 80G` or `p5.48xlarge:2` names."""
    plain = " ".join(text.lower().split())
    nodes, devices, kind = _counted(plain)
    if nodes:  # several nodes, and devices of each
        return _on_nodes(kind, nodes, devices)
    for number, name in (((1, plain),) if ":" not in plain else ()) + ((devices, kind),):
        found = entries_of(name)
        if len(found) == 1:
            return _Reading(found[0], number)
        if instance := instance_of(name):
            return _instance(*instance, number)
    near = entries_of(kind) or near_entries(kind)
    return _Reading("", devices, _suggestions(near, max(devices, 1)), kind)


def device_named(name: str) -> str:
    """The device of the catalogue that a name means, or the name itself if it means none or several."""
    found = entries_of(name) if isinstance(name, str) else []
    return found[0] if len(found) == 1 and found[0] in DEVICES else name


def entries_of(name: str) -> list[str]:
    """The entries of the catalogue that a name without a number can mean: devices and nodes."""
    plain = " ".join(name.lower().split())
    if plain in DEVICES or plain in NODES:
        return [plain]
    squeezed = _squeezed(plain)
    if squeezed in _NODES:
        return _NODES[squeezed]
    words = _words_of(plain)
    if words.model in _NODES:
        return [name for name in _NODES[words.model] if _is_like(NODES[name].device.name, words)]
    named = [name for name in _MODELS.get(words.model, ()) if _is_like(name, words)]
    if words.model in named and not words.gigabytes:
        return [words.model]
    return named


def near_entries(name: str) -> list[str]:
    """Entries of the catalogue whose names are like a name that means none, the nearest first."""
    model = _words_of(name.lower()).model
    if model in _MODELS:
        return list(_MODELS[model])
    if not model:
        return []
    known = {_squeezed(entry): (entry,) for entry in (*DEVICES, *NODES)} | _MODELS
    begins = [entry for key in known if key.startswith(model) for entry in known[key]]
    keys = get_close_matches(model, known, n=_MOST_SUGGESTIONS, cutoff=0.6)
    return list(dict.fromkeys([*begins, *(entry for key in keys for entry in known[key])]))


def _suggestions(entries: list[str], count: int) -> tuple[str, ...]:
    """Texts for entries of the catalogue, with a number of devices or nodes near `count`."""
    texts = []
    for name in entries[:_MOST_SUGGESTIONS]:
        home = home_of(name) if name in DEVICES else None
        if home is not None and count > home.devices_per_node:
            texts.append(f"{home.name}:{-(-count // home.devices_per_node)}")
        else:
            texts.append(f"{name}:{count}")
    return tuple(dict.fromkeys(texts))


# ------------------------------------------------------------------------------------------ counts

_TIMES = r"\s*(?:(?<=[\dx\s])x|\u00d7|\*)\s*"  # an x after a letter ends a word, as in RTX
_ON_NODES = re.compile(
    rf"(\d+)(?:{_TIMES}|\s+)(?:nodes?|hosts?|servers?)?\s*(?:of|with|{_TIMES})?\s*(\d+)(?:{_TIMES}|\s+)([a-z].*)"
)
_BEFORE = re.compile(rf"(\d+)(?:{_TIMES}|\s+(?=.*\d|cpu))([a-z].*)")
_AFTER = re.compile(rf"(.*[^\s:])(?:\s*:\s*|{_TIMES})(\d+)")


def _counted(text: str) -> tuple[int, int, str]:
    """(number of nodes, 0 if only one number is said; number of devices or nodes; the rest)."""
    text = re.sub(r"^gpu:", "", text)
    if named := _ON_NODES.fullmatch(text):
        return int(named[1]), int(named[2]), named[3]
    if named := _BEFORE.fullmatch(text):
        return 0, int(named[1]), named[2]
    if named := _AFTER.fullmatch(text):
        return 0, int(named[2]), named[1]
    return 0, 1, text


def _on_nodes(kind: str, nodes: int, per_node: int) -> _Reading:
    """`nodes` nodes of `per_node` devices, if these are the device's usual nodes."""
    found = entries_of(kind)
    homes = [home_of(name) for name in found if name in DEVICES]
    if len(found) == 1 and homes and homes[0] and homes[0].devices_per_node == per_node:
        return _Reading(homes[0].name, nodes)
    return _Reading("", suggestions=_suggestions(found or near_entries(kind), nodes * per_node))


def _instance(name: str, devices: int, number: int) -> _Reading:
    """`number` instances of a cloud with `devices` devices each; 0 devices are a whole preset."""
    if devices == 0:
        return _Reading(name, number)
    if number == 1:
        return _Reading(name, devices)
    return _Reading("", suggestions=_suggestions([name], devices * number))


# ------------------------------------------------------------------------------------------- words


@dataclass(frozen=True, slots=True)
class _Words:
    """The words of a device's name: `model` squeezed to letters and digits, gigabytes of memory (0:
    not said), and the form ('': not said).
    """

    model: str
    gigabytes: int = 0
    form: str = ""


_NOISE = re.compile(
    r"\b(nvidia|amd|geforce|instinct|tesla|quadro|gpus?|tensor[ -]?core|oam|accelerators?|hbm\d?e?|"
    r"\d+[ -]gpus?)\b"
)
_GIGABYTES = re.compile(r"(?<![a-z0-9])(\d+) ?g(?:i?b)?\b")
_FORM = re.compile(r"\b(sxm|pcie|pci-e|nvl)\d?(?![0-9])\b")
_FORMS = {"pci-e": "pcie"}


def _words_of(text: str) -> _Words:
    text = _NOISE.sub(" ", re.sub(r"[_/(),-]+", " ", text.replace("pci-e", "pcie")))
    size, form = _GIGABYTES.search(text), _FORM.search(text)
    text = _FORM.sub(" ", _GIGABYTES.sub(" ", text, count=1), count=1)
    return _Words(_squeezed(text), int(size[1]) if size else 0, form[1] if form else "")


def _squeezed(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "", text)


_SIZES: dict[str, tuple[int, ...]] = {
    "a100-40g": (40,), "a100-80g": (80,), "a100-pcie-40g": (40,), "a100-pcie-80g": (80,),
    "h100": (80,), "h100-96g-500w": (96,), "h100-pcie": (80,), "h100-nvl": (94,), "h800": (80,),
    "h200": (141,), "l40s": (48,), "b200": (180, 183, 186, 192), "b300": (270, 279, 288),
    "gb200": (186, 192), "gb300": (279, 288), "mi300x": (192,), "v100-16g": (16,),
    "v100-32g": (32,), "t4": (15, 16), "a10": (24,), "a10g": (24,), "l4": (24,), "a40": (48,),
    "a6000": (48,), "rtx3090": (24,), "rtx4090": (24,), "rtx5090": (32,), "rtx6000-ada": (48,),
    "rtx-pro-6000": (96,), "a800-80g": (80,), "h20": (96,), "gh200": (96, 480), "mi250x": (128,),
    "mi325x": (256,), "mi355x": (288,),
}  # fmt: skip
"""Gigabytes in the names of devices, as vendors and nvidia-smi write them."""

_IN_SXM = ("a100", "a800", "b200", "b300", "h100", "h20", "h200", "h800", "v100")
"""Models of which a variant without a form in its name is an SXM module."""

_MODELS: dict[str, tuple[str, ...]] = {
    "a100": ("a100-40g", "a100-80g", "a100-pcie-40g", "a100-pcie-80g"),
    "h100": ("h100", "h100-96g-500w", "h100-pcie", "h100-nvl"),
    "v100": ("v100-16g", "v100-32g"),
    **dict.fromkeys(("h100500w", "h10096g500w"), ("h100-96g-500w",)),
    **dict.fromkeys(("a6000", "rtxa6000"), ("a6000",)),
    **dict.fromkeys(("rtx3090", "3090"), ("rtx3090",)),
    **dict.fromkeys(("rtx4090", "4090"), ("rtx4090",)),
    **dict.fromkeys(("rtx5090", "5090"), ("rtx5090",)),
    "rtx6000": ("rtx6000-ada", "rtx-pro-6000"),
    **dict.fromkeys(("rtx6000ada", "6000ada", "rtx6000adageneration"), ("rtx6000-ada",)),
    **dict.fromkeys(
        ("rtxpro6000", "pro6000", "rtxpro6000blackwell", "rtxpro6000blackwellserveredition",
         "rtxpro6000blackwellworkstationedition"),
        ("rtx-pro-6000",),
    ),
    "a800": ("a800-80g",),
    **dict.fromkeys(("gh200", "gracehopper"), ("gh200",)),
    **{name: (name,) for name in (
        "h800", "h200", "l40s", "b200", "b300", "gb200", "gb300", "mi300x", "t4", "a10", "a10g",
        "l4", "a40", "h20", "mi250x", "mi325x", "mi355x", "cpu")},
    "cpus": ("cpu",),
}  # fmt: skip
"""Devices by model, as `_Words` has it."""


def _is_like(device: str, words: _Words) -> bool:
    """Whether a device has the memory and the form that a name says. Without a form it is the SXM
    module, where there is one.
    """
    own = next((form for form in ("pcie", "nvl") if f"-{form}" in device), "")
    if words.form == "pcie" and device in CARD_LINKS:  # cards that have no other form
        own = own or "pcie"
    of_memory = not words.gigabytes or words.gigabytes in _SIZES.get(device, ())
    if words.form == "sxm":
        return of_memory and not own and device.split("-")[0] in _IN_SXM
    is_only = own == "nvl" and words.gigabytes == 94
    return of_memory and (own == words.form or is_only)


def _nodes() -> dict[str, list[str]]:
    """Node presets by their squeezed names, and by other names of the same nodes."""
    found = {_squeezed(name): [name] for name in NODES}
    for name in NODES:
        for prefix in ("dgx", "hgx"):
            if name.startswith((f"{prefix}-1", "dgx-a100")):
                continue
            if name.startswith(f"{prefix}-"):
                other = "hgx" if prefix == "dgx" else "dgx"
                found.setdefault(_squeezed(name.replace(prefix, other, 1)), [name])
    sizes = ["dgx-a100-40g", "dgx-a100-80g"]
    found |= dict.fromkeys(("dgxa100", "hgxa100"), sizes)
    found |= {key: ["dgx-1-v100-16g", "dgx-1-v100-32g"] for key in ("dgx1", "dgx1v100")}
    found |= {"nvl72": ["gb200-nvl72", "gb300-nvl72"]}
    return found


_NODES = _nodes()


def instance_of(name: str) -> tuple[str, int] | None:
    """(node preset, 0) of an instance that is a whole node, (device, number) of one that is a part;
    None if the name is none of either.
    """
    text = re.sub(r"^(standard[_ -]|aws[ -]|gcp[ -]|azure[ -]|ml\.)", "", name.strip().lower())
    if text in _WHOLE:
        return _WHOLE[text], 0
    return _PARTS.get(text)
