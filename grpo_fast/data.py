"""Data sets as lists of rows: from files, from the hub, or generated.

A row is a dict with the prompt, a string or a list of messages, and any other columns; all of them reach the
reward functions. Every row has the same columns.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

from grpo_fast.config import DataConfig
from grpo_fast.tasks import TASKS

Row = dict[str, Any]


def load_dataset(data: DataConfig, split: Literal["train", "eval"] = "train") -> list[Row]:
    """Loads the rows that `data` names.

    Args:
        data: the section `data` of the configuration.
        split: "train", or "eval" for the held-out rows: those of `data.eval_path`, or the task's own.

    Returns:
        rows with `data.prompt_column` and every other column; columns that some rows lack are None there. The
        held-out list is empty when `data` names none.

    Raises:
        ValueError: no source is named, an unknown task or file type, or a row without a usable prompt.
        FileNotFoundError: no such file.
        ImportError: the file type needs a package that is not installed.
    """
    if data.task is not None:
        return _with_system_prompt(_task_rows(data, split), data)
    path, hub_split = (data.path, data.split) if split == "train" else (data.eval_path, data.eval_split)
    if path is None:
        if split == "eval":
            return []
        raise ValueError("data.path: expected a file, hub:NAME, or data.task, got neither. Set one of them")
    rows = _equal_columns(_read(path, hub_split))
    if not rows:
        raise ValueError(f"{path}: expected at least one row, got none")
    for number, row in enumerate(rows, start=1):
        _check_prompt(row, data.prompt_column, f"{path}: row {number}")
    return _with_system_prompt(rows, data)


def _task_rows(data: DataConfig, split: str) -> list[Row]:
    task = TASKS.get(data.task)
    if task is None:
        raise ValueError(f"data.task: expected one of {', '.join(TASKS)}, got {data.task!r}")
    try:
        rows = task(split, **data.task_args)
    except TypeError as error:
        raise ValueError(f"data.task_args: {error}") from error
    return [{data.prompt_column: row.pop("prompt"), **row} for row in rows]


def _read(path: str, hub_split: str) -> Iterable[Row]:
    if path.startswith("hub:"):
        return _read_hub(path.removeprefix("hub:"), hub_split)
    if not Path(path).is_file():
        raise FileNotFoundError(f"no data file at {path}")
    suffix = Path(path).suffix
    if suffix not in _READERS:
        raise ValueError(f"{path}: expected a file ending in {', '.join(_READERS)}, or hub:NAME")
    return _READERS[suffix](Path(path))


def _read_jsonl(path: Path) -> Iterable[Row]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _parse_json(line, f"{path}: line {number}", dict)


def _read_json(path: Path) -> Iterable[Row]:
    for number, row in enumerate(_parse_json(path.read_text(encoding="utf-8"), str(path), list), start=1):
        if not isinstance(row, dict):
            raise ValueError(f"{path}: row {number}: expected an object, got {type(row).__name__}")
        yield row


def _parse_json(text: str, where: str, expected: type) -> Any:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(value, expected):
        kind = {dict: "an object", list: "a list of objects"}[expected]
        raise ValueError(f"{where}: expected {kind}, got {type(value).__name__}")
    return value


def _read_parquet(path: Path) -> Iterable[Row]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError(f"{path}: needs pyarrow: pip install 'grpo-fast[datasets]'") from error
    return parquet.read_table(path).to_pylist()


def _read_hub(name: str, split: str) -> Iterable[Row]:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(f"hub:{name}: needs datasets: pip install 'grpo-fast[datasets]'") from error
    name, _, subset = name.partition(":")
    return list(datasets.load_dataset(name, subset or None, split=split))


_READERS: dict[str, Callable[[Path], Iterable[Row]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
}


def _equal_columns(rows: Iterable[Row]) -> list[Row]:
    rows = list(rows)
    columns = dict.fromkeys(column for row in rows for column in row)
    return [{column: row.get(column) for column in columns} for row in rows]


def _check_prompt(row: Row, column: str, where: str) -> None:
    if column not in row:
        raise ValueError(f"{where}: no column {column!r}, got {', '.join(row)}. Set data.prompt_column")
    prompt = row[column]
    if isinstance(prompt, str) and prompt:
        return
    messages = prompt if isinstance(prompt, list) else []
    if not messages or not all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages):
        expected = "text or a list of messages with role and content"
        raise ValueError(f"{where}: column {column!r}: expected {expected}, got {prompt!r:.80}")


def _with_system_prompt(rows: list[Row], data: DataConfig) -> list[Row]:
    if data.system_prompt is None:
        return rows
    return [{**row, data.prompt_column: _conversation(row[data.prompt_column], data.system_prompt)} for row in rows]


def _conversation(prompt: str | list[dict[str, str]], system_prompt: str) -> list[dict[str, str]]:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if messages[0]["role"] == "system":
        raise ValueError("data.system_prompt: the data has system messages of its own. Set it to null")
    return [{"role": "system", "content": system_prompt}, *messages]
