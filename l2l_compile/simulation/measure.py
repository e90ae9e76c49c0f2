"""`measure_machine`: the figures of this machine, by small measurements."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from l2l_compile.devices.host import HOST, available_memory, cores_beside_a_device, is_host, physical_memory
from l2l_compile.devices.registry import default_device
from l2l_compile.errors import LoweringError
from l2l_compile.host.compiled_step.compiled_step import CompiledStep
from l2l_compile.host.gradients import GradientMemory
from l2l_compile.host.step.torch_step import hyperparameters
from l2l_compile.host.wire import Wires
from l2l_compile.lanes import Lane
from l2l_compile.memory.pages import unlocked
from l2l_compile.simulation.clocks import HostStopwatch, Stopwatch, WaitingStopwatch, stopwatch_of
from l2l_compile.simulation.machine import Machine
from l2l_compile.simulation.overhead import Overhead, measured_overhead

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_HOST_SIZE, _DEVICE_SIZE = 512, 4096  # rows and columns of the matrices
_HOST_BYTES, _DEVICE_BYTES = 1 << 26, 1 << 28  # bytes of a tensor: more than the caches hold
_SMALL_BYTES = 1 << 12  # bytes of a copy whose time is nearly all latency
_LONG = 0.05  # seconds of products: clocks of a device that was idle rise meanwhile
_LAUNCHES = 500  # operations that are launched in a row


@dataclass(frozen=True)
class Link:
    """The bandwidth of a link in bytes per second, and its latency in seconds, from the times of two copies."""

    bandwidth: float
    latency: float


def measure_machine(device: torch.device | str | None = None) -> Machine:
    """Measure the figures of this machine and a device of it (by default the device on which layers run), in a few seconds.

    Each figure is a median of repeats. With one thread (`torch.set_num_threads`), figures of the host count CPU seconds of that
    thread, so that other processes do not matter. If the host is its own device, the link is a copy in its memory, and nothing
    overlaps.
    """
    chosen = torch.device(device) if device is not None else default_device()
    with torch.random.fork_rng([] if is_host(chosen) else [chosen]):
        with torch.no_grad():
            figures = _host_as_device() if is_host(chosen) else _accelerator(chosen)
        return _machine(chosen, figures, measured_overhead(chosen))


def _machine(device: torch.device, figures: dict, overhead: Overhead) -> Machine:
    figures |= {"node": overhead.node, "micro_batch": overhead.micro_batch}
    figures |= {"host_memory": physical_memory(), "host_reserve": _memory_in_use(), "overlaps": not is_host(device)}
    how = f"measured by measure_machine, torch {torch.__version__}, {torch.get_num_threads()} threads"
    sources = {field.name: how for field in fields(Machine) if field.name in figures and field.name != "overlaps"}
    sources |= {"flops_share": "1: flops are measured", "memory_share": "1: memory_bandwidth is measured"}
    sources |= {"host_memory": "of the operating system"}
    sources |= {"device_memory": "of the operating system" if is_host(device) else "of the device's driver"}
    sources |= {"host_reserve": "of the operating system: memory in use while this was measured"}
    sources |= {
        "device_reserve": sources["host_reserve"] if is_host(device) else "of the device's driver: memory in use, less tensors"
    }
    return Machine(name=_name_of(device), sources=sources, **figures)


def _host_as_device() -> dict:
    watch = HostStopwatch()
    bandwidth = elementwise_bandwidth(watch, HOST, _HOST_BYTES)
    copies = link(watch, HOST, HOST, _HOST_BYTES)
    return {
        "flops": flops(watch, HOST, _HOST_SIZE),
        "memory_bandwidth": bandwidth,
        "host_bandwidth": bandwidth,
        "device_memory": physical_memory(),
        "device_reserve": _memory_in_use(),
        **{Lane.H2D: copies.bandwidth, Lane.D2H: copies.bandwidth, "pageable": copies.bandwidth, "latency": copies.latency},
        "launch": launch(HOST),
    }


def _accelerator(device: torch.device) -> dict:
    with torch.cuda.device(device):
        watch = stopwatch_of(device)
        to_device, to_host = (link(watch, *ends, _DEVICE_BYTES, pinned=True) for ends in ((HOST, device), (device, HOST)))
        waiting = WaitingStopwatch(lambda: torch.cuda.synchronize(device))
        pageable = [link(waiting, *ends, _HOST_BYTES) for ends in ((HOST, device), (device, HOST))]
        return {
            "flops": flops(watch, device, _DEVICE_SIZE),
            "memory_bandwidth": elementwise_bandwidth(watch, device, _DEVICE_BYTES),
            "host_bandwidth": update_bandwidth(WaitingStopwatch(_nothing), cores_beside_a_device()),
            "device_memory": torch.cuda.get_device_properties(device).total_memory,
            "device_reserve": _device_memory_in_use(device),
            Lane.H2D: to_device.bandwidth,
            Lane.D2H: to_host.bandwidth,
            "pageable": min(copies.bandwidth for copies in pageable),
            "latency": max(to_device.latency, to_host.latency),
            "launch": launch(device),
        }


def flops(watch: Stopwatch, device: torch.device, size: int) -> dict[str, float]:
    """FLOP/s of a product of square matrices, by dtype."""
    rates = {}
    for dtype in _DTYPES:
        side = size if dtype.itemsize > 2 or is_host(device) else 2 * size  # matrix units need larger products for their rate
        rates[str(dtype).removeprefix("torch.")] = 2 * side**3 / watch.seconds(_product(device, side, dtype), at_least=_LONG)
    return rates


def _product(device: torch.device, size: int, dtype: torch.dtype) -> Callable[[], object]:
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    into = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=into)


def elementwise_bandwidth(watch: Stopwatch, device: torch.device, size: int) -> float:
    """Bytes per second, read and written, of the elementwise sum of two tensors of `size` bytes."""
    a, b, c = (torch.zeros(size // 4, dtype=torch.float32, device=device) for _ in range(3))
    return 3 * size / watch.seconds(lambda: torch.add(a, b, out=c))


def update_bandwidth(watch: Stopwatch, threads: int) -> float:
    """Bytes per second, read and written, of an update of AdamW as overlapped updates run it: compiled, on threads of its own.

    PyTorch's own threads move fewer bytes, since its kernels fetch nothing ahead. Where no C compiler works, they are measured.
    """
    weight = torch.nn.Parameter(torch.zeros(_HOST_BYTES // 2))
    optimizer = torch.optim.AdamW([weight], fused=True)
    optimizer.state[weight] = {
        "step": torch.ones(()),
        "exp_avg": torch.zeros_like(weight),
        "exp_avg_sq": torch.zeros_like(weight),
    }
    gradient, wires = torch.zeros_like(weight, dtype=torch.bfloat16), Wires(unlocked())
    wires.load([weight], [torch.bfloat16])
    step, shared = CompiledStep(optimizer, wires, threads, GradientMemory()), hyperparameters(optimizer)
    moved = 2 * gradient.nbytes + 6 * weight.nbytes  # gradient and wire; weight and two moments, read and written
    try:
        return moved / watch.seconds(lambda: step.on(shared, {weight: gradient}, 1.0))
    except LoweringError:
        return elementwise_bandwidth(HostStopwatch(), HOST, _HOST_BYTES)


def _nothing() -> None:
    """The host has done its work when the call returns."""


def link(watch: Stopwatch, source: torch.device, target: torch.device, size: int, pinned: bool = False) -> Link:
    """The link for copies from one device to another; with `pinned`, host memory is page-locked."""
    return link_of(*((count, watch.seconds(_copy(source, target, count, pinned))) for count in (_SMALL_BYTES, size)))


def link_of(small: tuple[int, float], large: tuple[int, float]) -> Link:
    """The link from the (bytes, seconds) of a small and of a large copy."""
    bandwidth = (large[0] - small[0]) / max(large[1] - small[1], 1e-9)
    return Link(bandwidth, max(small[1] - small[0] / bandwidth, 1e-9))


def _copy(source: torch.device, target: torch.device, size: int, pinned: bool) -> Callable[[], object]:
    there, here = (
        torch.zeros(size, dtype=torch.uint8, device=place, pin_memory=pinned and is_host(place)) for place in (source, target)
    )
    return lambda: here.copy_(there, non_blocking=pinned)


def launch(device: torch.device) -> float:
    """The caller's seconds to launch an operation, measured on tensors of one entry."""
    x = torch.zeros(1, device=device)
    watch = HostStopwatch()

    def launches() -> None:
        for _ in range(_LAUNCHES):
            torch.ops.aten.add.Tensor(x, x)

    return watch.seconds(launches) / _LAUNCHES


def _memory_in_use() -> int:
    """Bytes of the host that no new tensor can have, by the operating system's estimate; 0 where it gives none."""
    return max(0, physical_memory() - available_memory())


def _device_memory_in_use(device: torch.device) -> int:
    """Bytes of a CUDA device that no new tensor can have: of the context, of libraries, of other processes."""
    free, total = torch.cuda.mem_get_info(device)
    return max(0, total - free - torch.cuda.memory_reserved(device))


def _name_of(device: torch.device) -> str:
    return _cpu_model() if is_host(device) else torch.cuda.get_device_name(device)


def _cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    models = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())
