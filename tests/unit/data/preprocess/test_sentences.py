"""Where a sentence ends and where it does not."""

from __future__ import annotations

import hashlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxlm_ds.data.preprocess.sentences import split_sentences

# A bar marks every boundary that must be found; the text is split without the bars.
CASES = [
    "He came. | She left. | They stayed",
    "Is it so? | Yes! | Good.",
    "What?! | No way!! | Fine...",
    # abbreviations, titles, initials, acronyms
    "Mr. Smith met Dr. Jones at St. Mary's. | They talked.",
    "Prof. A. B. Turing and J. R. R. Tolkien spoke. | It rained.",
    "The U.S. Army went home. | It was over.",
    "He moved to the U.S. | He liked it there.",
    "Washington, D.C. | The city was new.",
    "Apple Inc. makes phones. | They sell well.",
    "She works at Apple Inc. | The pay is good.",
    "We left at 5 p.m. | It was late.",
    "We left at 5 p.m. Pacific time.",
    "See e.g. Smith or cf. Jones, i.e. nobody.",
    "Bridge et al. Published this in 2008.",
    "Gen. Grant and Lt. Col. Baker arrived.",
    "King Henry V. | She travelled with him.",
    "He lives on the Avenue of the Arts. | Even later it was so.",
    "Robert Skinner, Jr. was here. | He left.",
    # numbers
    "It cost 3.5 million. | That was much.",
    "It happened in 1999. | Nobody knew.",
    "See No. 5 and pp. 12 to 14 in vol. 3. | Then read on.",
    "He said no. | Then he left.",
    "On Jan. 5 it froze. | In Feb. 1920 it thawed.",
    "Version 2.0.1 came out. | 42 people used it.",
    "It is 50 m. | Further attempts failed.",
    "1. Take the bread.",
    "b. Take the bread. | Eat it.",
    # lower-case continuations and ellipses
    "He paused... and went on. | Then he stopped.",
    "It ended . . . | The end. | And so on . . . to the last.",
    "It ended . . . and began.",
    "Well… | The end. | Well... | Bob left.",
    '"Really?" he asked. | "Yes!" she cried.',
    # quotes and brackets after the stop
    'He said "Go." | Then he went.',
    "(It was late.) | She slept.",
    "“Stop.” | ‘Never.’ | He ran.",
    'They left. | "Why?" | Nobody knew.',
    "It ended.[12] | A new one began.[3][4] | Done.",
    "It was (so they say) over. | (But not quite.)",
    "He asked: “Who?” | Nobody answered.",
    # no space, no boundary
    "See example.com and file.txt for details.",
    "The ratio a.b is 1.2e-3.",
    # other scripts
    "Это дом. | Он большой. | Где?",
    "今日は晴れです。| 明日は雨でしょう！| 本当？",
    "Él llegó. | ¿Quién? | ¡Nadie!",
    "Ärzte kamen. | Über Nacht.",
    "यह है। | वह गया॥ | क्या? | हाँ।",
    "یہ ہے۔ | کیا؟ | ہاں۔ | هل هذا؟ | نعم.",
    "ይህ ነው። | እሱ ሄደ፧ | አዎ።| ሌላ።",
    "ဤသည်။ | သူသွား၏။| သူ၊ ငါ။",
    "នេះគឺ។ | គាត់ទៅ ។ | ចប់៕",
    "Սա է։ | Նա գնաց։",
    "他说：“好。”| 他走了。",
    # German and Russian abbreviations and ordinals
    "Am 3. Oktober 1990 kam z. B. Herr Dr. Müller, d. h. der Chef, nach Berlin. | Er blieb im 19. Jahrhundert.",
    "Das war der 1. Mai und nicht der 2. Juni. | Danach ging er.",
    "Er ist 42 und nicht 43. | Danach ging er.",
    "Cäsar und der Senat kamen 44 v. Chr. Auguste und er blieb usw. | Das ist alles.",
    "König Friedrich II. König der Preußen und Nr. 5 der Liste. | Er ist tot.",
    "Es ging bzw. Hans ging. | Er kam.",
    "„Das ist gut.“ | „Nein.“ | »Doch.« | Er ging.",
    "World War II. | Nobody knew.",
    "He was 42. | Nobody knew.",
    "В 1812 г. Москва сгорела. | Он жил на ул. Ленина, д. 5, кв. 7.",
    "Родился в 1945 г. | После войны жил в г. Москве.",
    "Это т. е. конец и т. д. | Он ушёл.",
    "Стоит 5 тыс. руб. | Это дорого. | А. С. Пушкин писал.",
    # lower case: only in text without capitals; emoji
    "i went home. | then i slept. | what? | no way! | it rained, etc. and so on.",
    "He watched Jeopardy! and left. | She asked why? and stayed.",
    "– Quoi ? dit-il. | Il part.",
    "¡Vite! | ¿qué? | ¡Nadie!",
    "Great! | 😀 More follows. | Next.",
    "Great!| 😀 More. | Done. | 🎉",
    "It is good. 😀 and more! | 🎉 and more.",
]


@pytest.mark.parametrize("case", CASES)
def test_boundaries(case: str) -> None:
    expected = [sentence.strip() for sentence in case.split("|")]
    text = case.replace(" | ", " ").replace("|", "")
    assert split_sentences(text) == expected


def test_lines_are_paragraphs() -> None:
    sentences = split_sentences("A title\n\nOne here. Two\nthere.\r\n \t\nEnd")
    assert sentences == ["A title", "One here.", "Two", "there.", "End"]


def test_blank_text_has_no_sentences() -> None:
    assert split_sentences("") == split_sentences(" \n\t\r\n ") == []


def test_kept_line_ends() -> None:
    assert split_sentences("One. Two.\n\nThree.", keep_newlines=True) == ["One.", "Two.\n\n", "Three."]


@settings(max_examples=300)
@given(st.text(alphabet=st.sampled_from(list("aAbZ .!?…\"')(\n。1IéVx,[]।؟😀„«¿")), max_size=80))
def test_nothing_is_lost_and_nothing_is_empty(text: str) -> None:
    sentences = split_sentences(text)
    assert "".join("".join(sentences).split()) == "".join(text.split())
    assert all(sentence == sentence.strip() and sentence for sentence in sentences)


def test_long_runs_take_linear_time() -> None:
    for unit in (".", ". ", "A. ", '."', "x", " ", "…", "(", "a.b.", "12. A", "z. B. ", ".😀 ", "।", "।. "):
        text = unit * (100_000 // len(unit))
        assert "".join("".join(split_sentences(text)).split()) == "".join(text.split())


def test_boundaries_stay_as_they_were() -> None:
    """A digest of the sentences of texts made of everything that a rule looks at, the rules of version 2:
    another boundary changes datasets, so SPLITTER_VERSION must be raised with it."""
    rng = random.Random(3)
    pieces = [
        *" " * 10, *".....!?…‽。！？｡\"'”’»›)]}“‘(¿ABCabcdZé中12,;-–—/\n\r\x0b\x85\u2028\x1c\xa0\u3000",
        "Mr", "Dr", "U.S", "e.g", "Inc", "No", "p.m", " The", " He", ". . .", "[12]", "pp", " 5",
    ]  # fmt: skip
    digest = hashlib.sha256()
    for number in range(5000):
        sentences = split_sentences("".join(rng.choices(pieces, k=rng.randint(0, 40))), keep_newlines=number % 2 == 1)
        digest.update(("\x00".join(sentences) + "\x01").encode())
    assert digest.hexdigest() == "c3bfc37f5955ca2451650aedbdce0a27a8dfcce5bfa996a7d93fcaf414d4d078"
