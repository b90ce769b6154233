"""The datasheet numbers, and which device is which."""

from dataclasses import FrozenInstanceError

import pytest

from accel_parallel.hardware import ACCELERATORS, LINKS, known_device


def test_h200_as_the_device_reports_it() -> None:
    h200 = ACCELERATORS["h200"]
    assert (h200.memory_mib, h200.memory_bandwidth_gb_s, h200.peak_bf16_tflops) == (143_771, 4_800, 989)


@pytest.mark.parametrize(
    ("key", "sold_gb"),
    [
        ("h200", 141),
        ("h100_sxm", 80),
        ("a100_40gb", 40),
        ("a100_80gb", 80),
        ("l40s", 48),
        ("rtx_4090", 24),
        ("b200", 192),
    ],
)
def test_memory_is_near_what_the_device_is_sold_with(key: str, sold_gb: float) -> None:
    # Some are sold in GB, some in GiB, and some memory is held back.
    gib = ACCELERATORS[key].memory_mib / 1024
    assert 0.92 * sold_gb <= gib <= sold_gb


def test_every_accelerator_is_covered_and_has_a_source() -> None:
    assert list(ACCELERATORS) == ["h200", "h100_sxm", "a100_40gb", "a100_80gb", "l40s", "rtx_4090", "b200"]
    for accelerator in ACCELERATORS.values():
        assert accelerator.source
        # FLOPs for each byte read: a slip of a thousand, or a number with sparsity, falls out of this range.
        assert 150 < accelerator.peak_bf16_tflops * 1e3 / accelerator.memory_bandwidth_gb_s < 450


@pytest.mark.parametrize(
    ("key", "gb_s"),
    [
        ("nvlink3", 600 / 2),
        ("nvlink4", 900 / 2),
        ("nvlink5", 1_800 / 2),
        ("pcie4_x16", 16 * 16 / 8),
        ("pcie5_x16", 16 * 32 / 8),
        ("infiniband_hdr", 200 / 8),
        ("infiniband_ndr", 400 / 8),
        ("ethernet_100g", 100 / 8),
    ],
)
def test_links_are_per_direction_in_bytes(key: str, gb_s: float) -> None:
    assert LINKS[key].gb_s_per_direction == gb_s
    assert LINKS[key].source


@pytest.mark.parametrize("key", ACCELERATORS)
def test_a_device_is_known_by_its_name(key: str) -> None:
    name = ACCELERATORS[key].name
    assert known_device(name) == key
    assert known_device(name.removeprefix("NVIDIA ")) == key


def test_the_pcie_card_with_the_same_numbers_is_known() -> None:
    assert known_device("NVIDIA A100-PCIE-40GB") == "a100_40gb"


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GH200 480GB",
        "NVIDIA H200 NVL",
        "NVIDIA H100 PCIe",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA A100 80GB PCIe",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA L40",
        "cpu",
        "",
    ],
)
def test_a_device_with_other_numbers_is_not_taken_for_one_of_ours(name: str) -> None:
    assert known_device(name) is None


def test_tables_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        ACCELERATORS["mine"] = ACCELERATORS["h200"]  # type: ignore[index]
    with pytest.raises(FrozenInstanceError):
        ACCELERATORS["h200"].memory_mib = 0  # type: ignore[misc]
