"""The machine code of the production launches, held to a budget (DESIGN section 7). No GPU is needed."""

import pytest
import torch

from benchmarks import sass

pytestmark = pytest.mark.skipif(not sass.have_cuobjdump(), reason="this Triton wheel carries no cuobjdump")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
V = 151936

# Over both sweeps of a row; measured 12.6 and 2.00 for bf16 at sm_90 with Triton 3.9.
INSTRUCTIONS, MUFU = 13, 2.1


def examine(name, dtype=BF16, V=V, capability=90):
    report = sass.report(name, dtype, V, capability)
    print(sass.table([report]))
    assert (report.stack, report.spills) == (0, 0)
    return report


@pytest.mark.parametrize("capability", sass.CAPABILITIES)
@pytest.mark.parametrize("name", ["grpo_loss", "grpo_loss on-policy"])
def test_budget(name, capability):
    report = examine(name, capability=capability)
    assert report.load == report.store == 128
    assert 0 < report.instructions <= INSTRUCTIONS
    assert 2 <= report.mufu <= MUFU
    assert (report.warps, report.registers > 32) == (32, True)  # one program a multiprocessor: rows in flight fit in L2


@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
def test_other_dtypes(dtype):
    report = examine("grpo_loss", dtype)
    assert report.load == report.store == 128
    assert 0 < report.instructions <= INSTRUCTIONS
    assert 2 <= report.mufu <= MUFU


@pytest.mark.parametrize("V", sass.VOCABULARIES[:-1])
def test_every_launch_shape(V):
    report = examine("grpo_loss", V=V)
    assert report.load == report.store == 128
    assert 0 < report.instructions <= INSTRUCTIONS


def test_rows_that_are_not_aligned():
    report = examine("grpo_loss", V=50257)
    assert report.load == report.store == 16
    assert 0 < report.instructions <= 17


def test_entropy_costs_a_product_and_a_clamp():
    report = examine("grpo_loss entropy")
    assert report.load == report.store == 128
    assert 0 < report.instructions <= INSTRUCTIONS + 5
    assert 2 <= report.mufu <= MUFU


def test_softcap():
    report = examine("grpo_loss softcap")
    assert report.load == report.store == 128


@pytest.mark.parametrize("capability", sass.CAPABILITIES)
@pytest.mark.parametrize("name, store", [("row_stats", 0), ("row_grad", 128), ("scale_", 128)])
def test_rows_alone(name, store, capability):
    report = examine(name, capability=capability)
    assert (report.load, report.store) == (128, store)
    assert 0 < report.instructions <= 7.5


def test_the_target_is_written_behind_a_barrier():
    # row_grad reduces nothing, so a barrier in it can only be the one between the sweep's stores and the target's.
    sass.report("row_grad", BF16, V, 90)
    (compiled,) = sass.variants(sass.kernels()["row_grad"][0], 90)
    code = [i.text for i in sass.disassemble(compiled.asm["cubin"])]
    barrier = max(i for i, text in enumerate(code) if "BAR.SYNC" in text)
    assert any("STG.E.U16" in text for text in code[barrier:])


def test_loops_are_found_by_their_backward_branches():
    def code(*texts):
        return [sass.Instruction(16 * i, text) for i, text in enumerate(texts)]

    inner = code(
        "MOV R1, R2",
        "LDG.E.EF.128 R4, desc[UR8][R18.64]",
        "@!P0 BRA 0x10",
        "BRA 0x50",
        "EXIT",
        "@P1 BRA 0x0",
        "BRA 0x60",
    )
    (body,) = sass.innermost_loops(inner)
    assert [i.address for i in body] == [0x10, 0x20]
    assert sass.widths(inner, "LDG") == [128]
    assert sass.widths(code("@P0 STG.E.U16 desc[UR6][R2.64], R1", "STG.E desc[UR6][R2.64], R1"), "STG") == [16, 32]
