"""The JSON of a run: what was measured, on what, when. One file for each operator, set and run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import subprocess
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

from perf.statistics import Ratio, Sample

FOLDER = Path(__file__).parent / "results"
SCHEMA = "perf/bench/1"
FLOORS = ("fill", "copy")  # in this order: the first that was measured is the floor


@dataclasses.dataclass
class Row:
    """One case. Times by name: "operator", its rivals, "empty" (a pair of events), "launch" (a one-element kernel)."""

    name: str
    sizes: dict[str, int]
    read: int
    written: int
    mma: int
    fp32: int
    times: dict[str, Sample] = dataclasses.field(default_factory=dict)  # microseconds
    host: dict[str, float] = dataclasses.field(default_factory=dict)  # microseconds of a call
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)  # rivals that did not run, and why
    sm_mhz: int | None = None  # the clock just after the last measurement

    @property
    def floor(self) -> str | None:
        return next((name for name in FLOORS if name in self.times), None)

    def over(self, name: str) -> Ratio | None:
        """The operator's time as a multiple of another's, or None where either is missing."""
        if name not in self.times or "operator" not in self.times:
            return None
        return Ratio.of(self.times["operator"], self.times[name])


@dataclasses.dataclass
class Run:
    op: str
    set: str
    options: dict[str, Any]
    machine: dict[str, Any]
    timing: str  # how the times were taken
    rows: list[Row] = dataclasses.field(default_factory=list)
    schema: str = SCHEMA

    def save(self, path: Path) -> None:
        """Writes the whole file at once."""
        path.parent.mkdir(parents=True, exist_ok=True)
        rough = path.with_name(f".{path.name}.{os.getpid()}")
        rough.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")
        os.replace(rough, path)

    @classmethod
    def load(cls, path: Path) -> Run:
        """ValueError where the file holds something else."""
        try:
            data = json.loads(Path(path).read_text())
            if data["schema"] != SCHEMA:
                raise ValueError(f"its schema is {data['schema']!r}")
            rows = [Row(**row | {"times": {k: Sample(**v) for k, v in row["times"].items()}}) for row in data["rows"]]
            return cls(**data | {"rows": rows})
        except (ValueError, KeyError, TypeError) as e:
            raise ValueError(f"{path} holds no results of `perf bench` ({SCHEMA}): {e}") from e

    def title(self) -> str:
        options = ", ".join(f"{k} {v}" for k, v in self.options.items())
        return f"{self.op}, {self.set} sizes" + (f", {options}" if options else "")


def default_path(op: str, set_name: str, options: dict[str, Any], machine: dict[str, Any]) -> Path:
    gpu = str(machine.get("gpu", "cpu")).removeprefix("NVIDIA ").replace(" ", "-").lower()
    parts = [op, set_name, *map(str, options.values()), gpu, machine["date"]]
    return FOLDER / ("_".join(parts) + ".json")


def machine(device: Any = None, revision: str | None = None) -> dict[str, Any]:
    """What numbers belong to. `revision`: where git can't tell."""
    import torch

    from cute_kernels.runtime import toolchain

    found = {
        "date": date.today().isoformat(),
        "revision": revision or os.environ.get("PERF_REVISION") or _git_revision(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "toolchain": toolchain.versions(),
    }
    return found | (_gpu(device) if device is not None else {})


def machine_text(machine: dict[str, Any]) -> str:
    """What ran, in one line."""
    versions = machine.get("toolchain", {})
    parts = [machine.get("gpu", "no GPU")]
    parts += [f"driver {machine['driver']}"] if "driver" in machine else []
    if clocks := machine.get("max_clocks_mhz"):
        parts.append(f"highest clocks {clocks['sm']} MHz (memory {clocks['memory']} MHz)")
    parts += [f"torch {machine['torch']}"] if "torch" in machine else []
    parts += [f"{name} {versions[name]}" for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi") if name in versions]
    return ", ".join([*parts, f"revision {machine.get('revision') or 'unknown'}", machine["date"]])


def _git_revision() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=7"]
    with contextlib.suppress(OSError):
        done = subprocess.run(command, capture_output=True, text=True)
        return done.stdout.strip() or None
    return None


def _gpu(device: Any) -> dict[str, Any]:
    """Name, size, driver and highest clocks."""
    import pynvml
    import torch

    properties = torch.cuda.get_device_properties(device)
    found = {"gpu": properties.name, "sms": properties.multi_processor_count, "l2_bytes": properties.L2_cache_size}
    with _management(device) as handle:
        clocks = {"sm": pynvml.NVML_CLOCK_SM, "memory": pynvml.NVML_CLOCK_MEM}
        found["driver"] = pynvml.nvmlSystemGetDriverVersion()
        found["max_clocks_mhz"] = {
            name: pynvml.nvmlDeviceGetMaxClockInfo(handle, kind) for name, kind in clocks.items()
        }
        found["power_limit_w"] = pynvml.nvmlDeviceGetPowerManagementLimit(handle) // 1000
    return found


def sm_clock(device: Any) -> int:
    """The multiprocessors' clock now, in MHz."""
    import pynvml

    with _management(device) as handle:
        return pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)


@contextlib.contextmanager
def _management(device: Any) -> Iterator[Any]:
    """The device's handle in the driver's management library."""
    import pynvml
    import torch

    pynvml.nvmlInit()
    try:
        yield pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    finally:
        pynvml.nvmlShutdown()
