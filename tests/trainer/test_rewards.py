"""Reward functions: the shipped ones, how they are named, and every wrong thing a function may return."""

import logging
import math
import pickle

import numpy as np
import pytest
import torch
from tiny_models import VOCAB, make_tokenizer
from transformers import LlamaConfig, LlamaForSequenceClassification

from grpo_fast import group_advantages
from grpo_fast.rewards import Rewards, resolve_reward
from grpo_fast.rewards.classifier import ClassifierReward
from grpo_fast.rewards.text import ExactMatch, LengthPenalty, NumericMatch, RegexFormat, last_number

ROWS = 4


def score(functions, weights=None, completions=("a", "b", "c", "d"), ids=None, **columns):
    ids = [[1]] * len(completions) if ids is None else ids
    return Rewards(functions, weights).score(["p"] * len(completions), list(completions), ids, columns)


@pytest.mark.parametrize(
    "text, number",
    [
        ("12", "12"),
        ("the answer is 1,234.50.", "1234.50"),
        ("10-7=3", "3"),
        ("from 5-3", "3"),
        ("x = -3", "-3"),
        ("(\u22123)", "-3"),
        ("2e5", "2e5"),
        ("+.5", ".5"),
        ("1,2,3", "3"),
        ("1,2345", "2345"),
        ("12 apples and 7 pears.", "7"),
    ],
)
def test_last_number(text, number):
    from decimal import Decimal

    assert last_number(text) == Decimal(number)


def test_last_number_of_none():
    assert last_number("no digits - here .") is None
    assert last_number("1e" + "9" * 40) is None


def test_exact_match():
    scores = score(ExactMatch(), completions=(" 12\n", "12.", "", "x"), answer=["12", "12", "", 5])
    assert scores.total.tolist() == [1.0, 0.0, 1.0, 0.0]
    assert score("exact_match(column='gold')", completions=("a",), gold=["a"]).total.tolist() == [1.0]


def test_numeric_match():
    texts = ("so it is 1,000", "999.5", "none", "1e999999")
    assert score(NumericMatch(), completions=texts, answer=[1000] * 4).total.tolist() == [1.0, 0.0, 0.0, 0.0]
    near = score(NumericMatch(tolerance=0.5), completions=texts, answer=["#### 1000"] * 4)
    assert near.total.tolist() == [1.0, 1.0, 0.0, 0.0]
    big = score("numeric_match", completions=("12345678901234567891",), answer=[12345678901234567890])
    assert big.total.tolist() == [0.0]  # equal as floats


def test_numeric_match_without_a_number_in_the_column():
    with pytest.raises(RuntimeError, match=r"numeric_match.*'answer': expected a number, got 'five'"):
        score("numeric_match", completions=("5",), answer=["five"])


def test_regex_format():
    texts = ("<think>a\nb</think> <answer>1</answer>\n", "<think>a</think>", "x<think></think><answer></answer>", "")
    assert score(RegexFormat(), completions=texts).total.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert score(r"regex_format(pattern='[0-9]+')", completions=("12", "1a")).total.tolist() == [1.0, 0.0]


def test_length_penalty():
    ids = [[1] * n for n in (0, 6, 8, 10, 20)]
    scores = score("length_penalty(max_length=10, buffer=4)", completions=("",) * 5, ids=ids)
    assert scores.total.tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]


def test_conversational_completions():
    completions = [[{"role": "assistant", "content": "7"}]]
    assert score(["exact_match", "numeric_match"], completions=completions, answer=["7"]).total.tolist() == [2.0]


@pytest.mark.parametrize(
    "reward", [ExactMatch(), NumericMatch(), RegexFormat(), LengthPenalty(8, 2), Rewards("exact_match")]
)
def test_picklable(reward):
    assert type(pickle.loads(pickle.dumps(reward))) is type(reward)


def test_resolve_by_import_path():
    assert resolve_reward("math:fsum") is math.fsum
    assert resolve_reward("os.path.join").__name__ == "join"
    assert resolve_reward("grpo_fast.rewards.text:LengthPenalty(max_length=8, buffer=2)") == LengthPenalty(8, 2)
    assert resolve_reward("hf:some/model") == ClassifierReward("some/model")


@pytest.mark.parametrize(
    "spec, message",
    [
        ("exact_macth", r"expected one of \['exact_match'"),
        ("math:nothing", "'math:nothing': cannot be imported"),
        ("no.such.module", "cannot be imported"),
        ("math.pi", "expected a callable, got float"),
        ("length_penalty", r"expected length_penalty\(max_length"),
        ("length_penalty(10, 4)", r"expected NAME\(option=value"),
        ("length_penalty(max_length=open('x'))", r"expected NAME\(option=value"),
        ("regex_format(patern='a')", "expected regex_format.*got {'patern': 'a'}"),
        ("math:fsum(x=1)", "options need a class"),
    ],
)
def test_resolve_errors(spec, message):
    with pytest.raises(ValueError, match=message):
        resolve_reward(spec)


def test_no_functions_and_wrong_weights():
    with pytest.raises(ValueError, match=r"reward.funcs: expected at least one"):
        Rewards([])
    with pytest.raises(ValueError, match=r"reward.weights: expected 1 numbers, got 2"):
        Rewards(["exact_match"], [1.0, 2.0])


def test_weights_and_names():
    rewards = Rewards([lambda completions: [1] * ROWS, lambda completions: [2] * ROWS, "exact_match"], [0.5, 2, 1])
    assert rewards.names == ["<lambda>_0", "<lambda>_1", "exact_match"]
    scores = rewards.score(["p"] * ROWS, ["a"] * ROWS, [[1]] * ROWS, {"answer": ["a", "a", "b", "b"]})
    assert scores.total.tolist() == [5.5, 5.5, 4.5, 4.5]
    assert scores.by_function.tolist() == [[1, 2, 1], [1, 2, 1], [1, 2, 0], [1, 2, 0]]


def test_all_columns_arrive_as_lists_of_equal_length():
    seen = {}

    def keep(prompts, completions, completion_ids, **columns):
        seen.update(columns, prompts=prompts, completions=completions, completion_ids=completion_ids)
        return [0.0] * len(prompts)

    score(keep, answer=[1, 2, 3, 4], extra=[None, {}, "x", 2.0])
    assert sorted(seen) == ["answer", "completion_ids", "completions", "extra", "prompts"]
    assert {len(values) for values in seen.values()} == {ROWS}


def test_a_function_may_name_only_what_it_needs():
    assert score(lambda answer, completions: answer, answer=[1, 2, 3, 4], extra=[0] * 4).total.tolist() == [1, 2, 3, 4]
    with pytest.raises(ValueError, match=r"needs_gold: expected data columns \['gold'\], got \['answer'\]"):
        score(needs_gold, answer=[0] * 4)


def needs_gold(completions, gold):
    return gold


def test_none_and_nan_abstain(caplog):
    rewards = Rewards([lambda completions: [1.0, 1.0, None, None], lambda completions: [1.0, 0.0, 0.5, float("nan")]])
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            scores = rewards.score(["p"] * ROWS, ["a"] * ROWS, [[1]] * ROWS, {})
    assert scores.total[:3].tolist() == [2.0, 1.0, 0.5]
    assert scores.total[3].isnan()
    advantages = group_advantages(scores.total, ROWS)
    assert advantages[3] == 0
    assert advantages.isfinite().all()
    assert advantages[:3].tolist() == group_advantages(torch.tensor([2.0, 1.0, 0.5]), 3).tolist()
    assert [record.message for record in caplog.records] == [
        "reward <lambda>_0 abstained (None or NaN) for 2 of 4 completions",
        "reward <lambda>_1 abstained (None or NaN) for 1 of 4 completions",
        "no reward function answered for rows [3]: left out of their groups, advantage 0",
    ]  # once each


def wrong(value):
    def my_reward(completions):
        return value

    return my_reward


@pytest.mark.parametrize(
    "value, message",
    [
        ([], "my_reward: expected 4 rewards, one per completion, got 0"),
        ([1.0] * 3, "my_reward: expected 4 rewards, one per completion, got 3"),
        ([1.0] * 5, "my_reward: expected 4 rewards, one per completion, got 5"),
        (1.0, "my_reward: expected a list of 4 rewards, got float 1.0"),
        (None, "my_reward: expected a list of 4 rewards, got NoneType None"),
        ("1234", "my_reward: expected a list of 4 rewards, got str '1234'"),
        ({"a": 1}, "my_reward: expected a list of 4 rewards, got dict"),
        (torch.tensor(1.0), "my_reward: expected a list of 4 rewards, got float"),
        (["1", "2", "3", "4"], "my_reward: row 0: expected a number or None, got str '1'"),
        ([1.0, [2.0], 1.0, 1.0], "my_reward: row 1: expected a number or None, got list"),
        (torch.ones(4, 1), "my_reward: row 0: expected a number or None, got list"),
        ([1.0, 1.0, 1.0, math.inf], "my_reward: row 3: expected a finite number or None, got inf"),
        ([1.0, object(), 1.0, 1.0], "my_reward: row 1: expected a number or None, got <object"),
    ],
)
def test_wrong_results(value, message):
    with pytest.raises(ValueError, match=f"reward function {message}"):
        score(wrong(value))


@pytest.mark.parametrize(
    "value",
    [[1, 0, 1, 0], (1, 0, 1, 0), torch.tensor([1, 0, 1, 0]), np.array([1.0, 0.0, 1.0, 0.0]), [True, False, True, False],
     [torch.tensor(1.0), torch.tensor(0.0), np.float32(1), np.int64(0)]],
)  # fmt: skip
def test_accepted_results(value):
    assert score(wrong(value)).total.tolist() == [1.0, 0.0, 1.0, 0.0]


def test_an_exception_names_the_function_and_keeps_its_cause():
    def broken(completions):
        return [completions[99]]

    with pytest.raises(RuntimeError, match="reward function broken raised IndexError: list index") as info:
        score(broken)
    assert isinstance(info.value.__cause__, IndexError)


@pytest.fixture
def classifier_path(tmp_path):
    def make(**options):
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        config = LlamaConfig(vocab_size=len(VOCAB), num_labels=1, pad_token_id=0, eos_token_id=1, **sizes)
        config.update(options)
        LlamaForSequenceClassification(config).save_pretrained(tmp_path / "reward_model")
        make_tokenizer().save_pretrained(tmp_path / "reward_model")
        return str(tmp_path / "reward_model")

    return make


def test_classifier(classifier_path):
    path = classifier_path()
    rewards = Rewards([f"hf:{path}"])
    assert rewards.names == ["reward_model"]
    prompts, completions = ["1+1=", "2+2=", "longer prompt 3+3="], ["2", "", "6 of course"]
    scores = rewards.score(prompts, completions, [[1]] * 3, {})
    model, tokenizer = LlamaForSequenceClassification.from_pretrained(path).eval(), make_tokenizer()
    with torch.no_grad():
        expected = [
            model(torch.tensor([tokenizer(p + c)["input_ids"]])).logits.item()
            for p, c in zip(prompts, completions, strict=True)
        ]
    assert scores.total.tolist() == pytest.approx(expected, abs=1e-5)
    single = ClassifierReward(path, batch_size=1)(prompts, completions, None)
    assert single == pytest.approx(expected, abs=1e-5)
    copy = pickle.loads(pickle.dumps(rewards))
    assert copy.functions[0]._loaded is None
    chat = copy.score([[{"role": "user", "content": "1+1="}]], [[{"role": "assistant", "content": "2"}]], [[1]], {})
    with torch.no_grad():
        ids = tokenizer("<user>1+1=<assistant>2", add_special_tokens=False)["input_ids"]
        assert chat.total.tolist() == pytest.approx([model(torch.tensor([ids])).logits.item()], abs=1e-5)


def test_classifier_refuses_what_does_not_fit_its_positions(classifier_path):
    reward = ClassifierReward(classifier_path(max_position_embeddings=12))
    assert len(reward(["1+1=", "12+34+56+"], ["2", "78="], None)) == 2  # 12 tokens
    with pytest.raises(ValueError, match=r"row 1 has 13 tokens, prompt and completion, more than its 12 positions"):
        reward(["1+1=", "12+34+56+"], ["2", "789="], None)


def test_classifier_needs_one_output(classifier_path):
    with pytest.raises(RuntimeError, match="expected num_labels=1, got 2"):
        score(f"hf:{classifier_path(num_labels=2)}")


@pytest.mark.parametrize("max_length, buffer", [(4, 0), (4, 5), (4, -1)])
def test_length_penalty_needs_a_buffer(max_length, buffer):
    with pytest.raises(ValueError, match="0 < buffer <= max_length"):
        LengthPenalty(max_length, buffer)
