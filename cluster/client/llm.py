"""LLM: generates in this process, without Ray and without a server, for notebooks and evaluations.

    llm = LLM("meta-llama/Llama-3.2-1B")
    for result in llm.generate(["The capital of France is", "Two and two are"], max_tokens=8, temperature=0):
        print(result.text)

Requests use the router's validation and detokenizer and the group's engine, so the tokens equal those of a server with
the same settings.
"""

import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from coatcheck.cluster.client.request_builder import (
    CONVERSATION_FORM,
    PROMPT_FORM,
    Conversation,
    Prompt,
    SamplingOptions,
    build_request,
    check_batch,
    is_one_prompt,
)
from coatcheck.cluster.client.results import GenerationResult
from coatcheck.cluster.config.derived_config import group_config
from coatcheck.cluster.config.gguf_model import with_converted_model
from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.kernels.compile_watch import CompileWatch
from coatcheck.proto.errors import InvalidConfig, InvalidRequest
from coatcheck.proto.generation_config import NO_DEFAULTS, sampling_defaults
from coatcheck.proto.sampling import SamplingParams
from coatcheck.proto.stubs import coatcheck_pb2 as pb
from coatcheck.proto.stubs import worker_pb2 as wire
from coatcheck.router.groups.request import Request
from coatcheck.router.serving.request_validation import prompt_token_ids, validate_request
from coatcheck.router.serving.response_builder import ResponseBuilder
from coatcheck.router.text.tokenizer import TokenizerJson, find_files
from coatcheck.workers.core.model_spec import ModelSpec
from coatcheck.workers.core.request import EngineRequest
from coatcheck.workers.core.step_output import SequenceOutput
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.host.process_setup import divide_cores
from coatcheck.workers.rank import choose_device
from coatcheck.workers.rank_loading import build_engine, load_rank
from coatcheck.workers.service.message_conversion import write_output

_GROUP = "local"
_COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TextColumn("{task.fields[tokens]} tokens"),
    TimeRemainingColumn(),
)


class LLMSettings(TypedDict, total=False):
    """The settings of `coatcheck serve` that hold for one group of one rank. Their defaults and forms are the same."""

    device: str
    dtype: str
    quantization: str
    activation_quantization: str
    max_model_len: int
    generation_config: str
    deterministic: bool
    skip_verify: bool
    kv_memory: str | float
    state_snapshot_share: float
    gpu_memory_utilization: float
    kv_dtype: str
    host_kv_memory: str | float
    eviction: str
    block_size: int
    max_num_seqs: int
    max_batch_tokens: int
    max_cudagraph_capture_size: int
    speculative_tokens: int
    lora_modules: str | list[str]


class LLM:
    """One model on one device of this process. Not thread-safe.

    `model`: a directory, a GGUF file or a Hugging Face model id. `seed`: the seed of the generator that draws seeds for
    requests without one; None: random. `settings`: see LLMSettings.

    Raises InvalidModel for a checkpoint that cannot be served and InvalidConfig for settings that do not fit.
    """

    def __init__(self, model: str | Path, *, seed: int | None = None, **settings: Unpack[LLMSettings]) -> None:
        if unknown := settings.keys() - LLMSettings.__annotations__.keys():
            raise InvalidConfig(f"LLM has no setting {min(unknown)}; it has {', '.join(LLMSettings.__annotations__)}")
        if not isinstance(model, str | os.PathLike):
            raise InvalidConfig(f"model is {model!r}; it must be one directory or one Hugging Face model id")
        serve_config = with_converted_model(ServeConfig.build({"model": str(model), **settings}))
        device = choose_device(serve_config.device)
        config = group_config(serve_config, _GROUP, device.type)
        files = find_files(config.model)
        self._tokenizer = TokenizerJson.load(str(files))
        self._defaults = sampling_defaults(files) if serve_config.generation_config == "auto" else NO_DEFAULTS
        self._rng = random.SystemRandom() if seed is None else random.Random(seed)
        torch.set_num_threads(divide_cores(config.threads, 1))
        loaded = load_rank(config, Communicator(), device, ranks_on_host=1, compile_watch=CompileWatch())
        self._spec = loaded.spec
        self._adapters = [adapter.name for adapter in loaded.spec.adapters]
        self._engine = build_engine(config, loaded, loaded.runner)

    @property
    def max_model_len(self) -> int:
        """The most tokens of one sequence, prompt and answer together."""
        return self._engine.max_model_len

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | None = None,
        *,
        adapter: str = "",
        progress: bool | None = None,
        **options: Unpack[SamplingOptions],
    ) -> list[GenerationResult]:
        """Generate for each prompt, batched. Return one result per prompt, in order.

        A prompt is a text or a list of token ids. `sampling` fixes every sampling field, and `options` sets single
        fields; both hold for all prompts. `adapter`: the name of a LoRA adapter of `lora_modules`; "" for none.
        `progress` shows a progress bar; default: if stderr is a terminal.

        Raises InvalidRequest, before anything is generated.
        """
        _check_options(options)
        batch: Sequence[Any] = [prompts] if is_one_prompt(prompts) else check_batch(prompts, "LLM", PROMPT_FORM)
        requests = [build_request(prompt, sampling=sampling, options=options) for prompt in batch]
        return self._run(requests, adapter, progress)

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        sampling: SamplingParams | None = None,
        *,
        adapter: str = "",
        progress: bool | None = None,
        **options: Unpack[SamplingOptions],
    ) -> list[GenerationResult]:
        """Answer each conversation by the model's chat template. One conversation is a list of messages. `adapter`: as
        in `generate`."""
        _check_options(options)
        check_batch(conversations, "LLM", CONVERSATION_FORM)
        is_one = not conversations or isinstance(conversations[0], Mapping)
        batch: Sequence[Any] = [conversations] if is_one else conversations
        requests = [build_request(messages=messages, sampling=sampling, options=options) for messages in batch]
        return self._run(requests, adapter, progress)

    def _run(
        self, messages: Sequence[pb.GenerateRequest], adapter: str, progress: bool | None
    ) -> list[GenerationResult]:
        """Check every request, then step the engine until all have ended."""
        if adapter and adapter not in self._adapters:
            loaded = ", ".join(self._adapters) or "none; give lora_modules to LLM"
            raise InvalidRequest(f"LLM has no LoRA adapter {adapter!r}; it has {loaded}")
        requests = [self._check(message, adapter) for message in messages]
        answers = [_Answer(request, self._tokenizer, self._spec) for request in requests]
        running = {request.request_id: answer for request, answer in zip(requests, answers, strict=True)}
        show = sys.stderr.isatty() if progress is None else progress
        try:
            with Progress(*_COLUMNS, console=Console(stderr=True), disable=not show) as bar:
                task = bar.add_task("Generating", total=len(requests), tokens=0)
                for request in requests:
                    ids = tuple(request.prompt_token_ids)
                    self._engine.submit_request(
                        EngineRequest(request.request_id, ids, request.sampling, adapter=adapter)
                    )
                tokens = 0
                while running:
                    tokens += self._step(running)
                    bar.update(task, completed=len(requests) - len(running), tokens=tokens)
        finally:  # after an error or Ctrl-C: abort the remaining requests
            for request_id in running:
                self._engine.abort_request(request_id)
            while self._engine.has_work:
                self._engine.step()
        return [answer.result for answer in answers]

    def _check(self, message: pb.GenerateRequest, adapter: str) -> Request:
        """The request as a router would send it, with every default filled in."""
        token_ids = prompt_token_ids(message, self._tokenizer, self.max_model_len)
        return validate_request(
            message,
            token_ids,
            vocab_size=self._spec.vocab_size,
            capacity=self.max_model_len,
            rng=self._rng,
            defaults=self._defaults,
            adapter=adapter,
        )

    def _step(self, running: "dict[str, _Answer]") -> int:
        """Step the engine once. Remove the requests that have ended from `running`. Return the number of new tokens."""
        step = self._engine.step()
        for _, error in step.refused:
            raise error
        for output in step.outputs:
            if (answer := running.get(output.request_id)) is None:
                continue
            for choice in answer.add(output):
                self._engine.abort_request(output.request_id, choice)
            if answer.is_complete:
                answer.finish()
                del running[output.request_id]
        return sum(len(output.token_ids) for output in step.outputs)


class _Answer:
    """Builds the result of one request from engine outputs, with a router's detokenizer and stop strings."""

    def __init__(self, request: Request, tokenizer: TokenizerJson, spec: ModelSpec) -> None:
        skip = request.sampling.skip_special_tokens
        model = request.adapter or spec.name
        self.result = GenerationResult(time.perf_counter(), model=model)
        self._builder = ResponseBuilder(request)
        self._builder.start_choices(frozenset(spec.eos_token_ids), lambda: tokenizer.detokenizer(skip))
        started = pb.Started(request_id=request.request_id, model=model, seed=request.sampling.seed, group=_GROUP)
        self._record(pb.GenerateEvent(started=started))

    @property
    def is_complete(self) -> bool:
        return self._builder.is_complete

    def add(self, output: SequenceOutput) -> list[int]:
        """Add an output of the engine. Return the choices that a stop string has ended, for the engine to abort."""
        message = wire.SequenceOutput()
        write_output(message, output, 0, 0)
        if message.HasField("first_output"):
            self._builder.record_first_output(message.first_output)
        ended: list[int] = []
        for event in self._builder.add_outputs([message], ended.append):
            self._record(event)
        return ended

    def finish(self) -> None:
        """Add the Final event."""
        final = pb.Final(usage=self._builder.usage, group=_GROUP, routed_by="", choices=self._builder.choice_ends())
        self._record(pb.GenerateEvent(final=final))

    def _record(self, event: pb.GenerateEvent) -> None:
        self.result.add(event, time.perf_counter())


def _check_options(options: SamplingOptions) -> None:
    """Raise InvalidRequest for an option that is not a sampling option. Ignoring a cache_salt would share blocks."""
    if unknown := options.keys() - SamplingOptions.__annotations__.keys():
        raise InvalidRequest(f"LLM has no option {min(unknown)}; it has {', '.join(SamplingOptions.__annotations__)}")
