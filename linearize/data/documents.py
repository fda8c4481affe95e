"""Read documents from files or datasets, and tokenize them: source -> rows -> pieces of token ids.

A row is a text, or a conversation: `messages` of {role, content}, or `prompt` and `completion`. Nothing here
knows the block length; packing.py packs.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..demo import TEXTS
from ..errors import Exit, IncompatibleError, LinearizeError, ResourceError, did_you_mean, nearest, reason_of
from ..hub.download import unanswered
from .chat import marks_answers, refusing, rendered, template_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SLAB = 1 << 20  # characters per tokenizer call: feeds its threads, bounds its memory (240 bytes a token)
SMALL, LONGEST_TOKEN = 1 << 20, 64  # bytes of a file that may hold no text, characters that may be a single token
ASSISTANT = "assistant"  # the role whose messages sft learns
LOOKED_AT = 1 << 31  # characters of a source that `check_rows` reads: some 5 s, no more than hashing them takes


@dataclass(frozen=True)
class TextSource:
    """Where documents come from: exactly one of `files`, `path` (a `datasets` name or folder) and `demo`.

    A Hub dataset is known by its name, not by its content: to read a newer version, delete the cache.
    """

    files: tuple[Path, ...] = ()
    path: str | None = None
    name: str | None = None
    data_files: tuple[str, ...] = ()
    split: str = "train"
    streaming: bool = False
    demo: Literal["train", "heldout", "packages"] | None = None
    text_key: str = "text"
    set_key: str = "data.pack.text_key"  # which value of a recipe says the key; empty where none does

    def __post_init__(self) -> None:
        if sum(map(bool, (self.files, self.path, self.demo))) != 1:
            raise LinearizeError("a data source is exactly one of `files`, `path` and `demo`")

    def __str__(self) -> str:
        return ", ".join(map(os.path.normpath, self.files)) or self.path or TEXTS[str(self.demo)]


class Piece(NamedTuple):
    """Consecutive token ids of one document."""

    ids: list[int]
    learned: list[int] | None  # 1 where the token is a target; None: everywhere
    first: bool  # does the document begin here?
    whole: bool  # must it stay in one block?


class _Row(NamedTuple):
    where: str  # file:line, for messages
    fields: Mapping[str, Any]


class _Slab(NamedTuple):
    text: str
    first: bool  # of its document
    last: bool


def pieces(source: TextSource, tokenizer: PreTrainedTokenizerBase, *, sft: bool) -> Iterator[Piece]:
    """The documents of `source` in order. Without `sft` a conversation is text like any other."""
    return _Encoder(tokenizer, source, sft).pieces(rows_of(source))


def documents_of(source: TextSource) -> Iterator[tuple[str, str | list[dict[str, Any]]]]:
    """Where each document stands, and its text, or the messages of a conversation where a row holds both."""
    for row in rows_of(source):
        text = _text(*row, source, True)
        yield row.where, _conversation(*row) if text is None else text


def plain_texts(source: TextSource) -> Iterator[str]:
    """The documents of `source` in order, as text; of a conversation each message."""
    for row in rows_of(source):
        text = _text(*row, source, False)
        yield from [text] if text is not None else (message["content"] for message in _conversation(*row))


def end_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """What documents end with: eos, or an encoder's separator. Raises LinearizeError where there is neither."""
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    if end is None:
        message = "the tokenizer has no eos token to end documents with. Name one in the model's tokenizer_config.json"
        raise IncompatibleError(message)
    return int(end)


def start_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the tokenizer puts in front of a text. Raises LinearizeError (exit 3) where it makes no token of text."""
    plain, full = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    if not plain:
        message = "the tokenizer makes no token of the letter a: its vocabulary is empty or cut short"
        raise IncompatibleError(f"{message}. Put the model's own tokenizer into its folder")
    found: list[int] = next(full[:i] for i in range(len(full)) if full[i : i + len(plain)] == plain)
    return found


class _Encoder:
    """Rows -> pieces. A text becomes what the tokenizer puts in front (bos), its tokens, and eos."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source: TextSource, sft: bool) -> None:
        self.tokenizer, self.source, self.sft = tokenizer, source, sft
        self.eos = [end_token(tokenizer)]
        self.template = template_of(tokenizer)
        self.prefix = start_tokens(tokenizer)

    def pieces(self, rows: Iterable[_Row]) -> Iterator[Piece]:
        batch: list[_Slab] = []
        size = 0
        for row in rows:
            text = _text(*row, self.source, self.sft)
            if text is None:
                ids, learned = self.conversation(*row)
                yield Piece(ids, learned if self.sft else None, first=True, whole=self.sft)
                continue
            for slab in _slabs(text):
                batch.append(slab)
                size += len(slab.text)
                if size >= _SLAB:
                    yield from self._texts(batch)
                    batch, size = [], 0
        yield from self._texts(batch)

    def _ids(self, texts: list[str]) -> list[list[int]]:
        # verbose=False: no warning that a document is longer than the model's context, it is cut later.
        ids: list[list[int]] = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _texts(self, batch: list[_Slab]) -> Iterator[Piece]:
        encoded = self._ids([slab.text for slab in batch]) if batch else []
        for slab, ids in zip(batch, encoded, strict=True):
            yield Piece(self.prefix * slab.first + ids + self.eos * slab.last, None, slab.first, whole=False)

    def conversation(self, where: str, fields: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        """Token ids of a conversation, and 1 for each token that the assistant writes."""
        messages = _conversation(where, fields)
        if self.template is None and fields.get("messages") is None:
            # Tokenised apart, as at inference, where the prompt comes before there is a completion.
            before, after = self._ids([message["content"] for message in messages])
            before, after = self.prefix + before, after + self.eos
            return before + after, [0] * len(before) + [1] * len(after)
        if self.template is None:
            raise IncompatibleError(
                f"{where}: `messages` need a chat template and the tokenizer has none. Use the tokenizer of "
                "an instruct model, set its `chat_template`, or give rows of `prompt` and `completion`"
            )
        return self._chat(where, messages)

    def _chat(self, where: str, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
        """`conversation` by the tokenizer's template."""
        with refusing(where):
            if not marks_answers(self.tokenizer):
                return self._turns(where, messages)
            chat: Any = self.tokenizer.apply_chat_template(
                messages, return_dict=True, return_assistant_tokens_mask=True
            )
            return chat["input_ids"], chat["assistant_masks"]

    def _turns(self, where: str, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
        """`_chat` by a template that does not mark the assistant: what its turn adds to the tokens before."""
        ids = rendered(self.tokenizer, messages)
        learned = [0] * len(ids)
        for i, message in enumerate(messages):
            if message["role"] != ASSISTANT or not self.sft:
                continue
            before = rendered(self.tokenizer, messages[:i], answer=True) if i else []
            after = rendered(self.tokenizer, messages[: i + 1])
            if ids[: len(after)] != after or after[: len(before)] != before:
                raise LinearizeError(
                    f"{where}: the chat template renders message {i} differently when others follow, so its "
                    "tokens cannot be told apart. Mark them with {% generation %} in the template, or give "
                    "rows whose only assistant message is the last"
                )
            learned[len(before) : len(after)] = [1] * (len(after) - len(before))
        return ids, learned


def _slabs(text: str) -> Iterator[_Slab]:
    """`text` in stretches for one tokenizer call, cut at line ends; none for blank text."""
    start = 0
    while start < len(text) and not text.isspace():
        end = min(start + _SLAB, len(text))
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield _Slab(text[start:end], start == 0, end == len(text))
        start = end


def _text(where: str, fields: Mapping[str, Any], source: TextSource, sft: bool) -> str | None:
    """The plain text of a row, or None for a conversation, which sft prefers where a row holds both."""
    text_key = source.text_key
    given = {name for name, value in fields.items() if value is not None}
    chat = "messages" in given or {"prompt", "completion"} <= given
    if chat and (sft or text_key not in given):
        return None
    if text_key in fields and text_key not in given:
        raise LinearizeError(f"{where}: {text_key!r} is null. Take the row out, or give it a text, which may be empty")
    if text_key not in given:
        strings = [name for name in given if isinstance(fields[name], str)]
        likely = nearest(text_key, strings) or (strings[0] if len(strings) == 1 else "KEY")
        told = f"Set {source.set_key}={likely} (for data.train and data.eval alike)"
        raise LinearizeError(
            f"{where}: no {text_key!r} (nor `messages`, nor `prompt` and `completion`)."
            f"{did_you_mean(text_key, given)} Found: {', '.join(sorted(given)) or 'nothing'}. "
            + (told if source.set_key else f"Rename {likely} to {text_key} in the file")
        )
    return _string(where, fields, text_key)


def _conversation(where: str, fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages of a row; its prompt and its completion are two."""
    if fields.get("tools"):
        raise LinearizeError(f"{where}: 'tools' are not handed to the chat template. Take such rows out, or the key")
    if fields.get("messages") is not None:
        return _messages(where, fields["messages"])
    prompt, completion = _string(where, fields, "prompt"), _string(where, fields, "completion")
    return [{"role": "user", "content": prompt}, {"role": ASSISTANT, "content": completion}]


def _string(where: str, fields: Mapping[str, Any], key: str) -> str:
    value = fields[key]
    if not isinstance(value, str):
        raise LinearizeError(f"{where}: {key!r} is {type(value).__name__}, not a string")
    return value


def _messages(where: str, messages: Any) -> list[dict[str, Any]]:
    strings = [
        isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        for message in (messages if isinstance(messages, list) else [])
    ]
    if not strings or not all(strings):
        raise LinearizeError(f"{where}: `messages` is not a list of {{role: string, content: string}}")
    if any(message.get("weight") not in (None, 1) for message in messages):
        raise LinearizeError(f"{where}: a message has a 'weight', and all that the assistant writes is learned alike")
    return list(messages)


def check_rows(source: TextSource, *, sft: bool) -> None:
    """Read a source without a tokenizer. Raises LinearizeError for the first row that training could not read.

    At most LOOKED_AT characters are read, of every file the same share, or all of a small file. Of a dataset that is
    no local folder one row is read, without a download of the rest.
    """
    if source.demo:
        return
    if source.path:
        first = re.split(r"[\[+]", source.split)[0]  # datasets streams whole splits alone: no train[:1%], no train+test
        rows = rows_of(replace(source, streaming=True, split=first))
        with suppress(NotImplementedError):  # of files that cannot be streamed
            _read_rows(rows if Path(source.path).is_dir() else islice(rows, 1), source, sft, LOOKED_AT)
    check_enough(source)
    left, roles = LOOKED_AT, set[str]()
    smallest_first = sorted(source.files, key=lambda file: file.stat().st_size)
    for number, file in enumerate(smallest_first):
        share = left // (len(smallest_first) - number)
        left -= _read_rows(rows_of(replace(source, files=(file,))), source, sft, share, roles)
    if sft and source.files and ASSISTANT not in roles:
        raise LinearizeError(
            f"{source}: no message has the role {ASSISTANT!r}, and nothing else is learned. Found: "
            f"{', '.join(sorted(roles))}"
        )


def check_enough(source: TextSource, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
    """Raise LinearizeError (exit 2) for small files without text, or with a single token by `tokenizer`: no token is
    left to predict."""
    if not source.files or not all(file.is_file() and file.stat().st_size <= SMALL for file in source.files):
        return
    texts = list[str]()
    for text in plain_texts(source):
        texts += [text] if text.strip() else []
        if sum(map(len, texts)) > LONGEST_TOKEN:
            return
    found = "" if texts else "no text"
    if texts and tokenizer is not None:
        count = sum(map(len, tokenizer(texts, add_special_tokens=False)["input_ids"]))
        found = "one token of text" * (count < 2)
    if found:
        raise LinearizeError(f"{source} has {found}: there is nothing to train or measure on. Give a longer text")


def check_first_rows(source: TextSource, *, sft: bool) -> None:
    """`check_rows` of the first row of each local file, however long the file is. No dataset is opened, and no .txt
    file, which has no keys."""
    if not any(file.stat().st_size for file in source.files):
        check_enough(source)
    for file in source.files:
        if file.suffix != ".txt":
            rows = _parquet_rows(file, 1) if file.suffix == ".parquet" else _json_rows(file)
            _read_rows(islice(rows, 1), source, sft, 1)


def check_chats(source: TextSource, tokenizer: PreTrainedTokenizerBase, *, sft: bool) -> None:
    """Raise LinearizeError where the first row of a local file is a conversation that the tokenizer's chat template
    cannot render (exit 2), or has no template for (exit 3)."""
    encoder = _Encoder(tokenizer, source, sft)
    for file in source.files:
        if file.suffix != ".txt":
            for row in islice(rows_of(replace(source, files=(file,))), 1):
                if _text(*row, source, sft) is None:
                    encoder.conversation(*row)


def _read_rows(rows: Iterable[_Row], source: TextSource, sft: bool, most: int, roles: set[str] | None = None) -> int:
    """Read rows until they have `most` characters; returns how many they had. `roles` gets those of their messages, and
    plain text is learned as the assistant's."""
    found = 0
    for row in rows:
        text = _text(*row, source, sft)
        messages = _conversation(*row) if text is None else [{"role": ASSISTANT, "content": text}]
        found += sum(len(message["content"]) for message in messages)
        if roles is not None:
            roles.update(message["role"] for message in messages)
        if found >= most:
            break
    return found


def rows_of(source: TextSource) -> Iterator[_Row]:
    if source.demo:
        from linearize.demo.corpus import documents, package_documents

        for document in package_documents() if source.demo == "packages" else documents(source.demo):
            yield _Row(f"demo document {document.name}", {source.text_key: document.text})
    elif source.path:
        rows = open_dataset(source.path, source.name, source.split, source.streaming, source.data_files)
        with dataset_errors(str(source)):
            for i, fields in enumerate(rows):
                yield _Row(f"{source} row {i}", fields)
    for file in source.files:
        if file.suffix == ".txt":
            try:
                yield _Row(str(file), {source.text_key: file.read_text(encoding="utf-8-sig")})
            except UnicodeDecodeError as error:
                raise LinearizeError(f"{file} is not UTF-8: {error}") from error
        elif file.suffix == ".parquet":
            yield from _parquet_rows(file)
        else:
            yield from _json_rows(file)


def _json_rows(file: Path) -> Iterator[_Row]:
    """The objects of a .jsonl file, packed or not. Raises LinearizeError with the line that cannot be read."""
    number = 0
    try:
        # What is no UTF-8 becomes half a surrogate pair here, so that its line can be told.
        with io.TextIOWrapper(_unpacked(file), encoding="utf-8-sig", errors="surrogateescape") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    where = f"{file}:{number}"
                    yield _Row(where, _json_object(where, line))
    except (EOFError, zlib.error, OSError) as error:
        if file.suffix not in (".gz", ".zst"):
            raise
        message = f"{file}:{number + 1}: cannot be unpacked ({error}). The file is cut short or damaged"
        raise LinearizeError(message) from error


def _unpacked(file: Path) -> Any:
    """The bytes of a file, unpacked as its name says."""
    if file.suffix == ".gz":
        return gzip.open(file, "rb")
    if file.suffix == ".zst":
        return _pyarrow(file).CompressedInputStream(_pyarrow(file).OSFile(str(file)), "zstd")
    return file.open("rb")


def _pyarrow(file: Path) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise ResourceError(f'{file} needs: pip install "linearize[train]"') from error
    return pyarrow


def _parquet_rows(file: Path, at_once: int = 1 << 16) -> Iterator[_Row]:
    errors = _pyarrow(file).ArrowException
    from pyarrow import parquet

    number = 0
    try:
        for batch in parquet.ParquetFile(file).iter_batches(batch_size=at_once):
            for fields in batch.to_pylist():
                yield _Row(f"{file} row {number}", fields)
                number += 1
    except (errors, OSError) as error:
        raise LinearizeError(f"{file} row {number}: cannot be read ({reason_of(error)})") from error


def _json_object(where: str, line: str) -> dict[str, Any]:
    if not line.isascii() and (found := re.search("[\udc80-\udcff]", line)):
        byte = ord(found[0]) - 0xDC00
        raise LinearizeError(f"{where}:{found.start() + 1}: not UTF-8 (byte {byte:#x})")
    try:
        value = json.loads(line)
        if "\\ud" in line.lower():  # only an escape brings in half a surrogate pair: tokenizers raise
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise LinearizeError(f"{where}: brackets in brackets, too deep to be read. One object per line") from error
    except json.JSONDecodeError as error:
        raise LinearizeError(f"{where}:{error.colno}: not JSON ({error.msg}). One object per line") from error
    except UnicodeEncodeError as error:
        raise LinearizeError(f"{where}: half of a surrogate pair (\\ud...) is no character") from error
    except ValueError as error:  # Python reads no integer of more than 4,300 digits
        raise LinearizeError(f"{where}: a number that is too long to be read. Write it as a string") from error
    if not isinstance(value, dict):
        raise LinearizeError(f'{where}: {type(value).__name__}, not an object such as {{"text": "..."}}')
    return value


def open_dataset(
    path: str, name: str | None, split: str, streaming: bool = False, data_files: tuple[str, ...] = ()
) -> Any:
    """A split of a `datasets` dataset. Raises LinearizeError where there is none."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise no_datasets(path) from error
    away = None if Path(path).exists() else unanswered(path, dataset=True)
    with dataset_errors(path), cache_alone(away):
        return load_dataset(path, name, split=split, streaming=streaming, data_files=list(data_files) or None)


@contextmanager
def cache_alone(away: Exception | None) -> Iterator[None]:
    """Within: where the Hub is `away`, `datasets` looks into its cache alone, and an error says why."""
    if away is None:
        yield
        return
    from datasets import config
    from huggingface_hub import constants

    before, config.HF_HUB_OFFLINE = config.HF_HUB_OFFLINE, True
    try:
        yield
    except ConnectionError:
        if constants.HF_HUB_OFFLINE:
            raise
        why = f"{constants.ENDPOINT} cannot be reached ({type(away).__name__}: {reason_of(away)})"
        raise ConnectionError(f"{why}. Check the network and its proxy") from away
    finally:
        config.HF_HUB_OFFLINE = before


def no_datasets(path: str) -> LinearizeError:
    """The error (exit 4) for a dataset where the package that reads it is not installed."""
    return ResourceError(f'dataset {path} needs: pip install "linearize[train]"')


@contextmanager
def dataset_errors(dataset: str) -> Iterator[None]:
    """Within: what reading a dataset may raise becomes an error about it."""
    try:
        yield
    except OSError as error:
        raise LinearizeError(
            f"no folder {dataset}, and cannot fetch it: {error}. For text of your own: "
            "'data.train={files: [train.txt]}' 'data.eval={files: [held-out.txt]}'",
            Exit.HUB,
        ) from error
    except ValueError as error:  # an unknown name or split
        raise LinearizeError(f"dataset {dataset}: {error}") from error
    except Exception as error:
        if not type(error).__module__.startswith("datasets."):
            raise
        raise LinearizeError(f"dataset {dataset}: {error}") from error  # rows that do not parse
