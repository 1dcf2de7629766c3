"""Runs compiled objects on the machine."""

from __future__ import annotations

import functools
import math

from .boundary import Launch, load
from .core import core
from .launch import GlobalMemory, Options, execute
from .parser import Module, PtxError, parse
from .program import Program
from .report import MachineFault, Report

MAX_SHARED = 232448  # 227 KB: what one CTA may have


@functools.lru_cache(maxsize=64)
def parse_cached(ptx_text: str) -> Module:
    return parse(ptx_text)


@functools.lru_cache(maxsize=64)
def _program(ptx_text: str, kernel: str) -> Program:
    module = parse_cached(ptx_text)
    if kernel not in module.kernels:
        raise PtxError(f"the PTX has no kernel {kernel}; it has {', '.join(module.kernels) or 'none'}")
    return Program(module, module.kernels[kernel], core())


def run_launch(ptx_text: str, launch: Launch, memory: GlobalMemory, options: Options) -> Report:
    """Interprets one caught launch."""
    program = _program(ptx_text, launch.kernel)
    sizes = [g % c for g, c in zip(launch.grid, launch.cluster, strict=True)]
    if any(sizes) or not all(launch.grid) or not all(launch.block):
        raise PtxError(f"invalid launch: grid {launch.grid}, cluster {launch.cluster}, block {launch.block}")
    shared = program.static_shared + launch.shared
    if shared > MAX_SHARED or math.prod(launch.block) > 1024 or math.prod(launch.cluster) > 16:
        raise PtxError(
            f"invalid launch: {shared} bytes of shared memory (at most {MAX_SHARED}), block {launch.block} "
            f"(at most 1024 threads), cluster {launch.cluster} (at most 16 CTAs)"
        )
    kernel = program.kernel
    if kernel.threads:
        if kernel.exact_threads and kernel.threads != launch.block:
            raise PtxError(f"invalid launch: block {launch.block}, but the kernel requires {kernel.threads}")
        if math.prod(launch.block) > math.prod(kernel.threads):
            raise PtxError(f"invalid launch: block {launch.block}, but the kernel allows {kernel.threads} at most")
    return execute(program, launch, memory, options)


def run_object(
    obj_path,
    symbol: str,
    ptx_text: str,
    args: list,
    *,
    arch: str | None = None,
    uninitialised=(),
    check: bool = True,
    memory: GlobalMemory | None = None,
    **options,
) -> list[Report]:
    """Calls the host function `symbol` of a compiled object and interprets its launches. Tensors are CPU tensors.

    `uninitialised`: indices of arguments (outputs, workspaces) that the kernel must not read before it writes them.
    `options`: see Options. Returns a Report per launch; raises MachineFault if `check` and there was a finding.
    """
    module = parse_cached(ptx_text)
    if arch is not None and not module.target.startswith(arch):
        raise PtxError(f"the PTX is for {module.target}, not for {arch}")
    memory = memory or GlobalMemory()
    for i, a in enumerate(args):
        if hasattr(a, "data_ptr") and a.numel():
            storage = a.untyped_storage()
            memory.add(storage.data_ptr(), storage.nbytes(), written=i not in uninitialised)
    reports: list[Report] = []
    chosen = Options(**options)

    def on_launch(launch: Launch) -> None:
        reports.append(run_launch(ptx_text, launch, memory, chosen))
        if reports[-1].faulted:
            raise MachineFault(reports)

    try:
        load(obj_path).call(symbol, list(args), on_launch)
    except MachineFault:
        if check:
            raise
    if check and any(r.findings for r in reports):
        raise MachineFault(reports)
    return reports
