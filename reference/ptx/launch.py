"""Runs one launch on the core and reports what happened."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from .boundary import Launch
from .core import core
from .program import Insn, Program
from .report import Finding, Report

MAX_WARPS, MAX_FINDINGS = 32, 64
CELL_WORDS = 4  # of Cell in core/machine.h
APPROXIMATE = ("ex2", "lg2", "rcp", "sqrt", "rsqrt", "sin", "cos", "tanh")  # by their numbers in core/alu.c
_ASK = ctypes.CFUNCTYPE(
    *(None, ctypes.c_int32, ctypes.c_int32, ctypes.c_uint32),
    *(ctypes.POINTER(ctypes.c_float), ctypes.POINTER(ctypes.c_float)),
)
COUNTS = [
    "global_load_bytes",
    "global_load_sectors",
    "global_load_lines",
    "global_store_bytes",
    "global_store_sectors",
    "global_store_lines",
    "global_store_full_sectors",
    "global_store_full_lines",
    "atomic_bytes",
    "tma_load_bytes",
    "tma_store_bytes",
    "tma_operations",
    "shared_load_bytes",
    "shared_store_bytes",
    "shared_load_wavefronts",
    "shared_store_wavefronts",
    "mma_bf16",
    "mma_fp16",
    "mma_tf32",
    "mma_fp8",
    "transcendentals",
    "barriers",
    "instructions",
    "tmem_bytes",
    "cpasync_bytes",
]


class Allocation(ctypes.Structure):
    """Mirrors Allocation in core/machine.h."""

    _fields_ = [
        ("start", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("written", ctypes.c_void_p),
        ("cells", ctypes.c_void_p),
        ("previous", ctypes.c_void_p),
    ]


class _Finding(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_char * 32),
        ("text", ctypes.c_char * 480),
        ("pc", ctypes.c_int32),
        ("other_pc", ctypes.c_int32),
        ("cta", ctypes.c_int32),
        ("warp", ctypes.c_int32),
        ("lanes", ctypes.c_int64),
        ("times", ctypes.c_uint64),
    ]


class _Machine(ctypes.Structure):
    """Mirrors the first part of Machine in core/machine.h; the core knows the whole size."""

    _fields_ = [
        ("code", ctypes.POINTER(Insn)),
        ("n_code", ctypes.c_int32),
        ("register_bytes", ctypes.c_int32),
        ("n_registers", ctypes.c_int32),
        ("local_bytes", ctypes.c_int32),
        ("constants", ctypes.c_void_p),
        ("constant_bytes", ctypes.c_uint64),
        ("relocations", ctypes.c_void_p),
        ("n_relocations", ctypes.c_int32),
        ("static_shared", ctypes.c_uint32),
        ("dynamic_shared", ctypes.c_uint32),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("cluster", ctypes.c_uint32 * 3),
        ("param", ctypes.c_void_p),
        ("param_size", ctypes.c_uint64),
        ("allocations", ctypes.POINTER(Allocation)),
        ("n_allocations", ctypes.c_int32),
        ("strict", ctypes.c_int32),
        ("schedule", ctypes.c_int32),
        ("sm100", ctypes.c_int32),
        ("approximate", ctypes.c_int32),
        ("seed", ctypes.c_uint64),
        ("step_limit", ctypes.c_uint64),
        ("ask", ctypes.c_void_p),
        ("executed", ctypes.c_void_p),
        ("n_findings", ctypes.c_int32),
        ("faulted", ctypes.c_int32),
        ("counts", ctypes.c_uint64 * 64),
        ("findings", _Finding * MAX_FINDINGS),
    ]


@dataclass
class Options:
    """How to run.

    schedule: "round robin", "random" (by `seed`), or "late <k>": warp k of every CTA moves only when no other can.
    strict: the order and initialisation checks. approximate: push approximate functions off by their documented error.
    functions: called with the name of an approximate function ("ex2.approx.ftz.f32") and fp32 arguments, returns its
        values: in place of the exact function, rounded.
    """

    schedule: str = "round robin"
    seed: int = 0
    strict: bool = True
    approximate: bool = False
    step_limit: int = 200_000_000
    track_writers: bool = True
    functions: Callable[[str, np.ndarray], np.ndarray] | None = None

    @property
    def number(self) -> int:
        if self.schedule == "round robin":
            return 0
        return 1 if self.schedule == "random" else 2 + int(self.schedule.removeprefix("late "))


@dataclass
class GlobalMemory:
    """Global memory that launches may touch: tensors, with what is known to be written.

    An entry made with written=False starts out as memory that nothing has written.
    """

    ranges: list[tuple[int, int, np.ndarray | None]] = field(default_factory=list)
    writers: dict[int, np.ndarray] = field(default_factory=dict)  # by start: who wrote what in the last launch

    def add(self, start: int, size: int, written: bool = True) -> None:
        if size and not any(s <= start and start + size <= s + n for s, n, _ in self.ranges):
            self.ranges = [r for r in self.ranges if not (start <= r[0] and r[0] + r[1] <= start + size)]
            self.ranges.append((start, size, None if written else np.zeros(size, np.uint8)))


def execute(program: Program, launch: Launch, memory: GlobalMemory, options: Options) -> Report:
    """Runs a launch to its end, or to its first fault."""
    library = core().library
    m = ctypes.create_string_buffer(library.machine_bytes())
    machine = _Machine.from_buffer(m)
    machine.code, machine.n_code = program.code, len(program.kernel.instructions) + 1
    machine.register_bytes, machine.n_registers = program.register_bytes, len(program.numbers)
    machine.local_bytes = program.local_bytes
    machine.constants, machine.constant_bytes = program.constant_memory.start, len(program.constants)
    relocations = np.array(program.relocations or [0], np.int32)
    machine.relocations, machine.n_relocations = relocations.ctypes.data, len(program.relocations)
    machine.static_shared, machine.dynamic_shared = program.static_shared, launch.shared
    machine.grid[:], machine.block[:], machine.cluster[:] = launch.grid, launch.block, launch.cluster
    parameters = bytearray(program.param_bytes or 1)
    for i, p in enumerate(program.kernel.parameters):
        parameters[p.offset : p.offset + p.size] = launch.parameter(i, p.size)
    held = _aligned(bytes(parameters))
    machine.param, machine.param_size = held.start, len(parameters)
    ranges = list(memory.ranges)
    if len(program.globals.array) > 1:
        ranges.append((program.globals.start, len(program.globals.array), None))
    allocations = (Allocation * max(1, len(ranges)))()
    writers: dict[int, np.ndarray] = {}
    for a, (start, size, written) in zip(allocations, ranges, strict=False):
        a.start, a.size = start, size
        a.written = written.ctypes.data if written is not None else None
        if options.strict and options.track_writers:
            writers[start] = np.zeros((size // 2 + 1, CELL_WORDS), np.uint32)
            a.cells = writers[start].ctypes.data
            if launch.programmatic and start in memory.writers:
                a.previous = memory.writers[start].ctypes.data
    machine.allocations, machine.n_allocations = allocations, len(ranges)
    machine.strict, machine.schedule, machine.seed = int(options.strict), options.number, options.seed
    machine.sm100 = int(program.module.target.startswith("sm_10"))
    machine.approximate, machine.step_limit = int(options.approximate), options.step_limit
    ask = _ask(options.functions) if options.functions else None
    machine.ask = ctypes.cast(ask, ctypes.c_void_p) if ask else None
    executed = np.zeros((MAX_WARPS, machine.n_code), np.uint64)
    machine.executed = executed.ctypes.data
    library.run(ctypes.byref(machine))
    memory.writers = writers
    report = Report(kernel=launch.kernel, program=program, launch=launch, executed=executed)
    report.counts = {name: machine.counts[i] for i, name in enumerate(COUNTS)}
    for f in machine.findings[: machine.n_findings]:
        report.findings.append(_finding(program, f))
    report.faulted = bool(machine.faulted)
    return report


def _ask(functions: Callable[[str, np.ndarray], np.ndarray]):
    @_ASK
    def ask(function, ftz, on, x, y):
        lanes = [i for i in range(32) if on >> i & 1]
        name = f"{APPROXIMATE[function]}.approx{'.ftz' * ftz}.f32"
        np.ctypeslib.as_array(y, (32,))[lanes] = functions(name, np.ctypeslib.as_array(x, (32,))[lanes])

    return ask


def _aligned(data: bytes):
    from .program import Memory

    return Memory(data, 128)


def _finding(program: Program, f: _Finding) -> Finding:
    text, kind = f.text.decode(), f.kind.decode()
    instructions = program.kernel.instructions
    at = instructions[f.pc] if 0 <= f.pc < len(instructions) else None
    other = instructions[f.other_pc] if 0 <= f.other_pc < len(instructions) else None
    if kind == "not implemented" and f.pc in program.refusals:
        text = program.refusals[f.pc].removeprefix("not implemented: ")
    return Finding(kind, text, program.kernel.name, at, other, f.cta, f.warp, f.times, program.module.lines)
