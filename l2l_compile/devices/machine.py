"""A machine, described by the speed of its device, of its links and of its host. A simulation runs on such a machine."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from ..errors import OptionError

FOLDER = "machines"


@dataclass(frozen=True)
class Machine:
    """Figures of a machine; bytes, bytes per second, FLOP per second, seconds.

    name               of the machine
    flops              dense FLOP/s of matrix products by dtype ("float32", "bfloat16", ...)
    flops_share        the share of `flops` that matrix products reach
    memory_bandwidth   of the device's memory
    memory_share       the share of `memory_bandwidth` that kernels reach
    device_memory      bytes of the device
    h2d, d2h           bandwidth of the link from page-locked memory, each way
    pageable           bandwidth of the link from and to other memory, which the caller waits for
    latency            of a copy over the link
    host_bandwidth     bytes that elementwise work of the host reads and writes in a second, all threads together
    host_memory        bytes of the host
    launch             the caller's time for a kernel or a copy; where the host is the device, for an operation that it calls
    node               the caller's time for a node of a program
    micro_batch        the caller's time for each micro-batch of a segment, beside its kernels
    devices            devices that share the host: its memory, its bandwidth, the copies that it can serve
    link               bandwidth between the devices of a host, each way, of each of them
    link_latency       of a message between two devices of a host
    network            bandwidth between hosts, each way, of all devices of a host together
    network_latency    of a message between two hosts
    overlaps           whether device and host work at the same time; where it is False the host is the device
    sources            where each figure is from

    A figure that is None is not known, and a simulation that needs it is refused.
    """

    name: str
    flops: dict[str, float]
    memory_bandwidth: float
    device_memory: float
    h2d: float
    d2h: float
    pageable: float
    host_bandwidth: float
    host_memory: float
    flops_share: float = 1.0
    memory_share: float = 1.0
    latency: float = 1e-5
    launch: float = 8e-6
    node: float = 2e-5
    micro_batch: float = 2e-5
    devices: int | None = None
    link: float | None = None
    link_latency: float | None = None
    network: float | None = None
    network_latency: float | None = None
    overlaps: bool = True
    sources: dict[str, str] = field(default_factory=dict)

    def flops_of(self, dtype: torch.dtype) -> float:
        """FLOP/s that matrix products of a dtype reach. Raises `OptionError` for a dtype without a figure."""
        name = str(dtype).removeprefix("torch.")
        if name not in self.flops:
            raise OptionError(f"machine '{self.name}' has no figure for FLOP/s in {name}; it has {', '.join(self.flops)}")
        return self.flops[name] * self.flops_share

    @property
    def kernel_bandwidth(self) -> float:
        """Bytes that kernels of the device read and write in a second."""
        return self.memory_bandwidth * self.memory_share

    def known(self, figure: str) -> float:
        """A figure that not every machine has. Raises `OptionError` if this one has none."""
        value = getattr(self, figure)
        if value is None:
            raise OptionError(
                f"machine '{self.name}' has no figure '{figure}', which a simulation of several ranks needs: give one, as in "
                f"dataclasses.replace(machine, {figure}=...), or in a file of the machine"
            )
        return value

    def shared_by(self, devices: int) -> Machine:
        """The share of the machine that each of `devices` devices of its host has, while all of them do the same work."""
        if devices == 1:
            return self
        own = self.host_bandwidth / devices
        copies = {way: min(getattr(self, way), own) for way in ("h2d", "d2h", "pageable")}
        return replace(self, host_bandwidth=own, host_memory=self.host_memory / devices, **copies)

    def save(self, path: str | Path) -> None:
        """Write the figures as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, name: str | Path) -> Machine:
        """A machine from a JSON file, or a machine of the package by its name ("h200").

        Raises `OptionError` for an unknown name, with the known names, and for a file with other contents.
        """
        path = Path(name)
        shipped = resources.files("l2l_compile") / FOLDER / f"{name}.json"
        if path.suffix == ".json" and path.is_file():
            text = path.read_text()
        elif shipped.is_file():
            text = shipped.read_text()
        else:
            raise OptionError(f"no machine {str(name)!r}: give the path of a JSON file, or one of {', '.join(names())}")
        return cls.of(_figures_in(text, str(name)), str(name))

    @classmethod
    def of(cls, figures: dict[str, Any], name: str) -> Machine:
        """A machine from the content of its file."""
        known = {f.name for f in fields(cls)}
        if unknown := sorted(figures.keys() - known):
            raise OptionError(f"machine {name!r}: unknown figures {', '.join(unknown)}; known are {', '.join(sorted(known))}")
        try:
            return cls(**figures)
        except TypeError as error:
            raise OptionError(f"machine {name!r}: {error}") from error


def _figures_in(text: str, name: str) -> dict[str, Any]:
    """The content of a machine's file."""
    try:
        figures = json.loads(text)
    except ValueError as error:
        raise OptionError(f"machine {name!r}: the file is not JSON: {error}") from error
    if not isinstance(figures, dict):
        raise OptionError(f"machine {name!r}: the file holds no figures by name; `Machine.save` writes one")
    return figures


def names() -> list[str]:
    """The machines that come with the package."""
    folder = resources.files("l2l_compile") / FOLDER
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))
