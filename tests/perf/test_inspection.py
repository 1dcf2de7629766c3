from cute_kernels.runtime.build import build
from perf import inspection

from ..runtime.kernels import Scale


def test_a_cubin_is_read_with_its_launch(tmp_path):
    built = build(Scale(threads=128), "sm_90a", tmp_path)
    (function,) = inspection.device_functions(built)
    assert function.threads == 128
    assert function.shared is not None
    cells = dict(zip(inspection.HEADER, function.cells(), strict=True))
    assert cells["threads"] == "128"
    assert cells["local"] == "0"
    assert 0 < int(cells["occupancy %"]) <= 100


def test_block_sizes_are_read_from_ptx():
    ptx = ".visible .entry a(\n.param .u64 a_0)\n.reqntid 32, 4, 2\n{ ret; }\n.entry b(.param .b32 x) { .maxntid 7 }"
    assert inspection.block_sizes(ptx) == {"a": 256}


def test_a_kernel_is_told_by_the_fields_that_differ():
    kernels = [Scale(), Scale(threads=128)]
    assert inspection.distinction(kernels[1], kernels) == "Scale(threads=128)"
