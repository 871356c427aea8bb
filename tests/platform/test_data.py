import builtins
import json
import sys
import types

import pytest

from grpo_fast.config import DataConfig
from grpo_fast.data import load_dataset
from grpo_fast.tasks import addition

ROWS = [{"prompt": "1+1=", "answer": "2", "extra": [1]}, {"prompt": "2+2=", "answer": "4", "extra": None}]
CHAT = [{"role": "user", "content": "hello"}]


def write_jsonl(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return str(path)


def test_every_column_of_every_format_is_kept(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    for path in (write_jsonl(tmp_path / "rows.jsonl", ROWS), tmp_path / "rows.json", tmp_path / "rows.parquet"):
        assert load_dataset(DataConfig(path=str(path))) == ROWS


def test_columns_that_some_rows_lack_are_none_there(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a", "x": 1}, {"prompt": "b", "y": 2}])
    assert load_dataset(DataConfig(path=path)) == [
        {"prompt": "a", "x": 1, "y": None},
        {"prompt": "b", "x": None, "y": 2},
    ]


def test_conversational_prompts_and_other_column_names(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"question": CHAT, "prompt": 3}])
    assert load_dataset(DataConfig(path=path, prompt_column="question")) == [{"question": CHAT, "prompt": 3}]


def test_a_system_prompt_makes_prompts_conversational(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "hello"}, {"prompt": CHAT}])
    system = {"role": "system", "content": "Be brief."}
    rows = load_dataset(DataConfig(path=path, system_prompt="Be brief."))
    assert [row["prompt"] for row in rows] == [[system, *CHAT], [system, *CHAT]]
    path = write_jsonl(tmp_path / "own.jsonl", [{"prompt": [system, *CHAT]}])
    with pytest.raises(ValueError, match=r"data\.system_prompt: the data has system messages of its own"):
        load_dataset(DataConfig(path=path, system_prompt="Be long."))


@pytest.mark.parametrize(
    "text, said",
    [
        ('{"prompt": "a"}\n{"prompt": }\n', "line 2: not valid JSON"),
        ('["a"]\n', "line 1: expected an object, got list"),
        ('{"question": "a"}\n', "row 1: no column 'prompt', got question. Set data.prompt_column"),
        ('{"prompt": ""}\n', "row 1: column 'prompt': expected text or a list of messages"),
        ('{"prompt": []}\n', "expected text or a list of messages"),
        ('{"prompt": [{"role": "user"}]}\n', "expected text or a list of messages"),
        ("\n", "expected at least one row, got none"),
    ],
)
def test_rows_without_a_usable_prompt_are_refused_by_place(tmp_path, text, said):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the text is compared below
        load_dataset(DataConfig(path=str(path)))
    assert said in str(error.value)


def test_sources_that_do_not_exist(tmp_path):
    with pytest.raises(FileNotFoundError, match="no data file at"):
        load_dataset(DataConfig(path=str(tmp_path / "none.jsonl")))
    (tmp_path / "rows.csv").write_text("prompt\n")
    with pytest.raises(ValueError, match=r"expected a file ending in \.jsonl, \.json, \.parquet, or hub:NAME"):
        load_dataset(DataConfig(path=str(tmp_path / "rows.csv")))
    with pytest.raises(ValueError, match=r"data\.path: expected a file"):
        load_dataset(DataConfig())
    with pytest.raises(ValueError, match=r"data\.task: expected one of addition"):
        load_dataset(DataConfig(task="additoin"))
    assert load_dataset(DataConfig(path="any.jsonl"), "eval") == []


def test_hub_data_sets_go_through_the_datasets_package(monkeypatch):
    asked = []

    def fetch(name, subset, split):
        asked.append((name, subset, split))
        return iter(ROWS)

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=fetch))
    data = DataConfig(path="hub:org/sums:main", eval_path="hub:org/sums", eval_split="validation")
    assert load_dataset(data) == ROWS
    assert load_dataset(data, "eval") == ROWS
    assert asked == [("org/sums", "main", "train"), ("org/sums", None, "validation")]


@pytest.mark.parametrize("path, package", [("hub:x", "datasets"), ("rows.parquet", "pyarrow")])
def test_a_missing_optional_package_is_named(monkeypatch, tmp_path, path, package):
    real_import = builtins.__import__

    def without(name, *rest, **kwargs):
        if name.split(".")[0] == package:
            raise ImportError(name)
        return real_import(name, *rest, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.parquet").touch()
    with pytest.raises(ImportError, match=rf"needs {package}: pip install 'grpo-fast\[datasets\]'"):
        load_dataset(DataConfig(path=path))


def test_addition_is_seeded_right_and_its_splits_share_no_sum():
    options = {"max_value": 19, "eval_size": 50, "seed": 3}
    train, held_out = addition("train", **options), addition("eval", **options)
    assert train == addition("train", **options)
    assert train != addition("train", **options | {"seed": 4})
    assert len(held_out) == 50
    for row in train + held_out:
        first, second = row["prompt"].removesuffix("=").split("+")
        assert int(first) + int(second) == int(row["answer"])

    def unordered(rows):
        return {tuple(sorted(row["prompt"].removesuffix("=").split("+"))) for row in rows}

    assert not unordered(train) & unordered(held_out)
    assert len({row["prompt"] for row in train}) == len(train)


def test_the_held_out_sums_do_not_depend_on_the_size_of_the_training_split():
    few = addition("eval", train_size=1)
    assert few == addition("eval", train_size=5000)
    assert len(addition("train", train_size=7)) == 7
    assert addition("train", max_value=10**6, train_size=4)[:2] == addition("train", max_value=10**6, train_size=2)


def test_addition_formats_its_prompts():
    data = DataConfig(
        task="addition",
        prompt_column="question",
        task_args={
            "terms": 3,
            "digits": 2,
            "separator": " + ",
            "template": "What is {sum}?",
            "conversational": True,
            "earlier_turns": CHAT,
        },
    )
    (hello, message), answer = load_dataset(data, "eval")[0]["question"], load_dataset(data, "eval")[0]["answer"]
    numbers = message["content"].removeprefix("What is ").removesuffix("?").split(" + ")
    assert hello == CHAT[0]
    assert [len(number) for number in numbers] == [2, 2, 2]
    assert sum(map(int, numbers)) == int(answer)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"terms": 1}, r"data\.task_args\.terms: expected an integer >= 2, got 1"),
        ({"max_value": 9, "eval_size": 100}, r"data\.task_args\.eval_size: expected fewer"),
        ({"template": "?"}, r"data\.task_args\.template"),
        ({"earlier_turns": CHAT}, r"data\.task_args\.earlier_turns: means nothing"),
        ({"max": 9}, r"data\.task_args: .*unexpected keyword argument 'max'"),
    ],
)
def test_impossible_task_arguments_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        load_dataset(DataConfig(task="addition", task_args=options))
