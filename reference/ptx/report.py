"""What a run found and what it counted."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .parser import Instruction


@dataclass
class Finding:
    """One thing that is wrong: what, where in the PTX, and (with line information) where in the Python source."""

    kind: str
    text: str
    kernel: str
    at: Instruction | None
    other: Instruction | None
    cta: int
    warp: int
    times: int
    lines: list[str]

    @property
    def line(self) -> int | None:
        return self.at.line if self.at else None

    @property
    def other_line(self) -> int | None:
        return self.other.line if self.other else None

    def _place(self, instruction: Instruction) -> str:
        text = self.lines[instruction.line - 1].strip()
        source = f" ({instruction.source[0]}:{instruction.source[1]})" if instruction.source else ""
        return f"PTX line {instruction.line}{source}: {text[:160]}"

    def __str__(self) -> str:
        out = f"{self.kind}: {self.text}"
        if self.at:
            out += f"\n    at {self._place(self.at)}"
        if self.other:
            out += f"\n    against {self._place(self.other)}"
        where = f" [CTA {self.cta}, warp {self.warp}]" if self.warp >= 0 else ""
        return out + f"\n    in {self.kernel[:80]}{where}" + (f", {self.times} times" if self.times > 1 else "")


@dataclass
class Report:
    """One launch: its findings, counters, and how often each warp executed each instruction."""

    kernel: str
    program: object
    launch: object
    executed: np.ndarray
    findings: list[Finding] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    faulted: bool = False

    def check(self) -> Report:
        """Raises MachineFault unless the launch was clean."""
        if self.findings:
            raise MachineFault([self])
        return self


class MachineFault(AssertionError):
    """A launch broke a rule. `findings` has them all."""

    def __init__(self, reports: list[Report]):
        self.reports = reports
        self.findings = [f for r in reports for f in r.findings]
        super().__init__("\n" + "\n".join(str(f) for f in self.findings))
