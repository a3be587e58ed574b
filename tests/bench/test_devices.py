"""Clocks and peaks of memory; a device that is not there is played by one with a queue and a time of its own."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from spec_lm.bench import devices
from spec_lm.bench.cases import Case, Sizes
from spec_lm.bench.devices import Cpu, Cuda
from spec_lm.bench.row import MOST_SETS, Ceiling, ceilings, ready
from spec_lm.bench.variants import Variant
from spec_lm.conformance import workers


@dataclass
class FakeCuda:
    """`torch.cuda` of a device that is done with its queue at a certain time; nobody waits unless asked to.

    Args:
        now: of the host.
        busy_until: when the queue is empty.
    """

    now: float = 100.0
    busy_until: float = 0.0
    allocated: int = 1000
    peak: int = 0
    waits: list[str] = field(default_factory=list)

    def launch(self, seconds: float, takes: int = 0) -> None:
        """What takes the host a microsecond, and the device these seconds."""
        self.now += 1e-6
        self.busy_until = max(self.now, self.busy_until) + seconds
        self.peak = max(self.peak, self.allocated + takes)

    def synchronize(self) -> None:
        self.waits.append("device")
        self.now = max(self.now, self.busy_until)

    def Event(self, enable_timing: bool) -> "FakeEvent":
        assert enable_timing
        return FakeEvent(self)

    def memory_allocated(self) -> int:
        return self.allocated

    def reset_peak_memory_stats(self) -> None:
        self.peak = self.allocated

    def max_memory_allocated(self) -> int:
        return self.peak

    def get_device_properties(self, name: str) -> Any:
        return SimpleNamespace(name=f"fake {name}", total_memory=2**30)


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.at = cuda, 0.0

    def record(self) -> None:
        self.at = max(self.cuda.now, self.cuda.busy_until)

    def synchronize(self) -> None:
        self.cuda.waits.append("event")
        self.cuda.now = max(self.cuda.now, self.at)

    def elapsed_time(self, later: "FakeEvent") -> float:
        return 1e3 * (later.at - self.at)


@pytest.fixture
def fake(monkeypatch) -> FakeCuda:
    cuda = FakeCuda()
    monkeypatch.setattr(devices.time, "perf_counter", lambda: cuda.now)
    return cuda


@pytest.mark.parametrize(("each", "waited_for"), [(2e-6, "event"), (1e-3, "device")])
def test_a_call_takes_as_long_as_the_device_works_not_as_its_launch(fake, each, waited_for):
    clock = Cuda("cuda", fake).clock(each)
    start = clock()
    for _ in range(10):
        fake.launch(each)
    assert clock() - start == pytest.approx(10 * each, rel=0.1, abs=2e-6)
    assert set(fake.waits) == {waited_for}


def test_peak_memory_of_a_device_is_what_a_warm_call_takes_beside_what_was_there(fake):
    takes = iter((5000, 700))
    assert Cuda("cuda", fake).peak(lambda: fake.launch(1e-3, takes=next(takes))) == 700


def test_a_row_on_a_device_is_calibrated_by_waiting_for_it(fake):
    """Without waiting a call would seem to take a microsecond, and a round would be of ten thousand."""

    def softmax(x: torch.Tensor, dim: int) -> torch.Tensor:
        fake.launch(2e-3)
        return x

    device = Cuda("cpu", fake)
    row = ready(Case("softmax", Sizes(1, 2, 4)), Variant("slow", "slow", {"softmax": softmax}), device, budget=0.1)
    assert row.seconds == pytest.approx(2e-3, rel=0.01)
    assert row.iterations == 5
    assert row.rounds == 10


@pytest.mark.parametrize(
    ("sizes", "sets", "in_cache"),
    [(Sizes(1, 2, 4), MOST_SETS, True), (Sizes(1, 256, 64), 4, False), (Sizes(1, 2048, 64), 1, False)],
)
def test_inputs_and_results_are_rotated_until_they_fill_the_cache_or_the_row_says_they_are_in_it(sizes, sets, in_cache):
    inputs: list[int] = []
    results: list[int] = []

    def softmax(x: torch.Tensor, dim: int) -> torch.Tensor:
        result = x.softmax(dim)
        inputs.append(x.data_ptr())
        results.append(result.data_ptr())
        return result

    device = Cpu()
    device.cache = 2**19
    row = ready(Case("softmax", sizes), Variant("spy", "spy", {"softmax": softmax}), device, budget=1e-3)
    assert row.in_cache == in_cache
    for _ in range(sets):
        row.call()
    assert len(set(inputs[-sets:])) == len(set(results[-sets:])) == sets
    assert len(set(inputs)) == sets


def test_the_last_cache_is_that_which_the_system_tells(tmp_path):
    for index, size in enumerate(("32K", "1024K", "32768K")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size + "\n", encoding="ascii")
    assert devices._last_cache(tmp_path) == 2**25
    assert devices._last_cache(tmp_path / "none") > 0


@pytest.mark.parametrize("ceiling", [Ceiling("product", 24, "bfloat16"), Ceiling("copy", 960)])
def test_a_ceiling_counts_what_its_call_does(ceiling):
    row = ceiling.row(Cpu(), budget=1e-6)
    with FlopCounterMode(display=False) as counter:
        row.call()
    assert ceiling.work == (counter.get_total_flops() or 2 * 960)


def test_ceilings_are_of_each_dtype_and_of_several_sizes_and_every_copy_leaves_the_cache():
    device = Cpu()
    found = list(ceilings(("float32", "bfloat16"), device))
    products = {(each.size, each.dtype) for each in found if each.kind == "product"}
    assert products == {(size, dtype) for size in device.products for dtype in ("float32", "bfloat16")}
    assert len(device.products) > 1
    assert all(each.work >= device.cache for each in found if each.kind == "copy")


def test_a_device_tells_its_name_and_versions(fake):
    about = Cuda("cuda:0", fake).about()
    assert about["device"] == "fake cuda:0"
    assert {"driver", "cuda", "threads", "memory_bytes"} <= set(about)


def test_the_processor_tells_its_name_and_threads():
    about = Cpu().about()
    assert about["threads"] == torch.get_num_threads()
    assert about["device"]


def _peak_in_child(call: Callable[[], Any], sender: Any) -> None:
    device = Cpu()
    device.give_back_memory()
    torch.ones(6 * 2**20)  # as what is built leaves behind: 16 MiB now come from the heap ..
    held = [torch.ones(2**22) for _ in range(5)]
    del held[:-1]  # .. and stay in it when they are freed
    sender.send(device.peak(call))


def _adds_two_of_16_mebibytes() -> torch.Tensor:
    return torch.ones(2**22) + torch.ones(2**22)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_peak_memory_of_a_call_on_the_processor_is_that_of_its_process():
    context: Any = workers.context()
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_peak_in_child, args=(_adds_two_of_16_mebibytes, sender))
    child.start()
    peak = receiver.recv()
    child.join()
    assert 47 * 2**20 <= peak < 52 * 2**20
