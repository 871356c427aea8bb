"""Steps of decoding that are recorded and repeated.

What a CUDA graph repeats are kernels on fixed memory: whatever Python looked at while it was recorded stays as it was.
Here the recorder is make_fx, which does the same with operators, so that a step that looks at a value, or at a shape
that changes, gives other tokens than one that is not recorded. tests/gpu has the same tokens from real graphs.
"""

import itertools

import pytest
import torch
from architectures import MODELS, VOCAB, make_architecture
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_fast.config import RolloutConfig, load_config
from grpo_fast.environment import check_environment
from grpo_fast.rollout import SamplingOptions, cuda_graph
from grpo_fast.rollout.decoding import GroupDecoder
from grpo_fast.rollout.transformers import TransformersRollout

RNG = torch.Generator().manual_seed(5)
PROMPTS = [torch.randint(3, VOCAB, (length,), generator=RNG).tolist() for length in (7, 3, 17, 7, 11)]


def ids(rollouts):
    return [rollout.completion_ids for rollout in rollouts]


@pytest.fixture
def recorded(monkeypatch):
    """The shapes of tokens that steps were recorded for."""
    shapes = []

    def record(step, tokens):
        step(tokens)  # a first call, as before a real recording
        graph = make_fx(step)(tokens)
        shapes.append(tuple(tokens.shape))
        results = []

        def replay(tokens):
            for result in results:
                result.fill_(torch.nan)  # a graph's result is overwritten by its next run
            results.append(graph(tokens))
            return results[-1]

        return replay

    monkeypatch.setattr(cuda_graph, "record", record)
    monkeypatch.setattr(cuda_graph, "refusal", lambda model: None)
    return shapes


@pytest.fixture(autouse=True)
def attention(monkeypatch):
    """As on a GPU."""
    monkeypatch.setattr("grpo_fast.rollout.cached_attention._has_kernel", lambda query, cache: False)


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_steps_that_are_not_recorded(name, recorded):
    model = make_architecture(name, torch.float64)
    model.generation_config.eos_token_id = list(range(2, 9))  # rows end at all times
    options = SamplingOptions(n=3, max_tokens=40, max_rows=9, logprobs=True)
    expected = TransformersRollout(model).generate(PROMPTS, options, 3)
    got = TransformersRollout(model, cuda_graphs=True).generate(PROMPTS, options, 3)
    assert len({len(completion) for completion in ids(expected)}) > 5
    assert ids(got) == ids(expected)
    for one, other in zip(got, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert len(recorded) > 2


def test_a_step_is_recorded_once_for_as_long_as_rows_stay_and_have_room(recorded):
    model = make_architecture("llama", torch.float64)
    model.generation_config.eos_token_id = None
    model.config.max_position_embeddings = 512
    options = SamplingOptions(n=3, max_tokens=200)
    expected = TransformersRollout(model).generate(PROMPTS, options, 0)
    assert recorded == []
    assert ids(TransformersRollout(model, cuda_graphs=True).generate(PROMPTS, options, 0)) == ids(expected)
    assert recorded == [(15,)] * 3  # room for 64, 128 and 199 tokens


@pytest.mark.parametrize("name", MODELS)
def test_a_recorded_step_waits_for_nothing_and_copies_nothing_from_the_host(name, monkeypatch):
    waits = {
        "_local_scalar_dense", "nonzero", "masked_select", "repeat_interleave", "_unique2", "bincount", "is_nonzero",
        "equal", "lift_fresh", "lift_fresh_copy",
    }  # fmt: skip
    seen = set()

    def record(step, tokens):
        graph = make_fx(step)(tokens)
        calls = (node.target for node in graph.graph.nodes if node.op == "call_function")
        seen.update(getattr(call, "overloadpacket", call).__name__ for call in calls)
        for node in graph.graph.nodes:  # a mask as an index has to be counted
            for index in node.args[1] if "index." in str(node.target) or "index_put" in str(node.target) else ():
                assert index is None or index.meta["val"].dtype == torch.int64
        return graph

    monkeypatch.setattr(cuda_graph, "record", record)
    monkeypatch.setattr(cuda_graph, "refusal", lambda model: None)
    model = make_architecture(name)
    TransformersRollout(model, cuda_graphs=True).generate(PROMPTS, SamplingOptions(n=2, max_tokens=4), 0)
    assert "embedding" in seen
    assert not seen & waits


def test_rows_leave_once_half_have_ended(recorded):
    model = make_architecture("llama")
    model.generation_config.eos_token_id = list(range(2, 9))
    TransformersRollout(model, cuda_graphs=True).generate(PROMPTS, SamplingOptions(n=20, max_tokens=30), 0)
    rows = [shape[0] for shape in recorded]
    assert 4 < len(rows) < 9
    assert all(2 * after <= before for before, after in itertools.pairwise(rows))


def test_room_is_given_back(monkeypatch):
    """Once long rows have left, those that come after them do not read over the room that they had."""
    rooms, step = [], GroupDecoder.step
    monkeypatch.setattr(GroupDecoder, "step", lambda self, tokens: (step(self, tokens), rooms.append(self._room))[0])
    model = make_architecture("llama", torch.float64)
    model.config.max_position_embeddings = 512
    decoder = GroupDecoder(model, 300)
    decoder.admit([[5, 6], [7, 8, 9]], [1, 1])
    for _ in range(130):
        decoder.step(torch.tensor([3, 4]))
    decoder.admit([[9, 10]], [1])
    decoder.step(torch.tensor([3, 4, 5]))
    decoder.keep([2])
    got = decoder.step(torch.tensor([6]))
    assert rooms[0] == 64
    assert rooms[-2:] == [256, 64]
    alone = GroupDecoder(model, 300)
    alone.admit([[9, 10]], [1])
    alone.step(torch.tensor([5]))
    assert torch.allclose(got, alone.step(torch.tensor([6])))
    decoder.keep([])
    assert decoder._room == 0


def test_refusals():
    model = make_architecture("llama")
    with pytest.raises(ValueError, match=r"rollout.cuda_graphs: .* it is on cpu. Set it to false"):
        TransformersRollout(model, cuda_graphs=True)
    with pytest.raises(ValueError, match=r"rollout.cuda_graphs: .* asked for"):
        TransformersRollout(model, share_prompts=False, cuda_graphs=True)
    with pytest.raises(ValueError, match=r"rollout.cuda_graphs: expected a GPU, got none"):
        check_environment(load_config(None, ["rollout.cuda_graphs=true"]), torch.device("cpu"))
    with pytest.raises(ValueError, match=r"rollout.cuda_graphs: True means nothing with rollout.engine=vllm"):
        RolloutConfig(engine="vllm", cuda_graphs=True)


def test_models_that_look_at_values_on_the_host_are_refused():
    assert cuda_graph.host_refusal(make_architecture("llama")) is None
    sizes = {
        "vocab_size": 9,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    dynamic = LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters=rope))
    assert "dynamic" in cuda_graph.host_refusal(dynamic)
    dynamic._can_compile_fullgraph = False
    assert "does not say" in cuda_graph.host_refusal(dynamic)
