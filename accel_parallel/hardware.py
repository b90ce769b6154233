"""Accelerators and links: datasheet numbers that plans and MFU are related to, each with where it comes from."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One device. `name` is what torch calls it (`torch.cuda.get_device_name()`)."""

    name: str
    memory_mib: int
    """MiB (2**20 bytes) as `nvidia-smi` reports them; less than the GB it is sold with."""
    memory_bandwidth_gb_s: float
    """GB/s (1e9 bytes)."""
    peak_bf16_tflops: float
    """1e12 FLOP/s of dense bfloat16 products summed in float32; a datasheet's number "with sparsity" is halved."""
    source: str


@dataclass(frozen=True, slots=True)
class Link:
    """One connection of one device.

    The rate is the link's own, before protocol overhead and per direction: a datasheet's "900 GB/s NVLink" is 450.
    """

    name: str
    gb_s_per_direction: float
    """GB/s (1e9 bytes) that one device can send while it receives as much."""
    source: str


ACCELERATORS: Mapping[str, Accelerator] = MappingProxyType(
    {
        "h200": Accelerator("NVIDIA H200", 143_771, 4_800, 989, "NVIDIA H200 datasheet (SXM)"),
        "h100_sxm": Accelerator("NVIDIA H100 80GB HBM3", 81_559, 3_350, 989, "NVIDIA H100 datasheet (SXM)"),
        "a100_40gb": Accelerator("NVIDIA A100-SXM4-40GB", 40_960, 1_555, 312, "NVIDIA A100 datasheet (SXM)"),
        "a100_80gb": Accelerator("NVIDIA A100-SXM4-80GB", 81_920, 2_039, 312, "NVIDIA A100 datasheet (SXM)"),
        "l40s": Accelerator("NVIDIA L40S", 46_068, 864, 362, "NVIDIA L40S datasheet"),
        "rtx_4090": Accelerator("NVIDIA GeForce RTX 4090", 24_564, 1_008, 165.2, "NVIDIA Ada architecture whitepaper"),
        "b200": Accelerator("NVIDIA B200", 183_359, 8_000, 2_250, "NVIDIA DGX B200 datasheet, an eighth of the system"),
    }
)  # fmt: skip

LINKS: Mapping[str, Link] = MappingProxyType(
    {
        "nvlink3": Link("NVLink 3", 300, "NVIDIA A100 datasheet: 600 GB/s both ways"),
        "nvlink4": Link("NVLink 4", 450, "NVIDIA H100 and H200 datasheets: 900 GB/s both ways"),
        "nvlink5": Link("NVLink 5", 900, "NVIDIA Blackwell architecture brief: 1.8 TB/s both ways"),
        # Raw: 16 lanes x 16 or 32 GT/s; the 128b/130b line code takes 1.5 % of it.
        "pcie4_x16": Link("PCIe 4.0 x16", 32, "PCI-SIG PCI Express 4.0: 16 GT/s a lane, raw"),
        "pcie5_x16": Link("PCIe 5.0 x16", 64, "PCI-SIG PCI Express 5.0: 32 GT/s a lane, raw"),
        "infiniband_hdr": Link("InfiniBand HDR", 25, "NVIDIA ConnectX-6 datasheet: 200 Gb/s, one port"),
        "infiniband_ndr": Link("InfiniBand NDR", 50, "NVIDIA ConnectX-7 datasheet: 400 Gb/s, one port"),
        "ethernet_100g": Link("100 Gigabit Ethernet", 12.5, "IEEE 802.3ba: 100 Gb/s, one port"),
    }
)  # fmt: skip

# Whole names only: a "GH200", an "H200 NVL", an "RTX 4090 Laptop GPU" or a MIG slice is another device.
_KEY_OF_DEVICE = {accelerator.name: key for key, accelerator in ACCELERATORS.items()} | {
    "NVIDIA A100-PCIE-40GB": "a100_40gb"
}


def known_device(name: str) -> str | None:
    """The key in `ACCELERATORS` of a device as torch names it, such as "NVIDIA H200"; `None` for any other device.

    Old drivers leave "NVIDIA " out of the name.
    """
    return _KEY_OF_DEVICE.get(f"NVIDIA {name.removeprefix('NVIDIA ').strip()}")
