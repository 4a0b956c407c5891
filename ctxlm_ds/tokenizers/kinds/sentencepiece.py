"""sentencepiece vocabularies (Kudo & Richardson 2018): unigram or BPE, in the layouts of the table LAYOUTS.

In: texts. Out: a tokenizer folder with spiece.model, and a tokenizer.json of the same ids for the `tokenizers` library.
tokenizer.json is built here and not by transformers' SpmConverter, which reads tokens around the pieces from the class
of the tokenizer, and whose BPE merges differ. Texts are encoded by the sentencepiece library, because one difference
remains: the library's Precompiled normalizer reads complete graphemes, sentencepiece the longest rule, so a few
decomposed characters (Tamil and Bengali vowels in two parts, Hangul in letters) are normalized otherwise.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from ctxlm_ds.errors import ConfigError, TokenizerError
from ctxlm_ds.tokenizers.base import (
    GENERIC_CLASS,
    IdsAndOffsets,
    Tokenizer,
    TokenizerFacts,
    TokenizerKind,
    TokenizerType,
)
from ctxlm_ds.tokenizers.training_words import cut_long_lines, settings_record

MODEL_FILE = "spiece.model"
_SPACES = (*range(0x9, 0xE), 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000)
_NUM_THREADS = 16
"""Threads of the trainer on any machine: the sums, and so the scores, depend on their number."""
_LINE_CHARACTERS = 4000
_LINE_BYTES = 4 * _LINE_CHARACTERS + 16
_SCORE_STEPS = 256
SPACE = "▁"
WHITESPACE = "whitespace"
"""Only replaces every white space of Unicode by a space, as MBartTokenizer of transformers does."""
NORMALIZATIONS = ("nmt_nfkc", "nmt_nfkc_cf", "nfkc", "nfkc_cf", "identity", WHITESPACE)


@dataclass(frozen=True, slots=True)
class SentencePieceSettings:
    """Settings of a sentencepiece vocabulary; `model_type` is `unigram` or `bpe`."""

    vocab_size: int
    """Every id: pieces, special tokens, sentinels, language codes, mask."""
    model_type: str = "unigram"
    extra_ids: int = 0
    """Number of sentinels <extra_id_i>; above 0 the layout is T5's."""
    language_codes: tuple[str, ...] = ()
    special_tokens: tuple[str, ...] = ()
    normalization: str = "nmt_nfkc"
    character_coverage: float = 0.9995
    """Share of the text's characters that get a piece; the rest becomes <unk> or bytes."""
    byte_fallback: bool = False
    """256 byte pieces spell what is outside the vocabulary."""


def _is_mbart_cc25(settings: SentencePieceSettings) -> bool:
    """Return whether MBartTokenizer has exactly these codes, and normalizes nothing else."""
    from transformers.models.mbart.tokenization_mbart import FAIRSEQ_LANGUAGE_CODES

    is_plain = settings.normalization == WHITESPACE and not settings.special_tokens
    return is_plain and list(settings.language_codes) == FAIRSEQ_LANGUAGE_CODES


@dataclass(frozen=True, slots=True)
class Layout:
    """The tokens around the pieces of a vocabulary, and around a text."""

    first_ids: dict[str, Any]
    """Settings of the sentencepiece trainer for the tokens before the pieces."""
    roles: dict[str, str]
    single: str
    """Template of one text; `{code}` is the first language code."""
    pair: str
    last: tuple[str, ...] = ()
    """Tokens after the pieces, special tokens, language codes and sentinels."""
    transformers_class: str = GENERIC_CLASS["tokenizer_class"]
    """Class of transformers 5 that rebuilds a unigram model of this layout with the same ids."""
    suits_class: Callable[[SentencePieceSettings], bool] = lambda settings: settings.normalization.startswith("nmt_")
    """Whether that class has the settings' normalization and tokens; the generic class suits any."""


_XLNET_PIECES = [".", "(", ")", '"', "-", "–", "£", "€"]
"""Pieces of one character that join no other; the comma of the original's list separates its names."""
_XLMR_IDS: dict[str, Any] = {"bos_id": 0, "pad_id": 1, "eos_id": 2, "unk_id": 3}
_XLMR_ROLES = {"pad": "<pad>", "unk": "<unk>", "cls": "<s>", "sep": "</s>", "mask": "<mask>"}
LAYOUTS = {
    "albert": Layout(
        {"pad_id": 0, "unk_id": 1, "bos_id": -1, "eos_id": -1, "control_symbols": ["[CLS]", "[SEP]", "[MASK]"]},
        {"pad": "<pad>", "unk": "<unk>", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"},
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1",
    ),
    "xlnet": Layout(
        {
            "unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1,
            "control_symbols": ["<cls>", "<sep>", "<pad>", "<mask>", "<eod>"],
            "user_defined_symbols": ["<eop>", *_XLNET_PIECES],
        },
        {"pad": "<pad>", "unk": "<unk>", "cls": "<cls>", "sep": "<sep>", "mask": "<mask>"},
        "$A <sep> <cls>:2", "$A <sep> $B:1 <sep>:1 <cls>:2",
    ),
    "t5": Layout(
        {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
        {"pad": "<pad>", "unk": "<unk>", "cls": "</s>", "sep": "</s>"},
        "$A </s>", "$A </s> $B </s>", transformers_class="T5Tokenizer",
    ),
    "xlmr": Layout(
        _XLMR_IDS, _XLMR_ROLES, "<s> $A </s>", "<s> $A </s> </s> $B </s>", ("<mask>",), "XLMRobertaTokenizer",
    ),
    "mbart": Layout(
        _XLMR_IDS, _XLMR_ROLES, "$A </s> {code}", "$A $B </s> {code}", ("<mask>",), "MBartTokenizer", _is_mbart_cc25,
    ),
    "plain": Layout({}, {"pad": "</s>", "unk": "<unk>", "cls": "<s>", "sep": "</s>"}, "$A", "$A $B"),
}  # fmt: skip
"""Ids of each layout: the tokens of `first_ids`, pieces, special tokens, language codes, sentinels, `last`."""


def appended_tokens(settings: SentencePieceSettings, layout: Layout) -> list[str]:
    """Return the tokens after the pieces, in the order of their ids."""
    sentinels = (f"<extra_id_{number}>" for number in reversed(range(settings.extra_ids)))
    return [*settings.special_tokens, *settings.language_codes, *sentinels, *layout.last]


class SentencePieceTokenizer(Tokenizer):
    """A tokenizer that encodes with the sentencepiece library, because tokenizer.json's normalizer differs slightly.

    Raises TokenizerError if spiece.model and tokenizer.json number their pieces differently.
    """

    kind = "sentencepiece"
    names_ends = True

    def __init__(self, backend: Any, facts: TokenizerFacts) -> None:
        super().__init__(backend, facts)
        from sentencepiece import SentencePieceProcessor

        try:
            self._processor = SentencePieceProcessor(model_proto=facts.files[MODEL_FILE])
        except RuntimeError as error:
            raise TokenizerError(f"{facts.source}: {MODEL_FILE} is damaged ({error}); restore the folder") from error
        for token_id, piece in enumerate(self._processor.id_to_piece(list(range(len(self._processor))))):
            if backend.token_to_id(piece) != token_id:
                raise TokenizerError(
                    f"{facts.source}: {MODEL_FILE} numbers {piece!r} {token_id}, tokenizer.json "
                    f"{backend.token_to_id(piece)}; restore the folder"
                )

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        threads = 1 if os.environ.get("TOKENIZERS_PARALLELISM") == "false" else -1
        ids: list[list[int]] = self._processor.encode(list(texts), num_threads=threads)
        if not self.split_special_tokens:  # sentencepiece itself never finds special tokens in a text
            named = [place for place, text in enumerate(texts) if self.special_names.search(text)]
            for place, found in zip(named, super().encode_batch([texts[place] for place in named]), strict=True):
                ids[place] = found
        return ids

    def encode_with_offsets(self, texts: Sequence[str]) -> list[IdsAndOffsets]:
        found: list[IdsAndOffsets] = []
        for text, ids in zip(texts, self.encode_batch(texts), strict=True):
            mapped: Any = self._processor.encode(text, out_type="offset_mapping")
            if mapped["ids"] == ids:
                found.append((ids, mapped["offsets"]))
            else:  # names of special tokens, which sentencepiece does not find
                found += super().encode_with_offsets([text])
        return found

    @cached_property
    def fingerprint(self) -> str:
        parts = super().fingerprint, hashlib.sha256(self.facts.files[MODEL_FILE]).hexdigest()
        return hashlib.sha256(":".join(parts).encode()).hexdigest()

    def end_tokens(self) -> dict[str, str]:
        ends = super().end_tokens()
        return ends if self.has_mask else {"eos_token": ends["eos_token"]}  # T5 has no bos_token

    def class_settings(self, content: dict[str, Any], special: dict[str, Any]) -> dict[str, Any]:
        return special  # facts.config has the class

    def write_vocabulary(self, folder: Path, model: dict[str, Any]) -> None:
        """Write nothing: spiece.model is one of the facts' files."""


def train_sentencepiece(
    texts: Iterable[str], settings: SentencePieceSettings, layout: Layout | None = None
) -> SentencePieceTokenizer:
    """Train on `texts` (iterated once; held in memory by the library); the default layout follows from the settings."""
    layout = layout or LAYOUTS["t5" if settings.extra_ids else "mbart" if settings.language_codes else "xlmr"]
    if settings.extra_ids and settings.language_codes:
        raise ConfigError("sentinels (--extra-ids) are T5's, --language-codes mBART's; name one of the two")
    if not 0.98 <= settings.character_coverage <= 1:
        raise ConfigError(f"character_coverage {settings.character_coverage} must be at least 0.98 and at most 1")
    training = settings_record(settings)
    training["merge_score"] = "likelihood" if settings.model_type == "unigram" else "frequency"
    return _build(_learn(texts, settings, layout), settings, layout, training)


def _build(
    model: bytes, settings: SentencePieceSettings, layout: Layout, training: dict[str, Any], source: str = ""
) -> SentencePieceTokenizer:
    is_plain = settings.model_type == "unigram" and not settings.byte_fallback
    has_class = is_plain and layout.suits_class(settings)
    name = layout.transformers_class if has_class else GENERIC_CLASS["tokenizer_class"]
    config = {"tokenizer_class": name, "extra_ids": settings.extra_ids}
    facts = TokenizerFacts(dict(layout.roles), config, training, source, {MODEL_FILE: model})
    return SentencePieceTokenizer(_build_backend(model, settings, layout), facts)


def _read(file: Path, _: dict[str, Any]) -> SentencePieceTokenizer:
    """Return the tokenizer of a sentencepiece model; T5's layout gets 100 sentinels, as in transformers.

    Raises TokenizerError if its ids follow from more than the model (ALBERT, XLNet, XLM-R, LLaMA).
    """
    model, name = file.read_bytes(), str(file)
    try:
        proto = _parsed(model)
    except Exception as error:  # protobuf's own class
        raise TokenizerError(f"{name}: no sentencepiece model ({error}); restore the file") from error
    pieces, trainer, rules = [piece.piece for piece in proto.pieces], proto.trainer_spec, proto.normalizer_spec
    is_t5 = pieces[:3] == ["<pad>", "</s>", "<unk>"]
    plain = pieces[:3] == ["<unk>", "<s>", "</s>"] and not {"<cls>", "<mask>"} & {*pieces}
    spaces = rules.add_dummy_prefix and rules.remove_extra_whitespaces and rules.escape_whitespaces
    if not (is_t5 or plain) or not spaces or trainer.model_type not in (trainer.UNIGRAM, trainer.BPE):
        raise TokenizerError(
            f"{name}: this sentencepiece model alone does not decide the ids (its first pieces: {pieces[:5]}); save "
            "the tokenizer with transformers (AutoTokenizer...save_pretrained(...)) and give that folder"
        )
    extra_ids = 100 if is_t5 else 0
    settings = SentencePieceSettings(
        len(pieces) + extra_ids, "unigram" if trainer.model_type == trainer.UNIGRAM else "bpe", extra_ids,
        normalization=rules.name, byte_fallback=trainer.byte_fallback,
    )  # fmt: skip
    return _build(model, settings, LAYOUTS["t5" if is_t5 else "plain"], {}, name)


def _learn(texts: Iterable[str], settings: SentencePieceSettings, layout: Layout) -> bytes:
    from sentencepiece import SentencePieceTrainer

    written = io.BytesIO()
    with tempfile.NamedTemporaryFile("w", suffix=".tsv") as rules:
        rules.writelines(f"{space:X}\t20\n" for space in _SPACES)
        rules.flush()
        normalization: dict[str, Any] = {"normalization_rule_name": settings.normalization}
        if settings.normalization == WHITESPACE:
            normalization = {"normalization_rule_tsv": rules.name}
        try:
            SentencePieceTrainer.train(
                sentence_iterator=cut_long_lines(texts, _LINE_CHARACTERS),
                model_writer=written,
                model_type=settings.model_type,
                vocab_size=settings.vocab_size - len(appended_tokens(settings, layout)),
                character_coverage=settings.character_coverage,
                byte_fallback=settings.byte_fallback,
                hard_vocab_limit=False,
                max_sentence_length=_LINE_BYTES,
                train_extremely_large_corpus=True,
                num_threads=_NUM_THREADS,
                minloglevel=2,
                **normalization,
                **layout.first_ids,
            )
        except (RuntimeError, OSError) as error:
            if found := re.search(r"required_chars\. \d+ vs (\d+)", str(error)):
                least = int(found[1]) + len(appended_tokens(settings, layout))
                short = f"--vocab-size {settings.vocab_size}: the characters of the text need {least:,} ids"
                raise ConfigError(f"{short}; raise it, or lower --character-coverage") from None
            raise ConfigError(f"sentencepiece cannot train this vocabulary: {error}") from error
    # Scores become steps that float32 adds without error, so that all implementations break ties equally.
    proto = _parsed(written.getvalue())
    for piece in proto.pieces:
        piece.score = round(piece.score * _SCORE_STEPS) / _SCORE_STEPS
    proto.normalizer_spec.ClearField("normalization_rule_tsv")  # the name of a temporary file
    return proto.SerializeToString(deterministic=True)


def _parsed(model: bytes) -> Any:
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    proto.ParseFromString(model)
    return proto


def _build_backend(model: bytes, settings: SentencePieceSettings, layout: Layout) -> Any:
    """Return the `tokenizers.Tokenizer` of a serialized sentencepiece model, with the tokens after the pieces."""
    from tokenizers import AddedToken, processors
    from tokenizers import Tokenizer as Backend

    proto = _parsed(model)
    backend = Backend(_model(proto))
    _add_layers(backend, proto, settings)
    controls = [piece.piece for piece in proto.pieces if piece.type in (piece.CONTROL, piece.UNKNOWN)]
    # As in the released models, the mask includes the space before it.
    tokens = [
        AddedToken(token, lstrip=token in ("<mask>", "[MASK]"), normalized=False, special=True)
        for token in (*controls, *appended_tokens(settings, layout))
    ]
    backend.add_special_tokens(tokens)
    code = next(iter(settings.language_codes), "")
    single, pair = layout.single.format(code=code), layout.pair.format(code=code)
    names = [name.partition(":")[0] for name in single.split() if name != "$A"]
    special = [(name, backend.token_to_id(name)) for name in names]
    backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)
    return backend


def _model(proto: Any) -> Any:
    from tokenizers import models

    trainer = proto.trainer_spec
    if trainer.model_type == trainer.UNIGRAM:
        scored = [(piece.piece, _decimal(piece.score)) for piece in proto.pieces]
        return models.Unigram(scored, unk_id=trainer.unk_id, byte_fallback=trainer.byte_fallback)
    vocab = {piece.piece: number for number, piece in enumerate(proto.pieces)}
    rest = {"unk_token": trainer.unk_piece, "byte_fallback": trainer.byte_fallback}
    return models.BPE(vocab, _merges(proto), fuse_unk=True, **rest)


def _decimal(score: float) -> float:
    """Return a score that the library's JSON gives back bit for bit: ours are multiples, others get 9 digits."""
    return score if score * _SCORE_STEPS % 1 == 0 else float(f"{score:.9g}")


def _merges(proto: Any) -> list[tuple[str, str]]:
    """Return every cut of every piece: sentencepiece merges any two neighbours that form a piece, best score first."""
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type in (piece.NORMAL, piece.USER_DEFINED)}
    ordered = sorted(scores, key=lambda name: -scores[name])  # a stable sort: ties stay in the order of ids
    cuts = ((name[:cut], name[cut:]) for name in ordered for cut in range(1, len(name)))
    return [(left, right) for left, right in cuts if left in scores and right in scores]


def _add_layers(backend: Any, proto: Any, settings: SentencePieceSettings) -> None:
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    charsmap = proto.normalizer_spec.precompiled_charsmap
    by_space = pre_tokenizers.Metaspace(SPACE, prepend_scheme="always")
    if settings.normalization.startswith("nmt_") or settings.normalization == WHITESPACE:
        # As T5Tokenizer, XLMRobertaTokenizer and MBartTokenizer build it: every white space is a plain space here.
        if settings.normalization != WHITESPACE:
            backend.normalizer = normalizers.Precompiled(charsmap)
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), by_space])
    else:
        steps: list[Any] = [normalizers.Precompiled(charsmap)] if charsmap else []
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
        backend.normalizer = normalizers.Sequence(steps)
        backend.pre_tokenizer = by_space
    if settings.byte_fallback:
        parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        backend.decoder = decoders.Sequence(parts)
    else:
        backend.decoder = decoders.Metaspace(SPACE, prepend_scheme="always")


_PIECES = "raise --vocab-size or --character-coverage, or spell the rest with --byte-fallback"
_CHOICES = {"normalization": NORMALIZATIONS}
_UNIGRAM = {"model_type": "unigram"}
_PLAIN = _UNIGRAM | {"extra_ids": 0, "language_codes": ()}
_ALBERT, _XLNET = (partial(train_sentencepiece, layout=LAYOUTS[name]) for name in ("albert", "xlnet"))
_SETTINGS = SentencePieceSettings
SENTENCEPIECE = TokenizerKind(
    SentencePieceTokenizer,
    lambda content, training: training.get("kind") == SentencePieceTokenizer.kind,
    files=(MODEL_FILE,), vocabulary=".model", read=_read,
    types={
        "unigram": TokenizerType(train_sentencepiece, _SETTINGS, 32_000, 8, _PIECES, _CHOICES, fixed=_UNIGRAM),
        "albert": TokenizerType(_ALBERT, _SETTINGS, 30_000, 8, _PIECES, _CHOICES, fixed=_PLAIN),
        "xlnet": TokenizerType(
            _XLNET, _SETTINGS, 32_000, 9 + 8 + 4, _PIECES, _CHOICES, {"character_coverage": 0.99995}, _PLAIN
        ),
        "t5": TokenizerType(
            train_sentencepiece, _SETTINGS, 32_100, 100 + 8, _PIECES, _CHOICES, {"extra_ids": 100},
            _UNIGRAM | {"language_codes": ()},
        ),
        "sentencepiece-bpe": TokenizerType(
            train_sentencepiece, _SETTINGS, 32_000, 8, _PIECES, _CHOICES, fixed={"model_type": "bpe"}
        ),
    },
)  # fmt: skip
