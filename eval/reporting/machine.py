"""Names the machine and the versions a figure was measured on."""

import os
import platform
from pathlib import Path

import torch
import transformers


def machine() -> str:
    """One line: processor or accelerator, cores, memory, and the versions of Python, torch and transformers."""
    name, cpuinfo = platform.machine(), Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = {line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line}
        name = ", ".join(sorted(models)) or name
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    parts = [f"{name} ({os.cpu_count()} cores, {memory:.0f} GiB)"]
    parts += [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    parts.append(
        f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
    )
    return "; ".join(parts)
