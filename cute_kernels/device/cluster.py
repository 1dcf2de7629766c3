"""Copies between the shared memories of a cluster's blocks."""

import cutlass
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
