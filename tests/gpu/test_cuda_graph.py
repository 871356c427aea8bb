"""Decoding by CUDA graphs draws what decoding without them draws. Skipped where there is no GPU."""

import pytest
import torch
from architectures import MODELS, VOCAB, make_architecture

from grpo_fast.rollout import SamplingOptions
from grpo_fast.rollout.transformers import TransformersRollout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
PROMPTS = [[3 + (7 * i + j) % (VOCAB - 3) for j in range(length)] for i, length in enumerate((7, 3, 17, 7, 11))]


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_steps_that_are_not_recorded(name):
    model = make_architecture(name, torch.float64).cuda()
    model.generation_config.eos_token_id = list(range(2, 9))
    longest = 40
    if "gpt2" not in name:  # which has a table of 64 positions
        model.config.max_position_embeddings = 256
        longest = 200  # room grows to 64, 128 and 199
    options = SamplingOptions(n=3, max_tokens=longest, max_rows=9, logprobs=True)
    expected = TransformersRollout(model).generate(PROMPTS, options, 3)
    got = TransformersRollout(model, cuda_graphs=True).generate(PROMPTS, options, 3)
    assert [r.completion_ids for r in got] == [r.completion_ids for r in expected]
    for one, other in zip(got, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_recordings_leave_nothing_behind():
    model = make_architecture("llama").cuda()
    model.generation_config.eos_token_id = list(range(2, 9))
    engine, options, left = TransformersRollout(model, cuda_graphs=True), SamplingOptions(n=8, max_tokens=40), []
    for seed in range(12):
        engine.generate(PROMPTS, options, seed)
        torch.cuda.synchronize()
        left.append(torch.cuda.memory_allocated())
    assert left[-1] <= left[2]
