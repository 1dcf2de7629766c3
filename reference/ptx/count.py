"""What an operator's kernels move and compute on the machine, against the least that the operator needs.

python -m reference.ptx count mamba_segsum 1x1 --arch sm_100a
python -m reference.ptx count hyena_block 1x131,precision=highest --arch sm_90a
"""

from __future__ import annotations

from collections import Counter

from .machine import ptx_machine
from .operators import OPERATORS, Least
from .report import Report

CLASSES = {
    "copy": ("cp", "tcgen05.cp", "prefetch"),
    "mma": ("wgmma", "tcgen05", "mma"),
    "barrier": ("bar", "barrier", "mbarrier", "fence", "membar", "elect"),
    "memory": ("ld", "st", "atom", "red", "ldmatrix", "stmatrix"),
    "special function": ("ex2", "lg2", "rcp", "sqrt", "rsqrt", "sin", "cos", "tanh"),
    "fp32": ("f32",),
    "conversion": ("cvt",),
    "control": ("bra", "ret", "exit", "setp", "selp"),
}


def classify(opcode: str) -> str:
    words = opcode.split(".")
    for name, heads in CLASSES.items():
        if words[0] in heads or (
            name == "fp32" and ("f32" in words or "f32x2" in words) and words[0] not in ("setp", "cvt")
        ):
            return name
    return "integer and moves"


def roles(report: Report) -> dict[str, Counter]:
    """Instructions by class for each group of warps that executed the same number of each."""
    instructions = report.program.kernel.instructions
    by_warp = []
    for row in report.executed:
        counts = Counter()
        for instruction, n in zip(instructions, row, strict=False):
            if n:
                counts[classify(instruction.opcode)] += int(n)
        by_warp.append(counts)
    groups: dict[str, Counter] = {}
    first = 0
    for i in range(1, len(by_warp) + 1):
        if i == len(by_warp) or by_warp[i] != by_warp[first]:
            if by_warp[first]:
                groups[f"warp {first}" if i == first + 1 else f"warps {first}-{i - 1}"] = by_warp[first]
            first = i
    return groups


def fp32_operations(report: Report) -> int:
    """Additions and multiplications, an fma as two, with every lane of a warp counted."""
    total = 0
    for i, n in zip(report.program.kernel.instructions, report.executed.sum(0), strict=False):
        words = i.opcode.split(".")
        if words[0] in ("fma", "add", "sub", "mul") and words[-1] in ("f32", "f32x2"):
            total += 32 * int(n) * (2 if words[0] == "fma" else 1) * (2 if words[-1] == "f32x2" else 1)
    return total


def _ratio(actual: int, least: int) -> str:
    return f"{actual / least:8.2f} x" if least else "       -"


def text(operator: str, size: str, arch: str) -> str:
    """Runs the operator and returns the table."""
    work = OPERATORS[operator](size)
    with ptx_machine(arch) as machine:
        work.call()
    if not machine.reports:
        raise NotImplementedError(f"{operator} {size} on {arch} launches no kernel: PyTorch computes all of it")
    missing = [k for k in work.kernels if not any(k in report.kernel for report in machine.reports)]
    least = Least(0, 0) if missing else work.least
    c: Counter = Counter()
    for report in machine.reports:
        c.update(report.counts)
    mma = sum(c[k] for k in ("mma_bf16", "mma_fp16", "mma_tf32", "mma_fp8"))
    rows = [
        ("bytes read by loads", c["global_load_bytes"], 0),
        ("  in 32-byte sectors", 32 * c["global_load_sectors"], 0),
        ("bytes read by tensor and bulk copies", c["tma_load_bytes"], 0),
        ("bytes read, all", c["global_load_bytes"] + c["tma_load_bytes"] + c["cpasync_bytes"], least.read),
        ("bytes written by stores", c["global_store_bytes"], 0),
        ("  in 32-byte sectors", 32 * c["global_store_sectors"], 0),
        ("  in sectors that one instruction fills", 32 * c["global_store_full_sectors"], 0),
        ("  in 128-byte lines that one instruction fills", 128 * c["global_store_full_lines"], 0),
        ("bytes written by tensor and bulk copies", c["tma_store_bytes"], 0),
        ("bytes written, all", c["global_store_bytes"] + c["tma_store_bytes"], least.written),
        ("bytes of atomics", c["atomic_bytes"], 0),
        ("tensor and bulk copies", c["tma_operations"], 0),
        ("shared memory: bytes read by threads", c["shared_load_bytes"], 0),
        ("  wavefronts", c["shared_load_wavefronts"], 0),
        ("shared memory: bytes written by threads", c["shared_store_bytes"], 0),
        ("  wavefronts", c["shared_store_wavefronts"], 0),
        ("tensor memory: bytes by threads", c["tmem_bytes"], 0),
        *[(f"MMA operations, {k}", c[f"mma_{k}"], 0) for k in ("bf16", "fp16", "tf32", "fp8") if c[f"mma_{k}"]],
        ("MMA operations, all", mma, least.mma),
        ("special functions", c["transcendentals"], least.transcendentals),
        ("fp32 operations, of whole warps", sum(map(fp32_operations, machine.reports)), least.fp32),
        ("barriers", c["barriers"], 0),
        ("warp instructions", c["instructions"], 0),
    ]
    lines = [f"{operator} {size} on {arch}: {len(machine.reports)} launches", f"{'':44}{'machine':>16}{'minimum':>16}"]
    if missing:
        what = f"no kernel on {arch} for {', '.join(missing)}"
        lines.insert(1, f"{what}: PyTorch computes that, nothing of it is counted, and no minimum compares")
    for name, actual, minimum in rows:
        lines.append(
            f"{name:44}{actual:16,}{minimum or '':>16,}{_ratio(actual, minimum)}"
            if minimum
            else f"{name:44}{actual:16,}"
        )
    for i, report in enumerate(machine.reports):
        grid = "x".join(map(str, report.launch.grid))
        lines.append(f"launch {i}: {report.kernel[:60]}, grid {grid}, {report.launch.shared} bytes of shared memory")
        for role, counts in roles(report).items():
            lines.append(f"  {role}: " + ", ".join(f"{name} {n:,}" for name, n in counts.most_common()))
    return "\n".join(lines)
