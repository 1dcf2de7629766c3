import dataclasses
import re

import pytest

from cute_kernels.runtime.kernel import Kernel, compile_options, dump_folder

from .conftest import finish
from .kernels import Scale


@dataclasses.dataclass(frozen=True)
class Fields(Kernel):
    operator = "test_fields"
    text: str = "a"
    count: int = 1
    flag: bool = False
    factor: float = 1.0
    sizes: tuple = (1, 2)


def test_symbol_is_a_c_identifier_that_starts_with_the_operator():
    assert re.fullmatch(r"test_fields_[0-9a-f]{16}", Fields().symbol())


def test_symbol_changes_with_each_field():
    changes = {"text": "b", "count": 2, "flag": True, "factor": 1.5, "sizes": (1, 3)}
    assert set(changes) == {field.name for field in dataclasses.fields(Fields)}
    symbols = {Fields().symbol(), *(Fields(**{name: value}).symbol() for name, value in changes.items())}
    assert len(symbols) == len(changes) + 1


def test_symbol_is_the_same_in_every_process(start):
    code = "from tests.runtime.kernels import Scale; print(Scale(3.0).symbol())"
    assert {finish(start(code, PYTHONHASHSEED=seed)).strip() for seed in "12"} == {Scale(3.0).symbol()}


@pytest.mark.parametrize("value", [[1], {"a": 1}, None, object(), (1, [2])])
def test_a_field_that_is_not_plain_is_refused(value):
    with pytest.raises(TypeError, match=r"Fields\.sizes .* must be str, int, bool, float"):
        Fields(sizes=value).symbol()


def test_options_keep_ptx_and_cubin_only_for_a_build():
    assert compile_options("sm_90a") == "--enable-tvm-ffi --gpu-arch=sm_90a"
    token = dump_folder.set("/a folder")
    try:
        assert compile_options("sm_90a").endswith("--keep-ptx --keep-cubin --dump-dir='/a folder'")
    finally:
        dump_folder.reset(token)


def test_a_kernel_that_cannot_compile_says_so():
    with pytest.raises(NotImplementedError, match="Fields"):
        Fields().compile("sm_90a")
