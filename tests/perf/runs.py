"""A made-up run for tests."""

from perf import cases
from perf.runs import Row, Run
from perf.statistics import Sample

MACHINE = {"date": "2026-01-02", "revision": "abc1234", "torch": "2.11.0", "gpu": "NVIDIA H200", "driver": "580.1"}


def made(op="mamba_segsum", factor=1.2, spread=0.02, against=("fill",), options=None, **machine):
    """Every official case at `factor` times the floor, which is 3 us and the bytes at 4.5 TB/s."""
    options = {"g_layout": "per_head"} if options is None and op == "mamba_segsum" else options or {}
    run = Run(op, "official", options, MACHINE | machine, "made up")
    for case in cases.cases(op, "official", options):
        row = Row(case.name, case.sizes, case.read, case.written, case.mma, case.fp32)
        floor = 3 + case.written / 4.5e6
        for name in ("operator", *against):
            us = floor * (factor if name == "operator" else 1.0)
            row.times[name] = Sample(us, us * (1 - spread / 2), us * (1 + spread / 2), 40)
        row.host = {"operator": 12.5}
        row.errors = {"bar": 0.5} if op == "mamba_segsum" else {"l2": 1e-6, "torch_l2": 2e-6}
        run.rows.append(row)
    return run
