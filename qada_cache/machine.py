"""The machine that figures are of."""

import os
import platform
from pathlib import Path

import torch
import transformers


def describe_machine() -> str:
    """One line: processor or accelerator, cores, memory, and the versions of Python, torch and transformers."""
    name, cpuinfo = platform.machine(), Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = [line.partition(":") for line in cpuinfo.read_text().splitlines()]
        found = {key.strip(): value.strip() for key, _, value in lines}
        name = found.get("model name", name)
        if "cpu family" in found:  # a virtual machine's name may leave out the generation
            name += f", family {found['cpu family']}, model {found.get('model')}"
    memory = ""
    if hasattr(os, "sysconf"):
        memory = f", {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    capability = os.environ.get("ATEN_CPU_CAPABILITY")  # instructions that torch limits itself to
    limit = f", limited to {capability}" if capability else ""
    processor = f"{name} ({os.cpu_count()} cores{memory}{limit})"
    return "; ".join([processor, *devices, f"Python {platform.python_version()}, {versions}"])
