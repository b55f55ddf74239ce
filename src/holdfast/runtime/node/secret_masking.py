"""Masking of secrets in the words of a command line, before the words are written or shown."""

from __future__ import annotations

import re
from collections.abc import Sequence

MASK = "***"
_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_SECRET = re.compile(
    r"token|secret|pass(word|wd|phrase|code)?|pwd|credentials?|auth(orization)?|keys?|cookies?|"
    r"\w*(apikey|password|passwd|accesskey|secretkey|privatekey|authtoken|hftoken)"
)
_HARMLESS = frozenset(
    "file files path paths dir directory id ids name names type size len length dim dims".split()
)
"""Last words of a name that show that its value is no secret, or only the path of one."""
_KNOWN = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|sk-[\w-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}|"
    r"(AKIA|ASIA)[A-Z0-9]{16}|xox[abprs]-[\w-]{10,}|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]+)"
)
"""Patterns of the tokens of Hugging Face, OpenAI, GitHub, GitLab, AWS and Slack, and of signed web tokens."""
_LOGIN = re.compile(r"(?<=://)[^/\s@]*:[^/\s@]*(?=@)")
_SIGNED = re.compile(r"(?i)([?&][\w-]*(?:signature|token|secret|key|sig|password)=)[^&\s#]+")
_NAMED = re.compile(r"([+~-]*)([A-Za-z_][\w.-]*)=(.*)", re.DOTALL)
_FLAG = re.compile(r"--?([A-Za-z][\w.-]*)")


def masked(words: Sequence[str]) -> tuple[str, ...]:
    """Return ``words`` with ``***`` for each secret. A secret is recognised by its form, or by its flag or variable."""
    found: list[str] = []
    follows = False
    for word in words:
        if follows and not word.startswith("--"):
            found.append(MASK)
            follows = False
            continue
        flag = _FLAG.fullmatch(word)
        follows = flag is not None and is_secret(flag[1])
        found.append(_masked(word))
    return tuple(found)


def is_secret(name: str) -> bool:
    """Return True if the value of a flag, key or variable with this name is a secret.

    Examples are ``hf-token`` and ``logger.apiKey``.
    """
    parts = [part.lower() for part in _PART.findall(name)]
    if not parts or parts[-1] in _HARMLESS:
        return False
    return any(map(_SECRET.fullmatch, parts))


def _masked(word: str) -> str:
    named = _NAMED.fullmatch(word)
    if named is not None and named[3] and is_secret(named[2]):
        return f"{named[1]}{named[2]}={MASK}"
    return _KNOWN.sub(MASK, _SIGNED.sub(rf"\1{MASK}", _LOGIN.sub(MASK, word)))
