"""The checkpoint that speed is measured on: an 82M llama with random weights, and a tokenizer that fits it.

Weights do not matter for speed, shapes do; the tokenizer is trained on the text of this interpreter's library, so that
the checkpoint can be served like any other.
"""

import sysconfig
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedTokenizerFast

VOCABULARY = 8192
HIDDEN = 768
EMBEDDING_BYTES = VOCABULARY * HIDDEN * 2
# Fields of every checkpoint's config that follow from the tokenizer and the dtype.
COMMON_FIELDS: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "dtype": torch.bfloat16,
}
_MODULES = 300  # of the library, to train the tokenizer on: a few seconds


def make_checkpoint(directory: Path, max_len: int = 4096) -> Path:
    """Write the checkpoint (164 MB in bfloat16) unless it exists. `max_len`: its maximum context length in tokens."""
    config = LlamaConfig(
        num_hidden_layers=12,
        hidden_size=HIDDEN,
        num_attention_heads=12,
        num_key_value_heads=4,
        intermediate_size=2048,
        max_position_embeddings=max_len,
        **COMMON_FIELDS,
    )
    return write_checkpoint(config, directory)


def write_checkpoint(config: PreTrainedConfig, directory: Path) -> Path:
    """Write a model of `config` with random bfloat16 weights and the tokenizer, unless `directory` has one."""
    if not (directory / "model.safetensors").exists():
        directory.mkdir(parents=True, exist_ok=True)
        train_tokenizer().save_pretrained(directory)
        torch.manual_seed(0)
        build: Any = AutoModelForCausalLM.from_config  # untyped in transformers
        build(config).bfloat16().save_pretrained(directory)
    return directory


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of VOCABULARY tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    library = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = (file.read_text(errors="replace") for file in islice(library, _MODULES))
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|bos|>", "<|eos|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<|bos|>", eos_token="<|eos|>")
