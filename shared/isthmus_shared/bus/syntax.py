"""Subjects: tokens between dots; ``*`` stands for one token, a last ``>`` for one or more."""

from __future__ import annotations

import re

from isthmus_shared.errors import InvalidRequest

MAX_SUBJECT_CHARS = 512  # a NATS control line holds 4096 bytes: subject, reply and sizes

_PLAIN = re.compile(r"[!-)+,\-/-=?-~]+(?:\.[!-)+,\-/-=?-~]+)*")
"""Printable ASCII without wildcards, dots between."""


INBOX = "_INBOX"
"""Where answers go. Nothing else is ever answered to: whoever asks could otherwise make the one who answers say
something on a subject that the asker itself may not use."""


def is_inbox(subject: str | None) -> bool:
    return subject is not None and subject.startswith(f"{INBOX}.")


def check_subject(subject: str, *, wildcards: bool) -> None:
    """`InvalidRequest` unless it is a subject (or, with `wildcards`, a pattern)."""
    if len(subject) <= MAX_SUBJECT_CHARS and _PLAIN.fullmatch(subject):
        return  # as nearly all are, and this is done for each message
    tokens = subject.split(".")
    bad = (
        len(subject) > MAX_SUBJECT_CHARS
        or any(character.isspace() or not character.isprintable() for character in subject)
        or not all(tokens)
        or any(not _token_ok(token, last=index == len(tokens) - 1) for index, token in enumerate(tokens))
        or (not wildcards and is_pattern(subject))
    )
    if bad:
        raise InvalidRequest(
            f"not a subject: {subject[:MAX_SUBJECT_CHARS]!r}",
            why="a subject is non-empty tokens without spaces between dots"
            + (", '*' for one token, '>' only at the end" if wildcards else ", without wildcards"),
            param="subject",
        )


def _token_ok(token: str, *, last: bool) -> bool:
    if token == ">":
        return last
    return token == "*" or not ("*" in token or ">" in token)


def is_pattern(subject: str) -> bool:
    return any(token in ("*", ">") for token in subject.split("."))


def matches(pattern: str, subject: str) -> bool:
    want, have = pattern.split("."), subject.split(".")
    for index, token in enumerate(want):
        if token == ">":
            return len(have) > index
        if index >= len(have) or token not in ("*", have[index]):
            return False
    return len(want) == len(have)
