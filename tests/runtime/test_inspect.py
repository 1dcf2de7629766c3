import pytest

from cute_kernels.runtime import inspect

USAGE = """
Resource usage:
 Common:
  GLOBAL:0
 Function one:
  REG:40 STACK:16 SHARED:1024 LOCAL:0 CONSTANT[0]:1296 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function two:
  REG:168 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:932 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
LISTING = """
	.section	.text.one,"ax",@progbits
.text.one:
        /*0000*/                   LDC R1, c[0x0][0x37c] ;
        /*0010*/               @P0 EXIT ;
        /*0020*/              @!P1 LDL.64 R2, [R1+0x8] ;
        /*0030*/              @UP0 UTMALDG.2D [UR4], [UR6], desc[UR8] ;
        /*0040*/                   UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8], tmem[UR10], idesc[UR11], UP0 ;
        /*0050*/                   STL [R1], R5 ;
        /*10060*/                  NOP;
	.section	.text.two,"ax",@progbits
.text.two:
        /*0000*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4].tnspB, R24, !UPT, gsb0 ;
        /*0010*/                   UTMASTG.2D [UR8], [UR4] ;
        /*0020*/                   UBLKCP.S.G [UR8], [UR4], UR6 ;
"""


def test_counts_per_kernel(monkeypatch, tmp_path):
    monkeypatch.setattr(inspect, "_run", lambda tool, *args: LISTING if tool == "nvdisasm" else USAGE)
    one, two = inspect.machine_code(tmp_path / "k.cubin")
    assert (one.name, one.registers, one.stack, one.static_shared) == ("one", 40, 16, 1024)
    assert (one.instructions, one.tma, one.mma, one.local_memory) == (6, 1, 1, 2)
    assert (two.registers, two.instructions, two.tma, two.mma, two.local_memory) == (168, 3, 2, 1, 0)


def test_a_real_cubin(scale_sm90a):
    (code,) = inspect.machine_code(scale_sm90a.cubin)
    (launch,) = scale_sm90a.read_metadata()["launches"]
    assert code.name == launch["kernel"]
    assert 0 < code.registers < 32
    assert (code.stack, code.local, code.local_memory, code.tma, code.mma) == (0, 0, 0, 0, 0)
    assert code.opcodes["LDG"] == code.opcodes["STG"] == 1


def test_what_is_no_cubin_is_one_clear_sentence(tmp_path):
    (tmp_path / "k.cubin").write_bytes(b"no cubin")
    with pytest.raises(RuntimeError, match=r"nvdisasm could not read .*k\.cubin"):
        inspect.machine_code(tmp_path / "k.cubin")
