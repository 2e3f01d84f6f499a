"""The cluster that a run is planned for: a YAML file, or FIELD=VALUE on the command line, as frozen data."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError

from samestep.errors import Problem, RecipeError
from samestep.planning.cluster.quantities import parse_rate
from samestep.planning.sizes import parse_size
from samestep.recipe.document import Document, parse_text, parse_value, read_file
from samestep.recipe.schema import Section
from samestep.recipe.suggest import did_you_mean


def _size(value: Any) -> Any:
    return parse_size(value) if isinstance(value, str) else value


Rate = Annotated[float, BeforeValidator(parse_rate)]
Size = Annotated[int, BeforeValidator(_size), Field(gt=0, lt=2**63)]
Share = Annotated[float, Field(gt=0, le=1)]
Latency = Annotated[float, Field(ge=0, le=1)]


class Cluster(Section):
    """Devices, nodes and links. Speeds are text such as 400Gb/s (bits) or 50GB/s (bytes), of one direction."""

    device: str
    """Name of the device, such as A100-80GB. A device that is not in the table needs peak_flops, memory,
    memory_bandwidth, intra_node and matmul_efficiency."""
    nodes: Annotated[int, Field(gt=0, le=100_000)]
    """Number of nodes."""
    devices_per_node: Annotated[int, Field(gt=0, le=1024)]
    """Devices of each node. engine.ranks becomes nodes x devices_per_node."""
    intra_node: Rate | None = None
    """Speed of a device's links to the other devices of its node; null: the device's own links."""
    inter_node: Rate | None = None
    """Speed of a node's network, all its adapters together. Needed for more than one node."""
    intra_node_latency: Latency = 3.4e-6
    """Seconds per hop of a ring between devices of a node."""
    inter_node_latency: Latency = 9.6e-6
    """Seconds per hop of a ring between nodes."""
    link_efficiency: Share = 0.8
    """Share of their speed that links reach in large collectives."""
    memory_efficiency: Share = 0.8
    """Share of their speed that memories reach."""
    matmul_efficiency: Share | None = None
    """Share of the peak that matrix multiplications reach; null: as calibrated for the device."""
    peak_flops: Annotated[float, Field(gt=0, lt=1e21)] | None = None
    """Peak dense FLOPs per second of one device in the recipe's compute dtype; null: the table's."""
    memory: Size | None = None
    """Memory of one device, e.g. 80GB; null: the table's."""
    memory_bandwidth: Rate | None = None
    """Speed of a device's memory; null: the table's."""
    host_link: Rate | None = None
    """Speed between a device and its host. Needed where the recipe offloads."""
    host_memory_bandwidth: Rate | None = None
    """Speed of a host's memory, shared by its devices. Needed where the recipe offloads the optimizer."""
    price_per_device_hour: Annotated[float, Field(ge=0, lt=1e9)] | None = None
    """Price of a device for an hour, in any currency; null: no cost is given."""

    @property
    def ranks(self) -> int:
        """Ranks of a run: one on every device."""
        return self.nodes * self.devices_per_node


def load(given: Sequence[str]) -> Cluster:
    """The cluster of files and FIELD=VALUE texts, in order, so that a later one wins. RecipeError with all problems."""
    document = Document(source="--cluster", data={})
    for text in given:
        if re.match(r"\s*[a-z_]+\s*=", text):
            document = _set(document, text)
        else:
            read = parse_text(read_file(Path(text)), text)
            document = replace(
                read, data=document.data | read.data, problems=document.problems + read.problems,
                overridden={path: o for path, o in document.overridden.items() if path[0] not in read.data},
            )  # fmt: skip
    try:
        cluster = Cluster.model_validate(document.data)
    except ValidationError as error:
        raise RecipeError(document.source, [*document.problems, *_problems(error, document)]) from None
    if document.problems:
        raise RecipeError(document.source, list(document.problems))
    if cluster.nodes > 1 and cluster.inter_node is None:
        what = f"is missing: the speed of a node's network, such as 400Gb/s, for {cluster.nodes} nodes"
        raise RecipeError(document.source, [Problem(field="inter_node", what=what)])
    return cluster


def _set(document: Document, text: str) -> Document:
    name, _, value = text.partition("=")
    name = name.strip()
    try:
        parsed = parse_value(value)
    except ValueError as error:
        problem = Problem(field=f"--cluster {name}", what=str(error))
        return replace(document, problems=(*document.problems, problem))
    overridden = {**document.overridden, (name,): f"--cluster {name}"}
    return replace(document, data={**document.data, name: parsed}, overridden=overridden)


def _problems(error: ValidationError, document: Document) -> list[Problem]:
    found: dict[str, Problem] = {}
    for detail in error.errors(include_url=False):
        name = str(detail["loc"][0]) if detail["loc"] else ""
        if detail["type"] == "extra_forbidden":
            meant = did_you_mean(name, Cluster.model_fields) or f"; known here: {', '.join(Cluster.model_fields)}"
            what = f"unknown key{meant}"
        elif detail["type"] == "missing":
            said = str(Cluster.model_fields[name].description).split(". ")[0].rstrip(".")
            what = f"is missing: {said[0].lower()}{said[1:]}"
        else:
            what = detail["msg"].removeprefix("Value error, ")
            what = (
                what[0].lower() + what[1:] + ("" if detail["type"] == "value_error" else f", not {detail['input']!r}")
            )
        found.setdefault(name, document.problem((name,), what))
    return list(found.values())
