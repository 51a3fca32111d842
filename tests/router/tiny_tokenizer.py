"""A small byte-level BPE tokenizer, trained here, with a chat template: the files of a checkpoint directory."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

_TEXT = [
    "the quick brown fox jumps over the lazy dog, and the dog does not mind at all",
    "def main() -> None:\n    print('hello, world')\n",
    "これは小さなトークナイザーです。漢字とかな。",
    "naïve café — “quotes” … ½ × 3",
    "🙂🙃🚀👩‍👩‍👧‍👦 emoji 🇯🇵",
]
TEMPLATE = (
    "{% for message in messages %}{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message.role) }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_level_tokenizer(vocab_size: int = 600) -> Tokenizer:
    """Ids 0 and 1 are special: end of sequence and beginning of sequence."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["</s>", "<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=1,
    )
    tokenizer.train_from_iterator(_TEXT * 3, trainer)
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """Like a SentencePiece model: `▁` stands for a space, and a character without a token becomes its bytes."""
    pieces = [
        *("<unk>", "<s>", "</s>"),
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *("▁", "a", "b", "c", "f", "o", "x", "▁a", "▁fox", "fo", "fox", "漢"),
    ]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [("f", "o"), ("fo", "x"), ("▁", "fox"), ("▁", "a")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def write_model(directory: Path, template: str | None = TEMPLATE) -> Path:
    """A directory that TokenizerJson.load reads."""
    directory.mkdir(parents=True, exist_ok=True)
    byte_level_tokenizer().save(str(directory / "tokenizer.json"))
    config = {"eos_token": {"content": "</s>"}, "bos_token": "<s>"}
    if template is not None:
        config["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory
