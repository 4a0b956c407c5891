"""What an output was made of, so that the same command recognises it and another one is refused by name.

In: settings and the identity of the input, as JSON keeps them. Out: yes, or the differences in words.
Not here: where a tool keeps its record (in the output, which appears whole, so that both come or neither does).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def is_same(output: object, recorded: Mapping[str, Any] | None, wanted: Mapping[str, Any], remedy: str,
            error: type[Exception]) -> bool:  # fmt: skip
    """Return True if an existing output was made of this.

    Args:
        output: its name in the message.
        recorded: what the output says; None if it says nothing.
        wanted: what it would be made of now.
        remedy: what to do about another one.
        error: the class to raise.

    Raises:
        error: it was made of something else, or does not say of what.
    """
    if recorded is None:
        raise error(f"{output} exists already and does not say what it was made of; {remedy}")
    now = json.loads(json.dumps(wanted))
    names = [name for name in dict.fromkeys((*now, *recorded)) if now.get(name) != recorded.get(name)]
    if not names:
        return True
    changes = ", ".join(f"{name} {_shown(recorded.get(name))} -> {_shown(now.get(name))}" for name in names)
    raise error(f"{output} exists already and was made otherwise: {changes}; {remedy}")


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:12]}..."
