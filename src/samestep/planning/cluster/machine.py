"""The numbers of a cluster's devices, links and hosts, each with where it comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from samestep.bench import devices
from samestep.bench.devices import Device, find_device
from samestep.dtypes import dtype_name
from samestep.errors import EngineError
from samestep.planning.cluster.calibration import MATMUL_EFFICIENCY
from samestep.planning.cluster.description import Cluster
from samestep.planning.cluster.links import Links
from samestep.planning.cluster.quantities import rate_text
from samestep.planning.cluster.work import Work
from samestep.planning.sizes import size_text
from samestep.recipe.suggest import did_you_mean


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What one device of a cluster does in a second, as assumed: the shares of the peaks are in the rates already, but
    for `peak_flops`, which MFU is stated against. Bytes, FLOPs, seconds."""

    nodes: int
    devices_per_node: int
    peak_flops: float
    matmul_rate: float
    float8_rate: float
    memory_bytes: int
    memory_rate: float
    links: Links
    host_link: float | None
    host_memory_rate: float | None
    """One device's part of its host's memory."""
    assumptions: tuple[str, ...]

    @property
    def ranks(self) -> int:
        return self.nodes * self.devices_per_node


def machine_of(cluster: Cluster, work: Work) -> Machine:
    """The cluster's numbers for this work. EngineError for what neither the cluster nor the table of devices says."""
    device = find_device(cluster.device)
    dtype = dtype_name(work.compute)
    peak = _number(cluster, device, "peak_flops", device and device.peak_flops.get(dtype), f" for {dtype}")
    memory = int(_number(cluster, device, "memory", device and device.memory_bytes))
    bandwidth = _number(cluster, device, "memory_bandwidth", device and device.memory_bytes_per_second)
    alone = cluster.devices_per_node == 1
    intra = 1.0 if alone else _number(cluster, device, "intra_node", device and device.link_bytes_per_second)
    known = MATMUL_EFFICIENCY.get(device.name) if device is not None else None
    efficiency = _number(cluster, device, "matmul_efficiency", known)
    float8 = _float8_peak(cluster, device, work)
    _check_host(cluster, work)
    links, memories = cluster.link_efficiency, cluster.memory_efficiency
    host = cluster.host_memory_bandwidth
    return Machine(
        nodes=cluster.nodes,
        devices_per_node=cluster.devices_per_node,
        peak_flops=peak,
        matmul_rate=peak * efficiency,
        float8_rate=(float8 or peak) * efficiency,
        memory_bytes=memory,
        memory_rate=bandwidth * memories,
        links=Links(
            intra=intra * links,
            inter=None if cluster.inter_node is None else cluster.inter_node * links,
            intra_latency=cluster.intra_node_latency,
            inter_latency=cluster.inter_node_latency,
        ),
        host_link=None if cluster.host_link is None else cluster.host_link * links,
        host_memory_rate=None if host is None else host * memories / cluster.devices_per_node,
        assumptions=(
            f"{cluster.device}: peak {peak / 1e12:.4g} TFLOPs in {dtype}{_source(cluster.peak_flops, device)}; "
            f"memory {size_text(memory)} at {rate_text(bandwidth)}",
            _efficiency_text(cluster, efficiency, device),
            *_float8_text(float8),
            *_links_text(cluster, intra),
            f"links reach {links:.0%} of their speed in large collectives, memories {memories:.0%}",
        ),
    )


def _float8_text(peak: float | None) -> list[str]:
    return [] if peak is None else [f"float8 layers reach the same share of {peak / 1e12:.4g} TFLOPs (not calibrated)"]


def _links_text(cluster: Cluster, intra: float) -> list[str]:
    texts = []
    if cluster.devices_per_node > 1:
        hop = _latency(cluster.intra_node_latency)
        texts.append(f"within a node {rate_text(intra)} per device and direction, {hop}")
    if cluster.inter_node is not None and cluster.nodes > 1:
        hop = _latency(cluster.inter_node_latency)
        speed = rate_text(cluster.inter_node)
        texts.append(f"between nodes {speed} per node and direction, {hop}; no other traffic on it")
    return texts


def _latency(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} µs per hop"


def _source(given: float | None, device: Device | None) -> str:
    return " (given)" if given is not None or device is None else f" ({device.source})"


def _efficiency_text(cluster: Cluster, efficiency: float, device: Device | None) -> str:
    origin = "given" if cluster.matmul_efficiency is not None or device is None else "calibrated on published results"
    return f"matrix multiplications reach {efficiency:.0%} of the peak ({origin})"


Field = Literal["peak_flops", "memory", "memory_bandwidth", "intra_node", "matmul_efficiency"]


def _number(cluster: Cluster, device: Device | None, field: Field, known: Any, for_what: str = "") -> float:
    """What the cluster gives, or else what is known of its device."""
    given = getattr(cluster, field)
    if given is not None:
        return float(given)
    if known is not None:
        return float(known)
    if device is None:
        known_names = [entry.name for entry in devices.DEVICES]
        meant = did_you_mean(cluster.device, [name.lower() for name in known_names])
        raise EngineError(
            f"{cluster.device!r} is not in the table of devices{meant}",
            where="--cluster device",
            remedy=f"Known are {', '.join(known_names)}; for another one give {field} and its kin too.",
        )
    raise EngineError(
        f"nothing is known of {device.name}'s {field}{for_what}",
        where=f"--cluster {field}",
        remedy=f"Give it, e.g. --cluster {field}=....",
    )


def _float8_peak(cluster: Cluster, device: Device | None, work: Work) -> float | None:
    """The peak of float8 layers; None where there are none. A given peak is of the compute dtype: half of it."""
    if not any(unit.float8_share for unit in work.units):
        return None
    known = device and device.peak_flops.get("float8")
    if cluster.peak_flops is not None:
        return 2 * cluster.peak_flops
    return _number(cluster, device, "peak_flops", known, " for float8")


def _check_host(cluster: Cluster, work: Work) -> None:
    if work.offloaded.nvme:
        raise EngineError(
            "the time of nvme offload is not modelled", where="engine.offload", remedy="Plan with cpu offload."
        )
    needed = ["host_link"] if work.offloaded.parameters or work.offloaded.optimizer else []
    needed += ["host_memory_bandwidth"] if work.offloaded.optimizer else []
    for field in needed:
        if getattr(cluster, field) is None:
            raise EngineError(
                "is missing, and the recipe offloads to the host",
                where=f"--cluster {field}",
                remedy=f"Give it, e.g. --cluster {field}=25GB/s.",
            )
