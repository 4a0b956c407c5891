from pathlib import Path

import pytest

from ctxlm_ds.apps.init.shell import Shell, expansions_left
from ctxlm_ds.apps.init.shell_words import split_commands


def _read(text):
    shell = Shell()
    return [words for words in map(shell.read, split_commands(text)) if words], shell


@pytest.mark.parametrize(
    ("word", "fields"),
    [
        ("$S", ["a", "b"]),
        ('"$S"', ["a b"]),
        ("x${S}y", ["xa", "by"]),
        ('x"${L[@]}"y', ["xc d", "ey"]),
        ('"${L[*]}"', ["c d e"]),
        ('"${NONE[@]}"', ["${NONE[@]}"]),
        ('"${EMPTY[@]}"', []),
        ("$EMPTY_TEXT", []),
        ('""', [""]),
        (r"\$S'$S'", ["$S$S"]),
        (r'"a\$b\c"', ["a$b\\c"]),
        ("${NONE:-$S}", ["a", "b"]),
        ("${EMPTY_TEXT-x}${EMPTY_TEXT:-y}", ["y"]),
        ("${S%% *}", ["${S%%*}"]),
        ("$(cat a b)`date`", ["$(cat...)`date`"]),
        ("$HOME", [str(Path.home())]),
        (r"$'it\'s'", ["it's"]),
        ("$((010))", ["$((010))"]),
    ],
)
def test_words_are_expanded_as_a_shell_does(word, fields):
    _, shell = _read("S='a b' L=('c d' e) EMPTY=() EMPTY_TEXT=")
    assert shell.fields(word) == fields


def test_appending_and_the_environment_of_a_command():
    words, shell = _read("A=x; A+=y; L=(a); L+=b; L+=(c); A+=(d); B=1 run $B; local C=2")
    assert words == [["run", "$B"]]
    assert [shell.variables.get(name) for name in "ALBC"] == [["xy", "d"], ["ab", "c"], None, "2"]
    assert not shell.branches


@pytest.mark.parametrize("text", ["if a; then\nA=1\nfi", "a && A=1", "case a in\n b) A=1 ;;\nesac"])
def test_assignments_of_branches_are_noticed(text):
    assert _read(text)[1].branches
    assert not _read("if a; then b; fi; A=1")[1].branches


def test_expansions_that_are_left_are_named():
    assert expansions_left("$A/${B%x}/$(c...)/`d`/$A") == ["$A", "${B%x}", "$(c...)", "`d`"]
    assert expansions_left("a$") == []


def test_declared_names_arithmetic_commands_and_process_substitution():
    words, shell = _read("export OMP LR=3e-4\nN=5\n((N=8*2))\nrun --a $LR --b <(cat x) --c $N")
    assert shell.variables["LR"] == "3e-4"
    assert words == [["run", "--a", "3e-4", "--b", "<(cat x)", "--c", "$N"]]
