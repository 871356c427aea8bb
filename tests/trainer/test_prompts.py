"""Prompts: special tokens, limits, the order they are drawn in, and the text of completions."""

import pytest
from tiny_models import BOS, EOS, make_tokenizer

from grpo_fast.prompts import PromptSource, decode_completion, encode_prompt

CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1="}]


def test_exactly_one_bos_for_text_and_for_conversations():
    tokenizer = make_tokenizer(adds_bos=True)
    plain, chat = encode_prompt(tokenizer, "1+1="), encode_prompt(tokenizer, CHAT)
    for ids in (plain, chat):
        assert ids[0] == BOS
        assert ids.count(BOS) == 1
    assert tokenizer.decode(chat[1:]) == "<system>be brief<user>1+1=<assistant>"
    assert encode_prompt(tokenizer, "<bos>1+1=") == plain  # text that spells it out


def test_no_bos_where_the_tokenizer_has_none(tokenizer):
    assert tokenizer.decode(encode_prompt(tokenizer, "1+1=")) == "1+1="
    assert tokenizer.decode(encode_prompt(tokenizer, CHAT[1:])) == "<user>1+1=<assistant>"


def test_last_assistant_message_is_continued(tokenizer):
    messages = [*CHAT[1:], {"role": "assistant", "content": "it is "}]
    assert tokenizer.decode(encode_prompt(tokenizer, messages)) == "<user>1+1=<assistant>it is "


def test_chat_template_kwargs(tokenizer):
    tokenizer.chat_template = "{{ tone }}{{ messages[0]['content'] }}"
    assert tokenizer.decode(encode_prompt(tokenizer, CHAT[1:], {"tone": "calm "})) == "calm 1+1="


@pytest.mark.parametrize(
    "ids, text", [([], ""), ([EOS], ""), ([3, 4, EOS], "01"), ([3, 4], "01"), ([3, 0, 4], "01"), ([9], "")]
)
def test_decode_completion(tokenizer, ids, text):
    assert decode_completion(tokenizer, ids, (EOS, 9)) == text


def rows_of(*texts):
    return [{"prompt": text, "answer": index} for index, text in enumerate(texts)]


def test_overlong_prompts_are_refused_with_the_remedy(tokenizer):
    message = r"data.max_prompt_length: 2 of 3 prompts exceed 4 tokens, row 1 first; .* has 6.*overlong_prompt=drop"
    with pytest.raises(ValueError, match=message):
        PromptSource(rows_of("1+1=", "10+10=", "2+22="), tokenizer, max_prompt_length=4)


def test_overlong_prompts_are_dropped_and_counted_never_cut(tokenizer):
    source = PromptSource(
        rows_of("1+1=", "10+10=", "2+2=", "2+22="), tokenizer, max_prompt_length=4, overlong="drop", shuffle=False
    )
    assert source.dropped == 2
    assert [tokenizer.decode(prompt.ids) for prompt in source.draw(4)] == ["1+1=", "2+2=", "1+1=", "2+2="]
    with pytest.raises(ValueError, match=r"2 of 2 prompts exceed 2 tokens.* has 6"):
        PromptSource(rows_of("1+1=", "10+10="), tokenizer, max_prompt_length=2, overlong="drop")


def test_limits_count_the_tokens_of_the_templated_prompt(tokenizer):
    conversation = {"prompt": CHAT[1:]}
    length = len("<user>1+1=<assistant>")
    source = PromptSource([conversation], tokenizer, max_prompt_length=length)
    assert tokenizer.decode(source.draw(1)[0].ids) == "<user>1+1=<assistant>"
    with pytest.raises(ValueError, match="1 of 1 prompts exceed"):
        PromptSource([conversation], tokenizer, max_prompt_length=length - 1)


def test_prompts_that_leave_no_room_for_a_completion_are_refused_before_anything_runs(tokenizer):
    rows = rows_of("1+1=", "10+10=")
    with pytest.raises(ValueError, match=r"room left by max_completion_length: 1 of 2 prompts exceed 5 tokens"):
        PromptSource(rows, tokenizer, room=5)
    assert PromptSource(rows, tokenizer, room=5, max_prompt_length=9, overlong="drop").kept == [0]
    assert PromptSource(rows, tokenizer, room=6).dropped == 0


def test_no_rows_and_no_such_column(tokenizer):
    with pytest.raises(ValueError, match="expected at least one row"):
        PromptSource([], tokenizer)
    with pytest.raises(ValueError, match=r"data.prompt_column: expected a column of the data, \['answer', 'prompt'\]"):
        PromptSource(rows_of("1"), tokenizer, prompt_column="question")


def drawn(source, count):
    return [prompt.row["answer"] for prompt in source.draw(count)]


def test_epochs_are_complete_and_in_different_orders(tokenizer):
    source = PromptSource(rows_of(*"123456789"), tokenizer, seed=3)
    first, second = drawn(source, 9), drawn(source, 9)
    assert sorted(first) == sorted(second) == list(range(9))
    assert first != second != list(range(9))
    assert source.epochs == 2.0


def test_position_can_be_saved_and_restored(tokenizer):
    rows = rows_of(*"12345")
    source = PromptSource(rows, tokenizer, seed=3)
    drawn(source, 7)  # in the middle of the second epoch
    state = source.state_dict()
    expected = drawn(source, 11)
    other = PromptSource(rows, tokenizer, seed=3)
    other.load_state_dict(state)
    assert drawn(other, 11) == expected
    assert drawn(PromptSource(rows, tokenizer, seed=4), 18)[7:] != expected


def test_templates_write_their_own_special_tokens():
    """A tokenizer that adds BOS to raw text adds none to a conversation whose template has none."""
    tokenizer = make_tokenizer(adds_bos=True)
    tokenizer.chat_template = tokenizer.chat_template.removeprefix("{{ bos_token }}")
    assert BOS not in encode_prompt(tokenizer, CHAT)
