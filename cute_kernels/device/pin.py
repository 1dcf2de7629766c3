"""Values that the compiler can't see through."""

import cutlass
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

I32 = cutlass.Int32


@dsl_user_op
def pin(x: I32, *, loc=None, ip=None) -> I32:
    """x, made here: the compiler can't make it again, or only later, behind a fence in front of its use, nor take it
    out of a loop, and what is made from it stays behind it too."""
    dialect = llvm.AsmDialect.AD_ATT
    word = I32(x).ir_value(loc=loc, ip=ip)
    return I32(llvm.inline_asm(T.i32(), [word], "mov.b32 $0, $1;", "=r,r", has_side_effects=True, asm_dialect=dialect))


@dsl_user_op
def block_again(*, loc=None, ip=None) -> I32:
    """The block's index along x, read here: what was read before needs no register until now."""
    dialect = llvm.AsmDialect.AD_ATT
    return I32(llvm.inline_asm(T.i32(), [], "mov.u32 $0, %ctaid.x;", "=r", has_side_effects=True, asm_dialect=dialect))
