"""Headroom: what it is written as, what it leaves, where it comes from, and what the default stands for."""

from __future__ import annotations

import pytest
from autopar_cost_models.memory_error import FIT_CHANCE, HEADROOM, fit_chance
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import AutoparError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.cluster_parts import headroom_of, headroom_words

GIB = 2**30


@given(st.floats(0, 0.9))
def test_a_fraction_leaves_the_rest(share):
    at = ClusterSpec.parse("h100:8").kept_free(share)
    memory = at.device.memory_bytes
    assert memory - at.room_bytes == int(share * memory)
    assert at.spec_hash() == ClusterSpec.parse("h100:8").spec_hash()


def test_texts_are_fractions_or_gib():
    at = ClusterSpec.parse("dgx-h100:2")
    assert at.kept_free("8GiB").room_bytes == at.device.memory_bytes - 8 * GIB
    assert (
        at.kept_free("8").room_bytes
        == at.kept_free(8).room_bytes
        == at.kept_free("8 GiB").room_bytes
    )
    assert headroom_of("10%") == headroom_of("0.1") == pytest.approx(0.1)
    assert (headroom_words(0.1023), headroom_words(8.0)) == ("10.2 %", "8 GiB")


@pytest.mark.parametrize("wrong", ["-1", "much", "0.5GiB", "100%", "nan", "inf", True, None, [1]])
def test_what_is_no_headroom(wrong):
    with pytest.raises(AutoparError, match="is no memory to keep free"):
        headroom_of(wrong)


def test_what_leaves_nothing():
    with pytest.raises(AutoparError, match=r"leaves nothing of 79\.65 GiB"):
        ClusterSpec.parse("h100:1").kept_free("79GiB")


def test_the_default_is_that_of_the_device_unless_the_file_says_otherwise(tmp_path):
    gpus, cpus = (ClusterSpec.parse(text) for text in ("h100:8", "cpu:4"))
    assert gpus.room_bytes == gpus.device.memory_bytes, "nothing is kept free unless asked for"
    assert gpus.kept_free().headroom == HEADROOM and cpus.kept_free().headroom == 0.0
    path = tmp_path / "mine.yaml"
    gpus.kept_free("4GiB").to_yaml(path)
    again = ClusterSpec.parse(str(path))
    assert (
        again.headroom == 4.0 and again.kept_free().room_bytes == gpus.device.memory_bytes - 4 * GIB
    )
    assert again.kept_free(0).room_bytes == gpus.device.memory_bytes
    assert "headroom" not in ClusterSpec.parse("h100:8").to_yaml()


def test_every_group_of_a_mixed_cluster_keeps_its_share():
    at = ClusterSpec.parse("dgx-h100:1+dgx-a100-40g:1").kept_free(0.1)
    assert [group.headroom for group in at.groups] == [0.1, 0.1]


def test_the_default_has_the_chance_that_it_is_named_for():
    memory = 80.0 * GIB
    assert fit_chance((1 - HEADROOM) * memory, memory) == pytest.approx(FIT_CHANCE)
    assert 0.16 < HEADROOM < 0.17 and fit_chance(memory, memory) == pytest.approx(0.5)
