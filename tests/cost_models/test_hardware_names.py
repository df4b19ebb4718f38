"""Names of devices and nodes in other spellings: the entry itself, or suggestions that work."""

from __future__ import annotations

import pytest
from autopar_cost_models import DEVICES, NODES
from autopar_cost_models.names import _SIZES, entries_of, read_hardware
from hypothesis import given
from hypothesis import strategies as st

ENTRIES = [*DEVICES, *NODES]
WRITTEN = {
    "RTX 4090": "rtx4090:1",
    "rtx-4090": "rtx4090:1",
    "4090": "rtx4090:1",
    "NVIDIA GeForce RTX 4090": "rtx4090:1",
    "RTX A6000": "a6000:1",
    "RTX 6000 Ada Generation": "rtx6000-ada:1",
    "8xH100": "h100:8",
    "h100x8": "h100:8",
    "8 H100": "h100:8",
    "H100 * 8": "h100:8",
    "gpu:h100:8": "h100:8",
    "2x8xH100": "dgx-h100:2",
    "2 nodes of 8 H100": "dgx-h100:2",
    "H100 SXM": "h100:1",
    "NVIDIA H100 80GB HBM3": "h100:1",
    "NVIDIA H100 PCIe": "h100-pcie:1",
    "H100 NVL": "h100-nvl:1",
    "H100-96G-HBM2e-500W": "h100-96g-500w:1",
    "A100-80GB": "a100-80g:1",
    "8 x A100 80G": "a100-80g:8",
    "NVIDIA A100-SXM4-40GB": "a100-40g:1",
    "NVIDIA A100 80GB PCIe": "a100-pcie-80g:1",
    "Tesla V100-SXM2-32GB": "v100-32g:1",
    "AMD Instinct MI300X OAM": "mi300x:1",
    "8xmi300x": "mi300x:8",
    "NVIDIA GH200 480GB": "gh200:1",
    "dgx_h100:8": "dgx-h100:8",
    "DGX H100 x 16": "dgx-h100:16",
    "HGX H100": "dgx-h100:1",
    "DGX A100 80GB": "dgx-a100-80g:1",
    "GB200 NVL72": "gb200-nvl72:1",
    "p5.48xlarge": "aws-p5:1",
    "4 x p4d.24xlarge": "aws-p4d:4",
    "g5.12xlarge": "a10g:4",
    "a3-megagpu-8g:2": "gcp-a3-mega:2",
    "Standard_ND96isr_H100_v5:4": "azure-nd-h100-v5:4",
    "4 CPUs": "cpu:4",
}
REFUSED = {
    "MI350X": "mi355x:1",
    "A100": "a100-80g:1",
    "V100:8": "v100-32g:8",
    "A100-64GB": "a100-80g:1",
    "RTX 4090 Laptop GPU": "rtx4090:1",
    "RTX 4080": "rtx4090:1",
    "RTX 6000": "rtx6000-ada:1",
    "L40": "l40s:1",
    "MI300A": "mi300x:1",
    "DGX A100": "dgx-a100-80g:1",
    "2x p5.4xlarge": "h100:2",
    "Jean Zay": "jeanzay-a100:1",
    "16x A100": "dgx-a100-80g:2",
}


@pytest.mark.parametrize("text", WRITTEN)
def test_what_people_write_is_found(text):
    assert read_hardware(text).text == WRITTEN[text]
    assert read_hardware(text.lower()) == read_hardware(text.upper()) == read_hardware(text)


@pytest.mark.parametrize("text", REFUSED)
def test_what_may_be_something_else_has_suggestions(text):
    found = read_hardware(text)
    assert not found.name and REFUSED[text] in found.suggestions
    assert all(read_hardware(other).text == other for other in found.suggestions)


def test_every_device_has_its_gigabytes():
    assert set(_SIZES) == set(DEVICES) - {"cpu"}


@st.composite
def spellings(draw):
    """(entry, number, a text that has all letters and digits of the entry, and the number)."""
    entry, number = draw(st.sampled_from(ENTRIES)), draw(st.integers(1, 8))
    parts = entry.split("-")
    text = parts[0] + "".join(draw(st.sampled_from("-_ ")) + part for part in parts[1:])
    maker = draw(st.sampled_from(["", "nvidia ", "NVIDIA-", "amd ", " "]))
    text = draw(st.sampled_from([str.lower, str.upper, str.title]))(maker + text)
    form = draw(st.sampled_from(["{n}x{t}", "{n} x {t}", "{t}:{n}", "{t} x {n}", "{t} \u00d7 {n}"]))
    return entry, number, form.format(n=number, t=text)


@given(spellings())
def test_a_spelling_is_the_entry_or_has_suggestions_that_work(spelling):
    entry, number, text = spelling
    found = read_hardware(text)
    if found.name:
        assert (found.name, found.count) == (entry, number), text
    for other in found.suggestions:
        assert len(entries_of(other.partition(":")[0])) == 1


@given(st.text("0123456789abgmnprtxvh-_ :.*/+", max_size=24))
def test_no_text_is_a_traceback(text):
    found = read_hardware(text)
    assert not found.name or found.name in ENTRIES
