"""`coatcheck plan` as an operator runs it: what it prints, and what each mistake is answered with."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from coatcheck.cluster.planner.plan_settings import PlanSettings
from coatcheck.cluster.planner.sizing import Sizing
from coatcheck.proto.errors import CoatcheckError
from tests.cluster.command_line import CommandResult, run_here
from tests.cluster.model_configs import DEEPSEEK, LLAMA, write_config


def plan(*arguments: str) -> CommandResult:
    return run_here("plan", *arguments)


def test_the_tables_answer_first(tmp_path: Path) -> None:
    """A person reads first whether what was asked for fits, then where the bytes go."""
    lines = plan(write_config(tmp_path), "--context", "8192", "--concurrency", "64").out
    text = " ".join(lines.split())
    assert "55 sequences of 8,192 tokens fit at once on one GPU of 80 GiB" in text
    assert "--concurrency 64 does not fit; 64 sequences of 7,072 tokens would fit." in text
    for part in ("Bytes of one token", "Memory", "By kv-dtype", "GQA-8, its own", "By block size", "decode step"):
        assert part in text
    assert "131,072" in text


def test_the_room_of_a_sequence_is_at_most_the_model_s_maximum(tmp_path: Path) -> None:
    """Where a sequence has room for more tokens than the model takes, the answer names the model's maximum. Otherwise
    it names the tokens that fit."""
    room = "--concurrency 16 fits, with room for "
    model = write_config(tmp_path, LLAMA | {"max_position_embeddings": 16_384})
    assert f"{room}the model's maximum of 16,384 tokens each." in _in_one_line(plan(model))
    assert f"{room}28,304 tokens each." in _in_one_line(plan(model, "--context", "20000"))
    model = write_config(tmp_path, LLAMA | {"max_position_embeddings": 131_072})
    assert f"{room}28,304 tokens each." in _in_one_line(plan(model))


def test_a_context_that_is_not_given_is_explained(tmp_path: Path) -> None:
    """Without --context the answer says how many tokens it takes and why. With it, the answer says nothing of that."""
    for maximum, said in ((2048, "it is the model's maximum, 2,048 tokens."),
                          (16_384, "its default is 8,192 tokens; the model's maximum is 16,384."),
                          (None, "its default is 8,192 tokens.")):  # fmt: skip
        model = write_config(tmp_path, LLAMA | {"max_position_embeddings": maximum})
        assert f"--context is not given: {said}" in _in_one_line(plan(model))
        assert "is not given" not in plan(model, "--context", "64").out


def _in_one_line(done: CommandResult) -> str:
    assert done.code == 0, done.err
    return " ".join(done.out.split())


def test_json_is_one_object_of_plain_numbers(tmp_path: Path) -> None:
    """Scripts read every figure of the tables from one JSON object."""
    found = json.loads(plan(write_config(tmp_path, DEEPSEEK), "--tp", "16", "--json").out)
    assert found["sequences"] == found["num_blocks"] // 512
    assert [row["block_size"] for row in found["block_sizes"]] == [8, 16, 32, 64, 128]
    assert {"kv_dtypes", "variants", "lengths", "step_times", "layers"} <= found.keys()


def test_a_picture(tmp_path: Path) -> None:
    """--plot writes a PNG, also where nothing fits; a place that cannot be written is said."""
    model, picture = write_config(tmp_path), tmp_path / "plan.png"
    drawn = plan(model, "--context", "900000", "--plot", str(picture))
    assert (drawn.code, drawn.err) == (0, f"wrote {picture}\n")
    assert picture.read_bytes().startswith(b"\x89PNG")
    refused = plan(model, "--plot", str(tmp_path / "none" / "plan.png"))
    assert refused.code == 2 and "cannot write the plot" in refused.err


def test_a_picture_without_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of docs/quickstart.md has no matplotlib. --plot then names the command that installs it."""
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    refused = plan(write_config(tmp_path), "--plot", str(tmp_path / "plan.png"))
    assert (refused.code, refused.err) == (2, "error: --plot needs matplotlib: pip install matplotlib\n")


def test_lengths_come_from_a_trace(tmp_path: Path) -> None:
    """Prompt and answer of each request are one length; longer ones than the context are counted apart."""
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,10,7\n2023-11-16 18:15:47,30,2\n"
        "2023-11-16 18:15:48,9000,1\n"
    )
    found = json.loads(plan(write_config(tmp_path), "--lengths", str(trace), "--json").out)
    assert found["lengths"] == found["lengths"] | dict(source="trace.csv", number=2, left_out=1, mean=24.5)
    assert found["block_sizes"][1]["waste"] == pytest.approx(15 / 64)
    assert found["lengths"]["paged"] == found["num_blocks"] // 2


def test_help_says_what_counts() -> None:
    """The help gives the formula, what to turn, and examples."""
    text = " ".join(plan("--help").out.split())
    for part in ("2 × layers × KV heads × head_dim", "smaller --kv-dtype", "coatcheck plan my-model --lengths"):
        assert part in text


def test_neither_torch_nor_ray_is_loaded(tmp_path: Path) -> None:
    """A plan is there at once: it imports neither torch nor transformers, Ray or matplotlib."""
    code = (
        "import sys; from coatcheck.cluster.cli import build_app; "
        f"build_app(['plan'])(['plan', {write_config(tmp_path)!r}], standalone_mode=False); "
        "print(sorted({'torch', 'transformers', 'ray', 'grpc', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_hub_id_is_read_from_its_local_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that the hub's cache holds is found by its id where the hub does not answer; another one is refused as
    that, in one line and within seconds."""
    repository = tmp_path / "hub" / "models--some--model"
    (repository / "snapshots" / "abc").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    write_config(repository / "snapshots" / "abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert json.loads(plan("some/model", "--json").out)["model"] == "some/model"
    refusal = plan("some/other", "--json")
    assert refusal.code == 2 and refusal.err.count("\n") == 1
    assert refusal.err.startswith("error: no directory some/other, and the hub gives no config.json")


@pytest.mark.parametrize("field", ["num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size"])
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    """What sizing needs and config.json lacks is named."""
    refused(tmp_path, {}, f"config.json has no {field}", config={field: None})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(intermediate_size=None), "config.json has no intermediate_size"),
        (dict(num_hidden_layers=0), "config.json has num_hidden_layers 0; it should be from 1 to 10,000"),
        (dict(num_hidden_layers=10**9), "it should be from 1 to 10,000"),
        (dict(num_key_value_heads=-8), "config.json has num_key_value_heads -8; it should be a whole number"),
        (dict(hidden_size="wide"), "config.json has hidden_size 'wide'; it should be a whole number"),
        (dict(num_key_value_heads=[8, 4]), r"config.json has num_key_value_heads [8, 4]"),
        (dict(num_key_value_heads=5), "5 num_key_value_heads for 32 attention heads; the KV heads must divide"),
        (dict(num_attention_heads=31, num_key_value_heads=31), "config.json has no head_dim, and 31 heads do not"),
        (dict(layer_types=["full_attention"]), "1 layer_types for 32 layers"),
        (
            dict(layer_types=["linear_attention"] * 32),
            "layer_types linear_attention; layers of these types are not served",
        ),
        (dict(attn_layer_period=8), "config.json has attn_layer_period, so some layers keep state"),
        (dict(hybrid_override_pattern="M-M*"), "config.json has hybrid_override_pattern, so some layers"),
        (dict(is_encoder_decoder=True), "is an encoder-decoder; only decoder-only models are served"),
        (dict(num_kv_shared_layers=32), "some of these have no earlier layer of their kind"),
        (
            dict(
                num_kv_shared_layers=2,
                layer_types=["full_attention"] * 30 + ["sliding_attention"] * 2,
                sliding_window=16,
            ),
            "some of these have no earlier layer of their kind",
        ),
        (dict(kv_lora_rank=512), "config.json has no qk_nope_head_dim"),
    ],
)
def test_a_config_that_cannot_be_sized(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """A field that is not what it should be, and a model whose state is no KV cache, are refused by name."""
    refused(tmp_path, {}, message, config=changes)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (dict(kv_dtype="int3"), "kv-dtype is 'int3'; use auto, bf16, fp16, fp8, int8, int4"),
        (dict(dtype="int3"), "dtype is 'int3'"),
        (dict(tp=3), "tp 3 does not divide the attention heads (32); use a divisor of 32"),
        (dict(tp=0), "tp is 0; it should be greater than or equal to 1"),
        (dict(tp=-2), "tp is -2"),
        (dict(context=0), "context is 0"),
        (dict(concurrency=-1), "concurrency is -1"),
        (dict(block_size=17), "block-size is 17; it should be 8, 16, 32, 64 or 128"),
        (dict(gpu_memory="-80GiB"), "gpu-memory is '-80GiB'; write bytes, such as 80GiB"),
        (dict(gpu_memory="0.5"), "gpu-memory is '0.5'; write bytes, such as 80GiB"),
        (dict(weights="heavy"), "weights is 'heavy'; write bytes"),
        (dict(bandwidth="fast"), "bandwidth is 'fast'; write bytes a second, such as 3.35TB/s"),
        (dict(bandwidth="0"), "bandwidth is '0'"),
        (dict(kv_memory="-1"), "kv-memory is '-1'"),
        (
            dict(gpu_memory="10GiB"),
            "the weights take 15.0 GiB on each of 1 ranks, and gpu-memory is 10.0 GiB; raise tp",
        ),
        (dict(kv_memory="100GiB"), "kv-memory asks for 107,374,182,400 bytes"),
        (dict(kv_memory="1MiB"), "one block of 16 tokens takes 2,097,152; raise kv-memory or lower block-size"),
        (dict(lengths="/nowhere.csv"), "cannot read the trace /nowhere.csv: No such file"),
    ],
)
def test_a_setting_that_cannot_be(tmp_path: Path, flags: dict[str, Any], message: str) -> None:
    """Each mistake is answered with the setting's name and what to change."""
    refused(tmp_path, flags, message)


def test_int4_with_an_odd_head_dim(tmp_path: Path) -> None:
    """Two elements share a byte; the message names what else to take, and the other kv-dtypes are still sized."""
    refused(tmp_path, dict(kv_dtype="int4"), "head_dim 127, which is odd; use int8 or fp8", config=dict(head_dim=127))
    found = Sizing.of(PlanSettings.build(dict(model=write_config(tmp_path, head_dim=127))))
    assert [row["kv_dtype"] for row in found.kv_dtype_rows()] == ["bf16", "fp16", "fp8", "int8"]


def test_a_tp_that_does_not_divide_the_mlp(tmp_path: Path) -> None:
    """It is refused as a rank would refuse it, with the number to divide."""
    refused(tmp_path, dict(tp=16), "tp 16 does not divide", config=dict(intermediate_size=11000))


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not valid JSON"), ("[1]", "does not hold a JSON object"), ("[" * 100_000, "is not valid JSON")],
)
def test_a_file_that_is_no_config(tmp_path: Path, text: str, message: str) -> None:
    """What is no JSON object is refused by its path, also when the file itself is named."""
    (tmp_path / "config.json").write_text(text)
    for model in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(CoatcheckError, match=message):
            Sizing.of(PlanSettings(model=str(model)))


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    """One line on stderr, and exit 2; the file itself, or its directory, is what is wanted."""
    for model, message in ((tmp_path / "none", "there is no"), (tmp_path, "has no config.json")):
        done = plan(str(model))
        assert (done.code, done.err.count("\n"), done.out) == (2, 1, "")
        assert done.err.startswith("error: ") and message in done.err
    written = write_config(tmp_path)
    assert plan(f"{written}/config.json", "--json").out == plan(written, "--json").out


def refused(directory: Path, flags: dict[str, Any], message: str, config: dict[str, Any] | None = None) -> None:
    model = write_config(directory, LLAMA, **(config or {}))
    with pytest.raises(CoatcheckError) as error:
        Sizing.of(PlanSettings.build({"model": model, **flags}))
    assert message in str(error.value)
