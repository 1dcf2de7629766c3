"""A kernel small enough to compile in every test.

`python -m tests.runtime.kernels DIR --arch sm_90a` adds those that the GPU tests use to a folder of artifacts.
"""

from dataclasses import dataclass
from typing import ClassVar

from cute_kernels.runtime.kernel import Kernel, compile_options


@dataclass(frozen=True)
class Scale(Kernel):
    """y = factor * x, for contiguous float32 x, y [n]."""

    operator: ClassVar[str] = "test_scale"
    factor: float = 2.0
    threads: int = 256

    def compile(self, arch: str):
        import cuda.bindings.driver as cuda
        import cutlass
        from cutlass import cute
        from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

        factor, threads = self.factor, self.threads

        @cute.kernel
        def scale_kernel(x: cute.Tensor, y: cute.Tensor, n: cutlass.Int32):
            thread, _, _ = cute.arch.thread_idx()
            block, _, _ = cute.arch.block_idx()
            i = block * threads + thread
            if i < n:
                y[i] = x[i] * factor

        @cute.jit
        def scale(x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
            n = cute.size(x)
            scale_kernel(x, y, n).launch(grid=[cute.ceil_div(n, threads), 1, 1], block=[threads, 1, 1], stream=stream)

        n = cute.sym_int32()
        fakes = [make_fake_compact_tensor(cutlass.Float32, (n,), assumed_align=16) for _ in range(2)]
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return cute.compile(scale, *fakes, stream, options=compile_options(arch))


if __name__ == "__main__":
    import argparse
    from pathlib import Path

    from cute_kernels.runtime import artifacts
    from tests.runtime import kernels  # by its own name: a kernel's symbol holds its module's

    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arch", action="append", required=True)
    arguments = parser.parse_args()
    wanted = [kernels.Scale(factor) for factor in (2.0, 3.0, 4.0)]
    for built in artifacts.build_all(wanted, arguments.arch, arguments.folder, jobs=1):
        print(built.so)
