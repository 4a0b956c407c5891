import pytest

from ctxlm_ds.apps.init.arithmetic import evaluate

VALUES = {"A": "7", "B": "-2", "TEXT": "a b"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("64 * 4", 256),
        ("A*(B + 3) - 1", 6),
        ("A / B", -3),
        ("A % B", 1),
        ("B % A", -2),
        ("2 ** 3 ** 2", 512),
        ("-A + +A", 0),
        ("10 - 3 - 2", 5),
        (" (1 + 1)*2 ", 4),
    ],
)
def test_arithmetic_is_that_of_a_shell(text, value):
    assert evaluate(text, VALUES.get) == value


@pytest.mark.parametrize(
    "text",
    ["", "1 +", "1 / 0", "TEXT", "UNKNOWN", "2 ** 64", "9 ** 63", "2 ** -1", "1.5", "a(1)", "(1", "1 2", "9" * 400],
)
def test_what_is_not_arithmetic_of_known_integers_has_no_value(text):
    assert evaluate(text, VALUES.get) is None
