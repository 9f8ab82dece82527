"""What is a subject is said twice, for speed: by a pattern that most fit, and by the rule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus_shared.bus.syntax import MAX_SUBJECT_CHARS, check_subject
from isthmus_shared.errors import InvalidRequest

CHARACTERS = st.sampled_from([*"ab.*> \t\n~!,-_/=", "\x7f", "é", "\u00a0"])


def by_the_rule(subject: str) -> bool:
    tokens = subject.split(".")
    return (
        len(subject) <= MAX_SUBJECT_CHARS
        and all(token and "*" not in token and ">" not in token for token in tokens)
        and all(character.isprintable() and not character.isspace() for character in subject)
    )


@given(st.text(CHARACTERS, max_size=8))
def test_a_subject_is_accepted_by_the_pattern_or_the_rule_alike(subject: str) -> None:
    for wildcards in (False, True):
        if by_the_rule(subject):
            check_subject(subject, wildcards=wildcards)
        elif not wildcards:
            with pytest.raises(InvalidRequest):
                check_subject(subject, wildcards=False)


def test_a_subject_that_is_too_long_is_refused() -> None:
    check_subject("a" * MAX_SUBJECT_CHARS, wildcards=False)
    with pytest.raises(InvalidRequest):
        check_subject("a" * (MAX_SUBJECT_CHARS + 1), wildcards=False)
