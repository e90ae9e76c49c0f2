"""The conditions of the figures: hardware, driver, versions, memory."""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
import time
from pathlib import Path

import torch

from .cases import Case, Context, Report


def cases(context: Context) -> list[Case]:
    return [
        Case("versions", versions, 10),
        Case("host", host, 10),
        Case("device", lambda report: device(report, context), 20),
    ]


def versions(report: Report) -> None:
    report.fact("python", platform.python_version())
    report.fact("torch", torch.__version__)
    report.fact("CUDA of torch", torch.version.cuda)
    report.fact("cuDNN", torch.backends.cudnn.version())
    for name in ("triton", "transformers", "networkx"):
        report.fact(name, _version(name))
    report.fact("C compiler", shutil.which("cc") or shutil.which("gcc"), should="there: compile_update and Inductor need one")
    report.fact("driver", _smi("driver_version"))


def host(report: Report) -> None:
    memory = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    report.fact("processor", _processor())
    report.fact("cores by affinity", len(os.sched_getaffinity(0)), should="those that the host lane counts")
    report.fact("cores in all", os.cpu_count())
    report.fact("threads of torch", torch.get_num_threads())
    for name in ("MemTotal", "MemAvailable", "HugePages_Total"):
        report.fact(name, memory.get(name, "").strip())
    for name in ("enabled", "shmem_enabled"):
        path = Path("/sys/kernel/mm/transparent_hugepage") / name
        report.fact(f"transparent huge pages, {name}", path.read_text().strip() if path.exists() else None)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    report.fact("locked memory, limit", "none" if soft == resource.RLIM_INFINITY else soft)
    report.fact("C library", ctypes.util.find_library("c"))


def device(report: Report, context: Context) -> None:
    report.fact("device type", context.device.type)
    if not context.on_gpu:
        report.fact("device", "cpu")
        return
    start = time.perf_counter()
    (torch.ones(1, device=context.device) + 1).item()
    report.fact("first kernel", time.perf_counter() - start, "s")
    properties = torch.cuda.get_device_properties(context.device)
    free, total = torch.cuda.mem_get_info(context.device)
    report.fact("device", properties.name)
    report.fact("capability", f"{properties.major}.{properties.minor}")
    report.fact("multiprocessors", properties.multi_processor_count)
    report.fact("device memory", total / 2**30, "GiB")
    report("device memory free", free / total, "of all", least=0.9, should="at least 0.9: nobody else is there")
    report.fact("PCIe generation and width", _smi("pcie.link.gen.current,pcie.link.width.current"), should="5, 16 under load")
    report.fact("devices", torch.cuda.device_count())


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _smi(query: str) -> str | None:
    """The answer of nvidia-smi; None if there is none."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=8).stdout.strip() or None
    except (OSError, subprocess.TimeoutExpired):
        return None
