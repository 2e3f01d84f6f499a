"""What devices can do at most, by their makers' data sheets. A device that is not listed has no entry, never a guess.

Peaks are dense: data sheets of NVIDIA often print those of 2:4 sparsity, twice as large. 16-bit and float8 peaks are
those with sums in fp32, where a device has others as well. `float32` is without TF32, which `tf32` is for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_TERA, _GIGA = 1e12, 1e9


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device model.

    `reported` are the names by which drivers report it (`torch.cuda.get_device_name`). `peak_flops` is by dtype
    (float32, tf32, bfloat16, float16, float8), in floating-point operations per second. `link_bytes_per_second` is what
    one device can send to its peers in the same machine, in one direction: NVLink or Infinity Fabric, otherwise PCIe.
    """

    name: str
    reported: tuple[str, ...]
    peak_flops: Mapping[str, float]
    memory_bytes: float
    memory_bytes_per_second: float
    link: str
    link_bytes_per_second: float
    source: str


def _peaks(
    *, float32: float, bfloat16: float, tf32: float | None = None, float8: float | None = None
) -> Mapping[str, float]:
    """Peaks in TFLOP/s as a mapping in FLOP/s. On every device here float16 is as fast as bfloat16."""
    listed = {"float32": float32, "tf32": tf32, "bfloat16": bfloat16, "float16": bfloat16, "float8": float8}
    return MappingProxyType({dtype: peak * _TERA for dtype, peak in listed.items() if peak is not None})


_A100 = _peaks(float32=19.5, tf32=156, bfloat16=312)
_HOPPER = _peaks(float32=66.9, tf32=494.7, bfloat16=989.4, float8=1978.9)

DEVICES: tuple[Device, ...] = (
    Device(
        name="A100-40GB",
        reported=("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB", "A100-PCIE-40GB"),
        peak_flops=_A100,
        memory_bytes=40 * _GIGA,
        memory_bytes_per_second=1555 * _GIGA,
        link="NVLink 3",
        link_bytes_per_second=300 * _GIGA,
        source="NVIDIA A100 Tensor Core GPU data sheet (2020): 40 GB",
    ),
    Device(
        name="A100-80GB",
        reported=("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        peak_flops=_A100,
        memory_bytes=80 * _GIGA,
        memory_bytes_per_second=2039 * _GIGA,
        link="NVLink 3",
        link_bytes_per_second=300 * _GIGA,
        source="NVIDIA A100 Tensor Core GPU data sheet (2022): 80 GB SXM",
    ),
    Device(
        name="A100-80GB-PCIe",
        reported=("NVIDIA A100 80GB PCIe", "NVIDIA A100-PCIE-80GB"),
        peak_flops=_A100,
        memory_bytes=80 * _GIGA,
        memory_bytes_per_second=1935 * _GIGA,
        link="PCIe 4 x16",
        link_bytes_per_second=32 * _GIGA,
        source="NVIDIA A100 Tensor Core GPU data sheet (2022): 80 GB PCIe, without an NVLink bridge",
    ),
    Device(
        name="H100-SXM",
        reported=("NVIDIA H100 80GB HBM3",),
        peak_flops=_HOPPER,
        memory_bytes=80 * _GIGA,
        memory_bytes_per_second=3350 * _GIGA,
        link="NVLink 4",
        link_bytes_per_second=450 * _GIGA,
        source="NVIDIA H100 Tensor Core GPU Architecture white paper and data sheet: H100 SXM5",
    ),
    Device(
        name="H100-PCIe",
        reported=("NVIDIA H100 PCIe",),
        peak_flops=_peaks(float32=51.2, tf32=378, bfloat16=756, float8=1513),
        memory_bytes=80 * _GIGA,
        memory_bytes_per_second=2000 * _GIGA,
        link="PCIe 5 x16",
        link_bytes_per_second=64 * _GIGA,
        source="NVIDIA H100 Tensor Core GPU Architecture white paper and data sheet: H100 PCIe, no NVLink bridge",
    ),
    Device(
        name="H200",
        reported=("NVIDIA H200",),
        peak_flops=_HOPPER,
        memory_bytes=141 * _GIGA,
        memory_bytes_per_second=4800 * _GIGA,
        link="NVLink 4",
        link_bytes_per_second=450 * _GIGA,
        source="NVIDIA H200 Tensor Core GPU data sheet: H200 SXM, whose compute is the H100 SXM's",
    ),
    Device(
        name="B200",
        reported=("NVIDIA B200",),
        peak_flops=_peaks(float32=75, tf32=1125, bfloat16=2250, float8=4500),
        memory_bytes=180 * _GIGA,
        memory_bytes_per_second=7700 * _GIGA,
        link="NVLink 5",
        link_bytes_per_second=900 * _GIGA,
        source="NVIDIA HGX B200 data sheet (an eighth of its totals; dense is half of what it prints)",
    ),
    Device(
        name="L40S",
        reported=("NVIDIA L40S",),
        peak_flops=_peaks(float32=91.6, tf32=183, bfloat16=362, float8=733),
        memory_bytes=48 * _GIGA,
        memory_bytes_per_second=864 * _GIGA,
        link="PCIe 4 x16",
        link_bytes_per_second=32 * _GIGA,
        source="NVIDIA L40S data sheet",
    ),
    Device(
        name="A10",
        reported=("NVIDIA A10",),
        peak_flops=_peaks(float32=31.2, tf32=62.5, bfloat16=125),
        memory_bytes=24 * _GIGA,
        memory_bytes_per_second=600 * _GIGA,
        link="PCIe 4 x16",
        link_bytes_per_second=32 * _GIGA,
        source="NVIDIA A10 Tensor Core GPU data sheet",
    ),
    Device(
        name="RTX-4090",
        reported=("NVIDIA GeForce RTX 4090",),
        peak_flops=_peaks(float32=82.6, tf32=82.6, bfloat16=165.2, float8=330.3),
        memory_bytes=24 * _GIGA,
        memory_bytes_per_second=1008 * _GIGA,
        link="PCIe 4 x16",
        link_bytes_per_second=32 * _GIGA,
        source="NVIDIA Ada GPU Architecture white paper, appendix A: GeForce RTX 4090, sums in fp32",
    ),
    Device(
        name="MI300X",
        reported=("AMD Instinct MI300X", "AMD Instinct MI300X OAM"),
        peak_flops=_peaks(float32=163.4, tf32=653.7, bfloat16=1307.4, float8=2614.9),
        memory_bytes=192 * _GIGA,
        memory_bytes_per_second=5300 * _GIGA,
        link="Infinity Fabric",
        link_bytes_per_second=448 * _GIGA,
        source="AMD Instinct MI300X accelerator data sheet: 7 links of 128 GB/s, both directions together",
    ),
)


def find_device(name: str) -> Device | None:
    """The device of this table's name or of a name that a driver reports, in any case; None when it is not listed.

    The whole name has to match: a part of a device (MIG) and a relative of another speed are not the device.
    """
    wanted = name.strip().casefold()
    for device in DEVICES:
        if wanted in (known.casefold() for known in (device.name, *device.reported)):
            return device
    return None


def peak_flops(name: str, dtype: str) -> float | None:
    """Dense peak of a device at a dtype, in FLOP/s; None where the table does not say it."""
    device = find_device(name)
    return device.peak_flops.get(dtype) if device else None
