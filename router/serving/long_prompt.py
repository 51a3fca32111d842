"""encode_long_prompt(): renders and tokenises a long prompt in a side process, from the router's tokenizer files.

The tokenizers package releases the GIL while it computes, but holds it while it makes the list of ids and frees its
result. In a thread of the router, a million tokens would stop every stream for 0.2 s.
"""

from array import array
from functools import cache

from coatcheck.proto.stubs.coatcheck_pb2 import GenerateRequest, TokenizeRequest
from coatcheck.router.serving.request_validation import prompt_token_ids
from coatcheck.router.text.tokenizer import TokenizerJson

load_tokenizer = cache(TokenizerJson.load)


def encode_long_prompt(
    directory: str, kind: type[GenerateRequest] | type[TokenizeRequest], message: bytes, at_most: int
) -> "array[int]":
    """The token ids of the prompt in a serialised message of type `kind`. `directory` contains the tokenizer. Raises as
    prompt_token_ids does."""
    return array("I", prompt_token_ids(kind.FromString(message), load_tokenizer(directory), at_most))
