"""Name the cache of packed blocks by hashes of the text and of the tokenizer."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint.shards import file_size, in_parallel, sha256
from ..errors import LinearizeError, ResourceError, absent, check_file
from ..recipe.data import unreadable
from ..terminal.progress import Advance, silent
from .documents import TextSource, rows_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBE = "a B1, 2\n\u00e9  <s>"  # how a tokenizer cuts this stands in for what its vocabulary does not say


def identity(source: TextSource) -> list[Any]:
    """What the text depends on, for a cache key: content where it is at hand, else the dataset's address."""
    address: list[Any] = [source.path, source.name, source.split, source.streaming, source.text_key]
    address += [list(source.data_files)] if source.data_files else []
    if source.demo:
        texts = "\0".join(row.fields[source.text_key] for row in rows_of(source))
        return [*address, source.demo, hashlib.sha256(texts.encode()).hexdigest()]
    files = list(source.files)
    for file in files:
        if reason := unreadable(file.name):
            raise LinearizeError(f"{file}: {reason}")
    if source.path and (folder := Path(source.path)).is_dir():
        files = sorted(file for file in folder.rglob("*") if file.is_file())
    elif source.path and folder.is_file():
        raise LinearizeError(f"{folder} is a file: give it as files: [{folder}], not as path")
    hashes = in_parallel(digest, files, "hashing text", lambda file: file_size(file) if file.is_file() else 0)
    return [*address, [[file.name, value] for file, value in zip(files, hashes, strict=True)]]


def fingerprint(tokenizer: PreTrainedTokenizerBase, *, chat: bool) -> str:
    """A hash of all that decides which ids a document gets; with `chat` a conversation, too."""
    if tokenizer.is_fast:
        rules: Any = json.loads(tokenizer.backend_tokenizer.to_str())
        rules |= {"truncation": None, "padding": None}  # left behind by whoever called it last
    else:
        rules = sorted(tokenizer.get_vocab().items())
    facts = [type(tokenizer).__name__, tokenizer.eos_token_id, tokenizer(PROBE)["input_ids"], rules]
    return hashlib.sha256(json.dumps([*facts, tokenizer.chat_template if chat else None]).encode()).hexdigest()


def digest(file: Path, advance: Advance = silent) -> str:
    """The hash of a file's bytes. Raises LinearizeError: 2 where there is no file, 4 where it cannot be read."""
    check_file(file)
    try:
        return sha256(file, advance)
    except FileNotFoundError as error:
        raise absent(file) from error
    except OSError as error:
        raise ResourceError(f"cannot read {file}: {error}") from error
