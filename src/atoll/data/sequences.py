"""From texts with owners to rows of tokens for language models. Shapes: N rows, T tokens of a row.

A row predicts the next token at each place: y is x shifted by one, and -100 where nothing counts: padding, and the
prompt of an instruction. In a plan: data = {name = "atoll.data.sequences:jsonl", path = ..., tokenizer = ...}.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from atoll.core.errors import DataError, PlanError
from atoll.core.options import Count, ShareBelowOne
from atoll.data.catalog.shakespeare import speeches
from atoll.data.corpora import ADDRESSES_ORIGIN, DIALOGUES_ORIGIN, addresses, exchanges
from atoll.data.dataset import Dataset
from atoll.data.targets import IGNORED, Array


class Text(NamedTuple):
    """One text of an owner; a model learns to say `answer` after `prompt`, which does not count."""

    owner: str
    answer: str
    prompt: str = ""


class Tokenizer(NamedTuple):
    """What rows are made with: how text becomes tokens, and the tokens that a text begins and ends with, if any."""

    encode: Any
    """Text -> list of token numbers, without special ones."""
    num_tokens: int
    begin: int | None = None
    end: int | None = None
    decode: Any = None
    """List of token numbers -> text, without special ones; None where nothing is decoded."""


def jsonl(
    path: str,
    tokenizer: str,
    owner: str = "owner",
    text: str = "text",
    prompt: str = "",
    length: Count = 128,
    packed: bool = True,
    test: ShareBelowOne = 0.1,
) -> Dataset:
    """Read a file with a JSON object a line, and cut each owner's texts into rows of `length` tokens.

    `owner`, `text` and `prompt` name fields; tokens of the prompt do not count. `tokenizer` is the directory of a
    model, or its name on the hub. `packed` rows follow each other through all texts of an owner; others begin anew with
    each text. The last share `test` of each owner's rows is for test.
    """
    return token_rows(
        Path(path).stem,
        _texts(Path(path), owner, text, prompt),
        hf_tokenizer(tokenizer),
        length=length,
        packed=packed,
        test=test,
        origin=f"{Path(path).name}, tokens of {Path(tokenizer).name}",
    )


def shakespeare(
    tokenizer: str,
    length: Count = 128,
    min_characters: Count = 500,
    plays: tuple[str, ...] = (),
    test: ShareBelowOne = 0.1,
    quiet: bool = False,
) -> Dataset:
    """Load the roles of Shakespeare's plays as rows of a language model's tokens; each role is an owner.

    `plays` names some of them, such as "hamlet"; all if empty.
    """
    known = speeches(quiet=quiet)
    texts = [
        Text(role, said)
        for role, said in known.items()
        if len(said) >= min_characters and (not plays or role.partition(":")[0] in plays)
    ]
    if not texts:
        names = sorted({role.partition(":")[0] for role in known})
        raise PlanError(f"no role of {list(plays)} has {min_characters} characters: lower it, or take {names}")
    return token_rows("shakespeare", texts, hf_tokenizer(tokenizer), length=length, packed=True, test=test)


def state_of_the_union(
    tokenizer: str,
    length: Count = 128,
    presidents: tuple[str, ...] = (),
    test: ShareBelowOne = 0.1,
    quiet: bool = False,
) -> Dataset:
    """Load the State of the Union addresses as rows of a language model's tokens; each president is an owner.

    `presidents` names some of them, such as "Abraham Lincoln"; all 43 if empty.
    """
    known = addresses(quiet=quiet)
    names = sorted({each.president for each in known})
    unknown = [name for name in presidents if name not in names]
    if unknown:
        raise PlanError(f"{unknown[0]!r} gave no State of the Union address: take some of {', '.join(names)}")
    texts = [Text(each.president, each.text) for each in known if not presidents or each.president in presidents]
    name = "state_of_the_union"
    return token_rows(name, texts, hf_tokenizer(tokenizer), length=length, test=test, origin=ADDRESSES_ORIGIN)


def dialogues(
    tokenizer: str,
    length: Count = 64,
    languages: tuple[str, ...] = (),
    owner: Literal["language", "topic"] = "language",
    test: ShareBelowOne = 0.1,
    quiet: bool = False,
) -> Dataset:
    """Load short dialogues as rows of a language model's tokens, each reply after what was said, which does not count.

    An owner is a language, or a topic of a language such as "english: food". `languages` names some of the 28, such as
    "chinese"; all if empty.
    """
    texts = [
        Text(each.language if owner == "language" else f"{each.language}: {each.topic}", each.reply, f"{each.said}\n")
        for each in exchanges(languages, quiet=quiet)
    ]
    encode = hf_tokenizer(tokenizer)
    return token_rows("dialogues", texts, encode, length=length, packed=False, test=test, origin=DIALOGUES_ORIGIN)


def huggingface(
    dataset: Any,
    tokenizer: str | Tokenizer,
    owner: str = "owner",
    text: str = "text",
    prompt: str = "",
    length: Count = 128,
    packed: bool = True,
    test: ShareBelowOne = 0.1,
    name: str = "huggingface",
) -> Dataset:
    """Cut the texts of a data set of Hugging Face, or of any iterable of records, into rows; see `jsonl`.

    `owner`, `text` and `prompt` name columns. For `Plan(data=...)` in Python: a file cannot name such an object.
    """
    entries = enumerate(dataset, start=1)
    texts = [_text(entry, f"{name}, row {number}", owner, text, prompt) for number, entry in entries]
    encode = hf_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    return token_rows(name, texts, encode, length=length, packed=packed, test=test)


def hf_tokenizer(path: str) -> Tokenizer:
    """Load the tokenizer of a model, from its directory or the hub; code of its own is not run."""
    try:
        auto = importlib.import_module("transformers").AutoTokenizer
    except ImportError as error:
        raise PlanError(f"a tokenizer needs transformers ({error}): use pip install 'atoll[llm]'") from error
    try:
        made = auto.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise PlanError(
            f"tokenizer {path!r} cannot be loaded ({' '.join(str(error).split())[:200]}): give the directory of a "
            "model with its tokenizer's files, or its name on the hub"
        ) from error

    def encode(text: str) -> list[int]:
        return list(made(text, add_special_tokens=False)["input_ids"])

    def decode(ids: list[int]) -> str:
        return str(made.decode(ids, skip_special_tokens=True))

    return Tokenizer(encode, len(made), made.bos_token_id, made.eos_token_id, decode)


def token_rows(
    name: str,
    texts: Iterable[Text],
    tokenizer: Tokenizer,
    *,
    length: int,
    packed: bool = True,
    test: float = 0.1,
    origin: str = "",
) -> Dataset:
    """Cut texts into rows of `length` tokens, owner by owner; the last share `test` of each owner's rows is for test.

    >>> letters = Tokenizer(lambda text: [ord(c) - 97 for c in text], 28, begin=26, end=27)
    >>> data = token_rows("two", [Text("me", "abc"), Text("me", "d", "z")], letters, length=4, test=0.0)
    >>> data.train_x.tolist(), data.train_y.tolist()
    ([[26, 0, 1, 2], [27, 26, 25, 3]], [[0, 1, 2, 27], [-100, -100, 3, 27]])
    """
    streams: dict[str, list[tuple[Array, Array]]] = {}
    for text in texts:
        streams.setdefault(text.owner, []).append(_tokens(text, tokenizer))
    filler = tokenizer.end if tokenizer.end is not None else 0
    by_owner = {}
    for owner, parts in streams.items():
        joined = [(np.concatenate(ids), np.concatenate(counts)) for ids, counts in [zip(*parts, strict=True)]]
        rows = [row for ids, counts in (joined if packed else parts) for row in _cut(ids, counts, length, filler)]
        if rows:
            by_owner[owner] = np.stack([x for x, _ in rows]), np.stack([y for _, y in rows])
    if not by_owner:
        raise DataError(f"{name}: no text has two tokens that count; give longer ones")
    num_test = {owner: _num_test(len(x), test) for owner, (x, _) in by_owner.items()}
    cuts = [(x, y, len(x) - num_test[owner]) for owner, (x, y) in by_owner.items()]
    train = [(x[:cut], y[:cut]) for x, y, cut in cuts]
    held = [(x[cut:], y[cut:]) for x, y, cut in cuts]
    return Dataset(
        name=name,
        train_x=np.concatenate([x for x, _ in train]),
        train_y=np.concatenate([y for _, y in train]),
        test_x=np.concatenate([x for x, _ in held]),
        test_y=np.concatenate([y for _, y in held]),
        num_classes=tokenizer.num_tokens,
        tokens=True,
        problem="tokens",
        owners=np.repeat(np.arange(len(train)), [len(x) for x, _ in train]),
        owner_names=tuple(by_owner),
        origin=origin,
    )


def _texts(path: Path, owner: str, text: str, prompt: str) -> Iterator[Text]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as text ({error}): give a file with a JSON object a line") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}, line {number}: {error}; each line must be a JSON object") from error
        yield _text(entry, f"{path}, line {number}", owner, text, prompt)


def _text(entry: Any, where: str, owner: str, text: str, prompt: str) -> Text:
    """Read a record by the names of its fields."""
    for field in filter(None, (owner, text, prompt)):
        if not isinstance(entry, Mapping) or field not in entry:
            has = sorted(entry) if isinstance(entry, Mapping) else type(entry).__name__
            raise DataError(f"{where}: no field {field!r}, it has {has}: name the fields of the data")
    return Text(str(entry[owner]), str(entry[text]), str(entry[prompt]) if prompt else "")


def _tokens(text: Text, tokenizer: Tokenizer) -> tuple[Array, Array]:
    """Return a text's tokens, with those that it begins and ends with, and which of them count as targets."""
    first = [tokenizer.begin] if tokenizer.begin is not None else []
    asked, said = tokenizer.encode(text.prompt) if text.prompt else [], tokenizer.encode(text.answer)
    last = [tokenizer.end] if tokenizer.end is not None else []
    ids = np.array([*first, *asked, *said, *last], dtype=np.int32)
    return ids, np.arange(len(ids)) >= len(first) + len(asked)


def _cut(ids: Array, counts: Array, length: int, filler: int) -> Iterator[tuple[Array, Array]]:
    """Cut a stream of tokens into rows of inputs and targets, the last one padded; drop rows without a target."""
    for start in range(0, len(ids) - 1, length):
        some, which = ids[start : start + length + 1], counts[start + 1 : start + length + 1]
        if which.any():
            missing = length + 1 - len(some)
            x = np.concatenate([some[:-1], np.full(missing, filler, dtype=np.int32)])
            y = np.where(which, some[1:], IGNORED)
            yield x, np.concatenate([y, np.full(missing, IGNORED, dtype=y.dtype)])


def _num_test(num: int, share: float) -> int:
    return min(num - 1, max(1, round(share * num))) if share and num > 1 else 0
