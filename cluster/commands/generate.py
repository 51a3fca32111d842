"""`coatcheck generate`: sends one request to a router, and prints the text as it comes, or one JSON object.

Flags become a GenerateRequest, `AsyncClient` streams its answer, and `GenerationResult` puts the events together.
SamplingParams and the server check the values.
"""

import asyncio
import json
import re
import sys
from functools import partial
from typing import Annotated, Any

import typer

from coatcheck.cluster.client.async_client import AsyncClient, AsyncGenerationStream
from coatcheck.cluster.client.credentials import Credentials, with_credentials
from coatcheck.cluster.client.request_builder import LONGEST_TIMEOUT, build_sampling
from coatcheck.cluster.client.results import GenerationResult
from coatcheck.cluster.config.address import RouterAddresses, check_addresses
from coatcheck.proto.retention import DEFAULT_TTL_SECONDS, Retention
from coatcheck.proto.stubs import coatcheck_pb2 as pb

_PROMPT = partial(typer.Option, rich_help_panel="Prompt")
_SAMPLING = partial(typer.Option, rich_help_panel="Sampling")
_LENGTH = partial(typer.Option, rich_help_panel="Answers and their end")
_CACHE = partial(typer.Option, rich_help_panel="Cache")


@with_credentials
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    address: RouterAddresses = None,
    max_tokens: Annotated[
        int | None, _LENGTH(help="Max tokens to generate; default: the model's own, else what fits the context.")
    ] = None,
    min_tokens: Annotated[int | None, _LENGTH(help="Min tokens to generate.")] = None,
    temperature: Annotated[float | None, _SAMPLING(help="0 is greedy; default: the model's own, else 1.")] = None,
    top_k: Annotated[int | None, _SAMPLING(help="Number of most likely tokens to sample from; 0 is off.")] = None,
    top_p: Annotated[float | None, _SAMPLING(help="Probability mass to sample from, in (0, 1].")] = None,
    min_p: Annotated[float | None, _SAMPLING(help="Min probability, as a share of the highest.")] = None,
    repetition_penalty: Annotated[float | None, _SAMPLING(help="Over prompt and output; 1 is off.")] = None,
    presence_penalty: Annotated[float | None, _SAMPLING(help="In [-2, 2].")] = None,
    frequency_penalty: Annotated[float | None, _SAMPLING(help="In [-2, 2].")] = None,
    logit_bias: Annotated[list[str] | None, _SAMPLING(metavar="ID=VALUE", help="Repeatable.")] = None,
    seed: Annotated[int | None, _SAMPLING(help="The same seed gives the same tokens.")] = None,
    stop: Annotated[list[str] | None, _LENGTH(help="End before this text; repeatable.")] = None,
    stop_token_id: Annotated[list[int] | None, _LENGTH(help="End with this token; repeatable.")] = None,
    ignore_eos: Annotated[bool, _LENGTH("--ignore-eos", help="Continue past end-of-sequence.")] = False,
    n: Annotated[int | None, _LENGTH("--n", help="Number of answers.")] = None,
    logprobs: Annotated[int | None, typer.Option(help="Log-probabilities of each token and N alternatives.")] = None,
    prompt_logprobs: Annotated[int | None, typer.Option(help="The same for the prompt's tokens.")] = None,
    model: Annotated[str, typer.Option(help="The model's name; default: the served model.")] = "",
    chat: Annotated[bool, _PROMPT("--chat", help="PROMPT is a user's message for the chat template.")] = False,
    system: Annotated[str | None, _PROMPT(help="A system message before PROMPT; needs --chat.")] = None,
    token_ids: Annotated[bool, _PROMPT("--token-ids", help="PROMPT is token ids: 1,2,3 or '1 2 3'.")] = False,
    cache_salt: Annotated[str, _CACHE(help="Requests share cached prefixes only if their salts are equal.")] = "",
    retain: Annotated[
        int | None,
        _CACHE(help="Keep the prompt cached, with priority 0 (evicted first) to 100. Default: eviction by cost."),
    ] = None,
    retain_seconds: Annotated[
        float | None, _CACHE(help=f"How many seconds --retain holds. Default {DEFAULT_TTL_SECONDS:g}.")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(min=0.001, max=LONGEST_TIMEOUT, help="Seconds until the request is cancelled.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
    *,
    credentials: Credentials,
) -> None:
    """Generate from PROMPT and stream the text to stdout."""
    given: dict[str, Any] = dict(
        max_tokens=max_tokens, min_tokens=min_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=repetition_penalty, presence_penalty=presence_penalty, frequency_penalty=frequency_penalty,
        logit_bias=_parse_bias(logit_bias), seed=seed, stop=tuple(stop or ()) or None,
        stop_token_ids=tuple(stop_token_id or ()) or None, ignore_eos=ignore_eos or None, n=n, logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )  # fmt: skip
    request = pb.GenerateRequest(model=model, cache_salt=cache_salt)
    if not as_json and (logprobs is not None or prompt_logprobs is not None):
        raise typer.BadParameter("--logprobs and --prompt-logprobs need --json")
    addresses = check_addresses(address)
    put_prompt(request, sys.stdin.read() if prompt == "-" else prompt, chat, system, token_ids)
    if retain_seconds is not None and retain is None:
        raise typer.BadParameter("--retain-seconds needs --retain")
    streams_text = not as_json and (n is None or n == 1)
    request.sampling.CopyFrom(build_sampling(given))
    if retain is not None:
        ttl = DEFAULT_TTL_SECONDS if retain_seconds is None else retain_seconds
        request.retention.CopyFrom(Retention(retain, ttl).to_message())
    answer = asyncio.run(_stream(addresses, credentials, request, timeout, streams_text))
    if as_json:
        fields = answer.to_json(logprobs=logprobs is not None, prompt_logprobs=prompt_logprobs is not None)
        print(json.dumps(fields, ensure_ascii=False), flush=True)
        return
    labelled = "".join(f"[{index}] {choice.text}\n" for index, choice in enumerate(answer.choices))
    print("\n" if streams_text else labelled, end="", flush=True)
    typer.secho(answer.summary(), err=True, dim=True)  # on stderr, so that stdout has nothing but the text


async def _stream(
    addresses: list[str], credentials: Credentials, request: pb.GenerateRequest, timeout: float | None, show: bool
) -> GenerationResult:
    """The whole answer. `show`: print its text as it comes."""
    async with AsyncClient(addresses, credentials) as client:
        stream = AsyncGenerationStream(client.stream_events(request, timeout=timeout))
        async for chunk in stream:
            if show:
                print(chunk.text, end="", flush=True)
    return stream.result


def put_prompt(request: pb.GenerateRequest, prompt: str, chat: bool, system: str | None, token_ids: bool) -> None:
    """Set the prompt of `request`. Raise typer.BadParameter for flags that exclude each other."""
    if token_ids and chat:
        raise typer.BadParameter("--token-ids and --chat exclude each other")
    if system is not None and not chat:
        raise typer.BadParameter("--system needs --chat")
    if token_ids:
        request.token_ids.ids.extend(_parse_ids(prompt))
        request.token_ids.SetInParent()
    elif chat:
        if system is not None:
            request.chat.messages.add(role="system", content=system)
        request.chat.messages.add(role="user", content=prompt)
    else:
        request.text = prompt


def _parse_ids(written: str) -> list[int]:
    ids = []
    for word in filter(None, re.split(r"[\s,\[\]]+", written)):
        if not word.isdecimal() or len(word) > 10 or int(word) >= 2**32:  # Python converts 4,300 digits at most
            raise typer.BadParameter(f"{word!r} is not a token id; write ids as 1,2,3 or '1 2 3'")
        ids.append(int(word))
    return ids


def _parse_bias(written: list[str] | None) -> dict[int, float] | None:
    bias = {}
    for entry in written or ():
        match = re.fullmatch(r"\s*(\d{1,9})\s*[=:](.+)", entry)
        token, value = match.groups() if match else ("", "")
        try:
            bias[int(token)] = float(value)
        except ValueError:
            raise typer.BadParameter(f"--logit-bias {entry!r} is not ID=VALUE, as in 42=-5.0") from None
    return bias or None
