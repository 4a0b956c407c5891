"""tokenizer.json of a sentencepiece model, for transformers: the same ids through the `tokenizers` library.

One difference remains: its Precompiled normalizer looks at whole graphemes, sentencepiece at the longest rule, so a
few decomposed characters (Tamil and Bengali vowels in two parts, Hangul in letters) are normalized otherwise.
"""

from __future__ import annotations

from typing import Any

from ctxlm_ds.tokenizers.sentence_piece import WHITESPACE, SentencePieceSettings

SPACE = "▁"


def build_backend(model: bytes, settings: SentencePieceSettings) -> Any:
    """The `tokenizers.Tokenizer` of a serialized sentencepiece model, with the tokens behind the pieces."""
    from sentencepiece import sentencepiece_model_pb2
    from tokenizers import AddedToken, Tokenizer

    proto: Any = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    proto.ParseFromString(model)
    backend = Tokenizer(_model(proto))
    _add_layers(backend, proto, settings)
    controls = [piece.piece for piece in proto.pieces if piece.type in (piece.CONTROL, piece.UNKNOWN)]
    tokens = [AddedToken(token, normalized=False, special=True) for token in controls]
    for token in settings.appended_tokens():
        # As in the released models, <mask> swallows the space before it.
        tokens.append(AddedToken(token, lstrip=token == "<mask>", normalized=False, special=True))
    backend.add_special_tokens(tokens)
    _add_template(backend, settings)
    return backend


def _model(proto: Any) -> Any:
    from tokenizers import models

    trainer = proto.trainer_spec
    if trainer.model_type == trainer.UNIGRAM:
        scored = [(piece.piece, piece.score) for piece in proto.pieces]
        return models.Unigram(scored, unk_id=trainer.unk_id, byte_fallback=trainer.byte_fallback)
    vocab = {piece.piece: number for number, piece in enumerate(proto.pieces)}
    return models.BPE(
        vocab, _merges(proto), unk_token=trainer.unk_piece, fuse_unk=True, byte_fallback=trainer.byte_fallback
    )


def _merges(proto: Any) -> list[tuple[str, str]]:
    """sentencepiece merges any two neighbours that make a piece, best score first: every cut of every piece."""
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type in (piece.NORMAL, piece.USER_DEFINED)}
    ordered = sorted(scores, key=lambda name: -scores[name])  # a stable sort: ties stay in the order of ids
    cuts = ((name[:cut], name[cut:]) for name in ordered for cut in range(1, len(name)))
    return [(left, right) for left, right in cuts if left in scores and right in scores]


def _add_layers(backend: Any, proto: Any, settings: SentencePieceSettings) -> None:
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    charsmap = proto.normalizer_spec.precompiled_charsmap
    if settings.normalization.startswith("nmt_") or settings.normalization == WHITESPACE:
        # As T5Tokenizer, XLMRobertaTokenizer and MBartTokenizer build it: every white space is a plain space here.
        if settings.normalization != WHITESPACE:
            backend.normalizer = normalizers.Precompiled(charsmap)
        layers = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(SPACE, prepend_scheme="always")]
        backend.pre_tokenizer = pre_tokenizers.Sequence(layers)
    else:
        steps: list[Any] = [normalizers.Precompiled(charsmap)] if charsmap else []
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
        backend.normalizer = normalizers.Sequence(steps)
        backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="always")
    if settings.byte_fallback:
        parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        backend.decoder = decoders.Sequence(parts)
    else:
        backend.decoder = decoders.Metaspace(SPACE, prepend_scheme="always")


def _add_template(backend: Any, settings: SentencePieceSettings) -> None:
    from tokenizers import processors

    end = "</s>"
    if settings.extra_ids:
        single, pair, named = f"$A {end}", f"$A {end} $B {end}", [end]
    elif settings.language_codes:
        code = settings.language_codes[0]
        single, pair, named = f"$A {end} {code}", f"$A $B {end} {code}", [end, code]
    else:
        single, pair, named = f"<s> $A {end}", f"<s> $A {end} {end} $B {end}", ["<s>", end]
    backend.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[(token, backend.token_to_id(token)) for token in named]
    )
