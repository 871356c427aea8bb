"""How often the production launchers compile, counted in Triton's own cache of specialisations. No GPU is needed."""

import json
import multiprocessing

import pytest
import torch
import triton

from benchmarks import sass
from grpo_fast.kernels import grpo_loss, row_grad, row_stats, scale

LENGTHS = [1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 100, 127, 128, 129, 160, 199, 256]

CASES = {
    "grpo_loss": (grpo_loss._grpo_loss_kernel, sass.launch_grpo_loss),
    "row_stats": (row_stats._row_stats_kernel, sass.launch_row_stats),
    "row_grad": (row_grad._row_grad_kernel, sass.launch_row_grad),
    "scale_": (scale._scale_kernel, sass.launch_scale),
}


@pytest.mark.parametrize("V", [520, 521], ids=["aligned", "odd"])
@pytest.mark.parametrize("name", CASES)
def test_completion_lengths_share_a_kernel(name, V):
    kernel, launch = CASES[name]
    kernel.device_caches.pop(90, None)
    with sass.offline(90):
        for T in LENGTHS:
            launch(torch.bfloat16, V, T)
    assert len(sass.variants(kernel, 90)) == 1


def test_scalars_and_views_share_a_kernel():
    kernel, V = row_stats._row_stats_kernel, 520
    kernel.device_caches.pop(90, None)
    vector, ids, valid = torch.zeros(2, 5), torch.zeros(2, 5, dtype=torch.int64), torch.ones(2, 5, dtype=torch.uint8)
    logits = torch.empty(2, 6, V)
    with sass.offline(90):
        for temperature, view in ((1.0, logits[:, :-1]), (0.7, logits[:, 1:]), (2, torch.empty(2, 5, V))):
            row_stats.row_stats(view, ids, valid, vector, None, vector, vector, temperature, 0.0, 1.0)
    (compiled,) = sass.variants(kernel, 90)
    assert compiled.src.signature["transform"][:2] == ("fp32", "fp32")


def test_fp_fusion_is_pinned():
    with sass.offline(90):
        sass.launch_scale(torch.bfloat16, 520)
    assert all(compiled.metadata.enable_fp_fusion for compiled in sass.variants(scale._scale_kernel, 90))


def _compile_with_others(barrier, results):
    barrier.wait()
    with sass.offline(90):
        sass.launch_scale(torch.bfloat16, 520)
    results.put(len(sass.variants(scale._scale_kernel, 90)[0].asm["cubin"]))


def test_processes_share_a_cache_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    scale._scale_kernel.device_caches.clear()
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.SimpleQueue()
    processes = [context.Process(target=_compile_with_others, args=(barrier, results)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert len({results.get() for _ in processes}) == 1
    assert [json.loads(path.read_text()) for path in tmp_path.rglob("__grp__*.json")]
    assert triton.knobs.cache.dir == str(tmp_path)
