import pytest

from ctxlm_ds.apps.init.shell_words import Array, split_commands


def _words(text):
    return [command.words for command in split_commands(text)]


def test_comments_begin_a_word_outside_quotes():
    assert _words("a b#c \"# d\" '# e' # f it's\ng") == [["a", "b#c", '"# d"', "'# e'"], ["g"]]
    assert _words("a \\\n # b \\\nc") == [["a"], ["c"]]


def test_operators_and_redirections_end_words():
    assert _words("a;b&&c|d 2>&1 >e <f &>g h 3 & i") == [["a"], ["b"], ["c"], ["d", "h", "3"], ["i"]]
    assert [command.before for command in split_commands("a && b\nc || d")] == ["\n", "&&", "\n", "||"]
    assert [command.before for command in split_commands("a &&\n b")] == ["\n", "&&"]


def test_arrays_and_expansions_are_words():
    text = 'A=(b "c d" # e)\n $(f g) ) B+=() "${h:-"i j"}"`k l`'
    assert _words(text) == [
        [Array("A", False, ["b", '"c d"', "$(f g)"]), Array("B", True, []), '"${h:-"i j"}"`k l`']
    ]


def test_documents_belong_to_their_command():
    commands = split_commands("cat <<-'EOT' > x <<< y\n\ta 'b\n\tEOT\nc\n")
    assert [(command.words, command.documents) for command in commands] == [(["cat"], ["a 'b"]), (["c"], [])]


@pytest.mark.parametrize("text", ["a 'b", 'a "b', "a $(b", "a ${b", "A=(b", "`c"])
def test_what_is_not_closed_is_refused(text):
    with pytest.raises(ValueError, match=r"closing|not found"):
        split_commands(text)
