"""Copies between the shared memories of a cluster's blocks."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass._mlir.dialects import llvm, nvvm
from cutlass.cute.typing import AddressSpace, Pointer
from cutlass.cutlass_dsl import dsl_user_op


@dsl_user_op
def copy_to_peer(pointer: Pointer, mbar: Pointer, peer: cutlass.Int32, num_bytes: int, *, loc=None, ip=None) -> None:
    """Starts a bulk copy of shared memory to the same place in block `peer` of the cluster.

    The copy completes `num_bytes` on `mbar` of that block. 16 bytes, or a multiple, aligned as much; what threads have
    written needs the proxy fence before it.
    """
    remote = llvm.PointerType.get(AddressSpace.dsmem)
    peer = Int32(peer).ir_value(loc=loc, ip=ip)
    source = pointer.to_llvm_ptr(loc=loc, ip=ip)
    target = nvvm.mapa(remote, source, peer, loc=loc, ip=ip)
    barrier = nvvm.mapa(remote, mbar.to_llvm_ptr(loc=loc, ip=ip), peer, loc=loc, ip=ip)
    # The operation is typed for a barrier of this block, while the instruction wants the target block's.
    barrier = llvm.ptrtoint(Int32.mlir_type, barrier, loc=loc, ip=ip)
    barrier = llvm.inttoptr(llvm.PointerType.get(AddressSpace.smem), barrier, loc=loc, ip=ip)
    size = Int32(num_bytes).ir_value(loc=loc, ip=ip)
    nvvm.cp_async_bulk_shared_cluster_shared_cta(target, source, barrier, size, loc=loc, ip=ip)


@dsl_user_op
def peer_address(pointer: Pointer, peer: cutlass.Int32, *, loc=None, ip=None) -> Int32:
    """Address of the same place of shared memory in block `peer` of the cluster."""
    remote = llvm.PointerType.get(AddressSpace.dsmem)
    source, peer = pointer.to_llvm_ptr(loc=loc, ip=ip), Int32(peer).ir_value(loc=loc, ip=ip)
    return Int32(llvm.ptrtoint(Int32.mlir_type, nvvm.mapa(remote, source, peer, loc=loc, ip=ip), loc=loc, ip=ip))


@cute.jit
def store_to_peer(pointer: cute.Pointer, mbar: cute.Pointer, peer: Int32, x: cute.Tensor):  # (1 | 2 | 4,) fp32
    """Stores to the same place of shared memory in block `peer` of the cluster, aligned as it is long; completes its
    bytes on that block's ``mbar``.

    Lanes take about a cycle each, whatever they store: few wide stores, not many narrow ones.
    """
    place, barrier = peer_address(pointer, peer), peer_address(mbar, peer)
    store = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes"
    if cutlass.const_expr(cute.size(x) == 4):
        cute.arch.inline_ptx(
            f"{store}.v4.f32 [{{$r0}}], {{{{$r1}}, {{$r2}}, {{$r3}}, {{$r4}}}}, [{{$r5}}];",
            read_only_args=[place, x[0], x[1], x[2], x[3], barrier],
        )
    elif cutlass.const_expr(cute.size(x) == 2):
        cute.arch.inline_ptx(
            f"{store}.v2.f32 [{{$r0}}], {{{{$r1}}, {{$r2}}}}, [{{$r3}}];", read_only_args=[place, x[0], x[1], barrier]
        )
    else:
        cute.arch.inline_ptx(f"{store}.f32 [{{$r0}}], {{$r1}}, [{{$r2}}];", read_only_args=[place, x[0], barrier])
