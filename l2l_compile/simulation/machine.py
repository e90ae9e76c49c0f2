"""A machine, described by the speed of its device, of its links and of its host. A simulation runs on such a machine."""

from __future__ import annotations

import difflib
import json
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from l2l_compile.errors import OptionError
from l2l_compile.lanes import Lane
from l2l_compile.simulation.machine_figures import check_names, check_values

FOLDER = "machines"


@dataclass(frozen=True)
class Machine:
    """Figures of a machine; bytes, bytes per second, FLOP per second, seconds.

    name               of the machine
    flops              dense FLOP/s of matrix products by dtype ("float32", "bfloat16", ...)
    flops_share        the share of `flops` that matrix products reach
    memory_bandwidth   of the device's memory
    memory_share       the share of `memory_bandwidth` that kernels reach
    device_memory      bytes of the device, as its driver reports them
    device_reserve     bytes of `device_memory` that tensors cannot have: of the driver, of the context (CUDA), of libraries
    h2d, d2h           bandwidth of the link from page-locked memory, each way
    pageable           bandwidth of the link from and to other memory, which the caller waits for
    latency            of a copy over the link
    host_bandwidth     bytes that elementwise work of the host reads and writes in a second, all threads together
    host_memory        bytes of the host
    host_reserve       bytes of `host_memory` that tensors cannot have: of the operating system, of Python and PyTorch
    launch             the caller's time for a kernel or a copy; where the host is the device, for an operation that it calls
    node               the caller's time for a node of a program
    micro_batch        the caller's time for each micro-batch of a segment, beside its kernels
    devices            devices that share the host: its memory, its bandwidth, the copies that it can serve
    link               bandwidth between the devices of a host, each way, of each of them
    link_latency       of a message between two devices of a host
    network            bandwidth between hosts, each way, of all devices of a host together
    network_latency    of a message between two hosts
    disk_read, disk_write  bandwidth of a disk of the option `disk`, of direct transfers of some MiB; both ways at once. Those of several
                       folders add up
    overlaps           whether device and host work at the same time; where it is False the host is the device
    sources            where each figure is from

    A figure that is None is not known, and a simulation that needs it is refused. Raises `OptionError` for a figure that has
    not the type or the range of its unit.
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
    device_reserve: float = 0
    host_reserve: float = 0
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
    disk_read: float | None = None
    disk_write: float | None = None
    overlaps: bool = True
    sources: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_values(vars(self), f"machine {self.name!r}")

    def flops_of(self, dtype: torch.dtype) -> float:
        """FLOP/s that matrix products of a dtype reach. Raises `OptionError` for a dtype without a figure."""
        name = str(dtype).removeprefix("torch.")
        if name not in self.flops:
            wide = dtype == torch.bfloat16 and "float16" in self.flops
            remedy = '; its tensor cores compute in float16: precision="fp16"' if wide else ""
            raise OptionError(f"machine '{self.name}' has no figure for FLOP/s in {name}; it has {', '.join(self.flops)}{remedy}")
        return self.flops[name] * self.flops_share

    @property
    def device_room(self) -> int:
        """Bytes of the device that the tensors of a step may have."""
        return int(self.device_memory - self.device_reserve)

    @property
    def host_room(self) -> int:
        """Bytes of the host that the model, its gradients, its optimizer's state and the stashes may have."""
        return int(self.host_memory - self.host_reserve)

    @property
    def kernel_bandwidth(self) -> float:
        """Bytes that kernels of the device read and write in a second."""
        return self.memory_bandwidth * self.memory_share

    def known(self, figure: str) -> float:
        """A figure that not every machine has. Raises `OptionError` if this one has none."""
        value = getattr(self, figure)
        if value is None:
            raise OptionError(
                f"machine '{self.name}' has no figure '{figure}', which this simulation needs: give one, as in "
                f"dataclasses.replace(machine, {figure}=...), or in a file of the machine"
            )
        return value

    def shared_by(self, devices: int) -> Machine:
        """The share of the machine that each of `devices` devices of its host has, while all of them do the same work."""
        if devices == 1:
            return self
        own = self.host_bandwidth / devices
        copies = {way: min(getattr(self, way), own) for way in (Lane.H2D, Lane.D2H, "pageable")}
        divided = ("host_memory", "host_reserve", "disk_read", "disk_write")
        parts = {name: getattr(self, name) / devices for name in divided if getattr(self, name) is not None}
        return replace(self, host_bandwidth=own, **parts, **copies)

    def save(self, path: str | Path) -> None:
        """Write the figures as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, name: str | Path) -> Machine:
        """A machine from a JSON file, or a machine of the package by its name ("h200", "RTX 4090").

        Raises `OptionError` for an unknown name, with the known names, and for a file with other contents.
        """
        path = Path(name)
        if path.suffix == ".json" and _is_file(path):
            return cls.of(_figures_in(path, str(name)), str(name))
        found = _shipped(str(name))
        if found is None:
            raise OptionError(_no_machine(str(name)))
        return cls.of(_figures_in(resources.files("l2l_compile.simulation") / FOLDER / f"{found}.json", found), found)

    @classmethod
    def of(cls, figures: dict[str, Any], name: str) -> Machine:
        """A machine from the content of its file `name`. Raises `OptionError`, which names the file, the figure and its unit."""
        where = f"machine {name!r}"
        needed = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]
        check_names(figures, (f.name for f in fields(cls)), needed, where)
        check_values(figures, where, units=True)
        return cls(**figures)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long for the file system
        return False


def _figures_in(path: Any, name: str) -> dict[str, Any]:
    """The content of a machine's file."""
    try:
        figures = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"machine {name!r}: the file cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise OptionError(f"machine {name!r}: the file is not JSON: {error}") from error
    if not isinstance(figures, dict):
        raise OptionError(f"machine {name!r}: the file holds no figures by name; `Machine.save` writes one")
    return figures


def names() -> list[str]:
    """The machines that come with the package."""
    folder = resources.files("l2l_compile.simulation") / FOLDER
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def _shipped(name: str) -> str | None:
    """The machine of the package that a name means; case, spaces and the maker's name do not matter. None if there is none."""
    return {_plain(known): known for known in names()}.get(_plain(name))


def _plain(name: str) -> str:
    """A name without case, without signs between words, and without words that all cards of a maker have."""
    lowered = name.lower().replace("nvidia", "").replace("geforce", "")
    return "".join(sign for sign in lowered if sign.isalnum())


def _no_machine(name: str) -> str:
    near = difflib.get_close_matches(_plain(name), names(), 1)
    hint = f" (did you mean '{near[0]}'?)" if near else ""
    return f"no machine {name!r}{hint}: give the path of a JSON file, or one of {', '.join(names())}"
