"""Where it runs: its clock, its peak memory, how large its ceilings are measured, and what it is."""

import ctypes
import gc
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.benchmark import timer as synchronized

Clock = Callable[[], float]
SHORT = 50e-6  # seconds: of a shorter call, waiting for the device is a good part


class Cpu:
    """The processor; the peak memory of a call is that of a process."""

    name = "cpu"
    products = 512, 1024, 1536  # rows of the matrices whose products are a ceiling

    def __init__(self) -> None:
        self.cache = 3 * _last_cache()  # bytes; of what is larger, nearly nothing is found in a cache again
        self.copies = self.cache // 2, 2 * self.cache  # bytes of the copies that are a ceiling

    def clock(self, seconds: float) -> Clock:
        """What reads the time around a call that takes about so long."""
        return synchronized

    def synchronize(self) -> None:
        """Nothing runs behind the caller's back."""

    def give_back_memory(self) -> None:
        """From now on large tensors that are freed go back to the system: kept, a later call would use them again, and
        seem to take nothing."""
        if sys.platform == "linux":
            ctypes.CDLL(None).mallopt(-3, 2**16)  # M_MMAP_THRESHOLD

    def peak(self, call: Callable[[], Any]) -> int | None:
        """The bytes that a call takes at most, beside what was there before; None where the system does not tell.

        The process must be one that runs nothing else, and has given back memory since before it built the call.
        """
        if sys.platform != "linux":
            return None
        call()
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak is now what there is
        before = _status("VmRSS")
        call()
        return max(0, _status("VmHWM") - before)

    def about(self) -> dict[str, Any]:
        """What a reader must know to compare figures."""
        return {"device": _processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return 0


def _last_cache(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """The bytes of the largest cache, as Linux tells; elsewhere as many as most have at most."""
    told = [path.read_text(encoding="ascii").strip() for path in folder.glob("index*/size")]
    return max((int(size.removesuffix("K")) * 2**10 for size in told), default=2**25)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


class Cuda:
    """An NVIDIA or AMD device.

    Args:
        name: cuda, or cuda:1, ..
        api: `torch.cuda`, or what stands for it in a test.
    """

    cache = 2**28
    products = 4096, 8192
    copies = (2**30,)

    def __init__(self, name: str = "cuda", api: Any = torch.cuda) -> None:
        self.name, self._api = name, api

    def clock(self, seconds: float) -> Clock:
        """Of short calls the device's own events; else the host's clock, once the device has nothing left to do."""
        return self._event_clock() if seconds < SHORT else self._host_clock

    def _host_clock(self) -> float:
        self._api.synchronize()
        return time.perf_counter()

    def _event_clock(self) -> Clock:
        origin = self._api.Event(enable_timing=True)
        origin.record()

        def events() -> float:
            now = self._api.Event(enable_timing=True)
            now.record()
            now.synchronize()
            return origin.elapsed_time(now) / 1e3

        return events

    def synchronize(self) -> None:
        """Wait until the device has nothing left to do."""
        self._api.synchronize()

    def peak(self, call: Callable[[], Any]) -> int | None:
        """The bytes that a call takes at most of the caching allocator, beside what was there before."""
        call()
        self._api.synchronize()
        self._api.reset_peak_memory_stats()
        before = self._api.memory_allocated()
        call()
        self._api.synchronize()
        return max(0, self._api.max_memory_allocated() - before)

    def about(self) -> dict[str, Any]:
        """What a reader must know to compare figures."""
        found = self._api.get_device_properties(self.name)
        driver = getattr(self._api, "driver_version", lambda: "unknown")()
        versions = {"driver": driver, "cuda": torch.version.cuda, "memory_bytes": found.total_memory}
        return {"device": found.name, **versions, "threads": torch.get_num_threads()}


def device_of(name: str) -> Cpu | Cuda:
    """The device that torch calls so."""
    return Cpu() if name == "cpu" else Cuda(name)
