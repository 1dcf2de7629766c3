"""What an operator's kernels move and compute on the machine, against the least that the operator needs.

python -m reference.ptx count mamba_segsum 1x1 --arch sm_100a
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from .machine import ptx_machine
from .report import Report


@dataclass
class Least:
    """The bytes and operations that no implementation can avoid."""

    read: int
    written: int
    mma: int
    transcendentals: int


def _segsum(size: str):
    """Official shapes, b x c chunks; Q=, H= and N= may follow: 1x1,Q=64,H=8,N=64."""
    import torch

    import cute_kernels

    from .. import inputs

    chunks, *rest = size.split(",")
    b, c = (int(v) for v in chunks.split("x"))
    names = {"Q": "chunk_size", "H": "heads", "N": "d_state", "G": "groups"}
    shape = {names[k]: int(v) for k, v in (r.split("=") for r in rest)}
    given = inputs.official(0, batch=b, chunks=c, **shape)
    tensors = [t for t in given if isinstance(t, torch.Tensor)]
    q, h, n = given.dt.shape[2], given.dt.shape[3], given.B.shape[4]
    pairs = b * c * q * (q + 1) // 2
    least = Least(
        read=sum(t.nbytes for t in tensors),
        written=b * c * h * (3 * q * q * given.B.element_size() + 2 * q * 4),
        mma=2 * b * c * given.B.shape[3] * q * q * n,
        transcendentals=h * pairs + 3 * b * c * q * h,
    )
    return lambda: cute_kernels.mamba_segsum(*given), least


OPERATORS = {"mamba_segsum": _segsum}

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


def _ratio(actual: int, least: int) -> str:
    return f"{actual / least:8.2f} x" if least else "       -"


def text(operator: str, size: str, arch: str) -> str:
    """Runs the operator and returns the table."""
    call, least = OPERATORS[operator](size)
    with ptx_machine(arch) as machine:
        call()
    if not machine.reports:
        raise SystemExit(f"{operator} {size} launched no kernel")
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
        ("barriers", c["barriers"], 0),
        ("warp instructions", c["instructions"], 0),
    ]
    lines = [f"{operator} {size} on {arch}: {len(machine.reports)} launches", f"{'':44}{'machine':>16}{'minimum':>16}"]
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
