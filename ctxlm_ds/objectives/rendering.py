"""Tokens as text for people: rich Text, coloured on a terminal and plain elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from rich.text import Text

    from ctxlm_ds.tokenizers.base import Tokenizer

STYLES = {"mask": "bold yellow", "random": "bold red", "kept": "bold green", "special": "cyan", "text": ""}


def shown(token_id: int, tokenizer: Tokenizer) -> tuple[str, str]:
    """Return what stands before a token, and the token.

    WordPiece tokens stand by name, a space between; others as their text.
    """
    if tokenizer.kind == "wordpiece" or token_id in tokenizer.special_ids:
        return " ", tokenizer.id_to_token(token_id)
    text = tokenizer.decode([token_id]).replace("\n", "⏎")
    return (" ", text[1:]) if text.startswith(" ") else ("", text)


def render_tokens(
    input_ids: NDArray[Any], tokenizer: Tokenizer, predicted: dict[int, tuple[str, str, str]] | None = None
) -> Text:
    """Return tokens on one line; at the positions of `predicted`, what it says: lead, text, style."""
    from rich.text import Text

    text = Text()
    for position, token_id in enumerate(input_ids.tolist()):
        if predicted and position in predicted:
            lead, token, style = predicted[position]
        else:
            lead, token = shown(token_id, tokenizer)
            style = STYLES["special" if token_id in tokenizer.special_ids else "text"]
        text.append(lead).append(token, style=style)
    return text[1:] if text.plain.startswith(" ") else text
