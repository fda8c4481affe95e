"""Turn errors of the Hub and of the network into one message with exit code 5."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ..errors import Exit, LinearizeError, reason_of


@contextlib.contextmanager
def hub_errors(repo: str, absent: str, offline: str, revision: str | None = None) -> Iterator[None]:
    """Within: what the Hub or the network refuses becomes a LinearizeError (exit 5); anything else goes on as it is.
    So does silence.

    `absent` ends the sentence that there is no such repository, `offline` is what to say when the Hub may not be asked.
    """
    from huggingface_hub import constants, errors

    try:
        with answering(constants.HF_HUB_ETAG_TIMEOUT):
            yield
    except Exception as error:
        chain: list[BaseException] = [error]  # uploads in threads and lookups in the cache wrap what happened
        while chain[-1].__cause__ is not None:
            chain.append(chain[-1].__cause__)
        answers = [e for e in chain if isinstance(e, errors.HfHubHTTPError | errors.LocalTokenNotFoundError)]
        if answers:
            message = _answer(answers[-1], repo, absent, revision)
        elif not any(map(unreached, chain)):
            raise
        elif constants.HF_HUB_OFFLINE:
            message = offline
        else:
            message = f"{constants.ENDPOINT} cannot be reached ({shortly(chain[-1])}) for {repo!r}{absent} Check the "
            message += "network and its proxy (HTTPS_PROXY, HF_ENDPOINT), and run this again: what has arrived stays"
        raise LinearizeError(message, Exit.HUB) from error


@contextlib.contextmanager
def answering(seconds: float) -> Iterator[None]:
    """Within: each answer of the Hub has that long. `whoami` and others take no limit and would wait without an end."""
    from huggingface_hub import get_session

    client = get_session()
    before, client.timeout = client.timeout, seconds
    try:
        yield
    finally:
        client.timeout = before


def unreached(error: BaseException) -> bool:
    """Whether it says that the Hub did not answer: an error of the network, or of a cache that lacks something."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    network = type(error).__module__.partition(".")[0] in ("httpx", "httpx2", "httpcore", "httpcore2", "hf_xet")
    return network or isinstance(error, LocalEntryNotFoundError | ConnectionError)


def shortly(error: BaseException) -> str:
    """The kind of an error, and what it says of itself if anything."""
    name, text = type(error).__name__, reason_of(error)
    return name if text == name else f"{name}: {text}"


def _answer(error: Any, repo: str, absent: str, revision: str | None) -> str:
    """What to say of the Hub's own no."""
    from huggingface_hub import constants, errors

    where, login = constants.ENDPOINT, "hf auth login, or set HF_TOKEN"
    if isinstance(error, errors.LocalTokenNotFoundError):
        return f"{where} wants to know who asks, and there is no token: {login}"
    if isinstance(error, errors.GatedRepoError):
        return f"{repo} is gated. 1) accept the licence at {where}/{repo} 2) {login}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repo} has no revision {revision!r} on {where}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"no repo {repo!r} on {where}{absent} If it is private: {login}"
    status = error.response.status_code
    if status == 412:
        return f"{repo} was changed while this was uploaded (412). Look what is there now, and push again"
    if status == 401:
        return f"{where} does not accept the token (401). {login}"
    if status == 403:
        return f"the token may not do this to {repo} (403). Use one with write access: {where}/settings/tokens"
    return f"{where} answered {status} for {repo}: {error.server_message or type(error).__name__}"
