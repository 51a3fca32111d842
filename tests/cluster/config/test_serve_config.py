"""What an operator may write, and what each mistake is answered with."""

import math
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest

from coatcheck.cluster.config.derived_config import router_config
from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.config.setting_values import parse_memory
from coatcheck.cluster.preflight.machine import check_memory
from coatcheck.cluster.preflight.model import check_model, check_model_directory
from coatcheck.cluster.session.serve_session import check_same_settings
from coatcheck.proto.errors import InvalidConfig, InvalidModel
from tests.cluster.model_configs import LLAMA, write_config


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("4GiB", 4 * 2**30),
        ("4 gib", 4 * 2**30),
        ("512MB", 512e6),
        ("512m", 512e6),
        ("1.5Gi", 1.5 * 2**30),
        ("4294967296", 2**32),
        ("0.5", 0.5),
        (".25", 0.25),
        ("50%", 0.5),
        (0.5, 0.5),
        (2**30, 2**30),
        ("1", 1.0),
        ("0GiB", 0.0),
        (None, None),
    ],
)
def test_memory_is_bytes_or_a_share(written: object, meant: float | None) -> None:
    """Memory may be written as bytes with or without a unit, or as a share."""
    assert parse_memory(written) == meant


@pytest.mark.parametrize("written", ["200%", "0%", "nan%", "inf%"])
def test_a_share_is_of_the_whole(written: str) -> None:
    """A share above 100% is refused. It is not read as a number of bytes."""
    with pytest.raises(InvalidConfig, match="at most 100%"):
        ServeConfig.build({"model": "m", "kv_memory": written})


@pytest.mark.parametrize("written", ["", "four", "4GiBs", "-1GiB", "1e9", "GiB", "half%", "%", math.nan])
def test_memory_that_is_neither_is_refused(written: str | float) -> None:
    """What is neither bytes nor a share is refused with the forms that are allowed."""
    with pytest.raises(InvalidConfig, match=r"kv-memory.*4GiB"):
        ServeConfig.build({"model": "m", "kv_memory": written})


@pytest.mark.parametrize("written", ["1.5", 1.5, "2000.5", "1B", "0.5b"])
def test_what_could_be_a_share_or_bytes_is_refused(written: object) -> None:
    """A number above 1 that is no whole number of bytes, and bytes that would be taken for a share, are refused."""
    with pytest.raises(InvalidConfig, match=r"kv-memory.*4GiB"):
        ServeConfig.build({"model": "m", "kv_memory": written})


@pytest.mark.parametrize(("written", "meant"), [("half", "float16"), ("bf16", "bfloat16"), ("fp32", "float32")])
def test_dtypes_have_aliases(written: str, meant: str) -> None:
    """The short names of dtypes are understood, for the model and for its KV pool."""
    assert ServeConfig.build({"model": "m", "dtype": written}).dtype == meant
    assert ServeConfig.build({"model": "m", "kv_dtype": "bfloat16"}).kv_dtype == "bf16"


def test_flags_override_the_file(tmp_path: Path) -> None:
    """The file takes the flags' names, dashes or underscores, and a flag wins over it."""
    file = tmp_path / "serve.yaml"
    file.write_text("model: some/model\ngroups: 3\nmax-num-seqs: 8\nkv_memory: 1GiB\n")
    config = ServeConfig.build({"groups": 2, "tp": None}, file)
    assert (config.model, config.groups, config.tp, config.max_num_seqs) == ("some/model", 2, 1, 8)
    assert config.kv_memory == 2**30


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: m\nmax-num-seq: 8\n", "unknown setting 'max_num_seq'; did you mean 'max_num_seqs'"),
        ("model: m\nzebra: 1\n", "unknown setting 'zebra'; known are model"),
        ("- model\n", "one `name: value` a line"),
        ("model: [\n", "is not YAML"),
        ("model: " + "[" * 3000, "is not YAML"),
        ("model:\n", "model has no value; give it one, or leave it out"),
        ("model: m\ngroups: null\n", "groups has no value; give it one"),
        ("model: m\ngroups: 1\n\ngroups: 2\n", "groups is in line 2 and again in line 4; leave one out"),
        ("model: m\nmax-num-seqs: 8\nmax_num_seqs: 8\n", "max_num_seqs is in line 2 and again in line 3"),
        ("groups: 1\n", "no model given; pass MODEL or set it in --config"),
        ("model: m\ngroups: two\n", "groups is 'two'"),
        ("model: m\ntp: 0\n", "tp is 0; it should be greater than or equal to 1"),
        ("model: m\nblock-size: 17\n", "block-size is 17"),
        ("model: m\ndtype: int3\n", "dtype is 'int3'"),
        (
            "model: m\nkv-dtype: int3\n",
            "kv-dtype is 'int3'; it should be 'auto', 'bf16', 'fp16', 'fp8', 'int8' or 'int4'",
        ),
        ("model: m\ndevice: gpu\n", "device is 'gpu'; it should be 'auto', 'cpu' or 'cuda'"),
        ("model: m\neviction: fifo\n", "eviction is 'fifo'; it should be 'cost' or 'lru'"),
        ("model: m\nlog-format: xml\n", "log-format is 'xml'; it should be 'text' or 'json'"),
        ("model: m\notlp-endpoint: here\n", "otlp-endpoint is 'here'; write the collector's gRPC address"),
        (
            "model: m\nroot-path: llm\n",
            "root-path is 'llm'; it must be a path such as /llm, without a slash at its end",
        ),
        ("model: m\nroot-path: /llm/\n", "root-path is '/llm/'; it must be a path"),
        ("model: m\nroot-path: /v1\n", "with which no path of the API begins"),
        ("model: m\nhost-kv-memory: -1\n", "host-kv-memory is -1"),
        ("model: m\nhost-kv-memory: .nan\n", "host-kv-memory is nan"),
        ("model: m\nkv-memory: .nan\n", "kv-memory is nan"),
        ("model: m\nmax-num-seqs: 0\n", "max-num-seqs is 0; it should be greater than or equal to 1"),
        ("model: m\nmax-batch-tokens: 0\n", "max-batch-tokens is 0; it should be greater than or equal to 1"),
        ("model: m\ngrpc-port: 70000\n", "grpc-port is 70000"),
        ("model: m\nkv-memory: 0\n", "kv-memory is 0"),
        ("model: m\nmax-model-len: 1\n", "max-model-len is 1"),
        ("model: m\nkv-memory: .inf\n", "kv-memory is inf"),
        ("model: m\nmax-num-seqs: 1000000000\n", "max-num-seqs is 1000000000; it should be less than"),
        ("model: m\nmax-batch-tokens: 1000000000\n", "max-batch-tokens is 1000000000; it should be less than"),
        ("model: m\ngroups: 1000000\n", "groups is 1000000; it should be less than"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    """The error names the file, the setting and its allowed values, or its lines if the file has the setting twice."""
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    with pytest.raises(InvalidConfig) as refused:
        ServeConfig.build({}, file)
    assert message in str(refused.value)
    assert str(file) in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("groups: true", "groups is True; it is not a switch"),
        ("tp: yes", "tp is True; it is not a switch"),
        ("kv_memory: true", "kv-memory is True"),
        ("host_kv_memory: on", "host-kv-memory is True"),
        ("http_port: true", "http-port is True"),
        ("grpc_port: 8000", "grpc-port and http-port are both 8000; choose another"),  # HTTP's is the default
        ("grpc_port: 8000\ngrpc_host: '::1'\nhttp_host: '[::1]'", "grpc-port and http-port are both 8000"),
        ("grpc_port: 8000\ngrpc_host: '[::]'\ninsecure: true", "grpc-port and http-port are both 8000"),
        ("max_model_len: false", "max-model-len is False"),
        ("served_model_name: ''", "served-model-name is ''"),
        ("served_model_name: ' '", "served-model-name is ' '"),
        ("ray_address: ''", "ray-address is ''"),
        ("grpc_host: ''", "grpc-host is ''"),
        ("grpc_port: 1e400", "grpc-port is '1e400'"),
        ("grpc_port: 1.0e+400", "grpc-port is inf"),
        ("grpc_port: " + "9" * 5000, "is not YAML"),
        ("kv_memory: 1.0e+400", "kv-memory is inf"),
        ("kv_memory: " + "9" * 320 + "GiB", "more memory than any host has"),
        ("api_keys: ''", "api-keys is ''"),
    ],
)
def test_what_is_nearly_a_value_is_none(tmp_path: Path, text: str, said: str) -> None:
    """Switches in the place of numbers, empty names and numbers without end are refused by name."""
    file = tmp_path / "serve.yaml"
    file.write_text(f"model: m\n{text}\n")
    with pytest.raises(InvalidConfig) as refused:
        ServeConfig.build({}, file)
    assert said in str(refused.value)


@pytest.mark.parametrize("layers", [0, -1, True, 10**9])
def test_a_model_has_layers(tmp_path: Path, layers: int) -> None:
    """A config.json with none, or with more than any model's, is refused before anything starts."""
    write_config(tmp_path, LLAMA | {"num_hidden_layers": layers})
    with pytest.raises(InvalidModel, match="num_hidden_layers"):
        check_model(ServeConfig.build({"model": str(tmp_path)}))


def test_a_mistake_in_a_flag_is_not_the_files(tmp_path: Path) -> None:
    """The file is named for what it says, and not for what a flag says."""
    file = tmp_path / "serve.yaml"
    file.write_text("model: m\ntp: 0\ngroups: 2\n")
    with pytest.raises(InvalidConfig) as refused:
        ServeConfig.build({"groups": 0}, file)
    said = str(refused.value)
    assert f"{file}: tp is 0" in said and "groups is 0" in said and f"{file}: groups" not in said


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """A file that is not there is an InvalidConfig, not a traceback."""
    with pytest.raises(InvalidConfig, match="No such file"):
        ServeConfig.build({}, tmp_path / "none.yaml")


def test_a_directory_is_checked_before_anything_starts(tmp_path: Path) -> None:
    """A path that plainly is no checkpoint is refused by name; a Hugging Face model id is left to the loader."""
    (tmp_path / "file").write_text("")
    for path, message in (("none", "does not exist"), ("file", "is a file"), (".", "no config.json")):
        with pytest.raises(InvalidConfig, match=message):
            check_model_directory(ServeConfig(model=str(tmp_path / path)))
    check_model_directory(ServeConfig(model="some/model"))


def test_a_mistyped_directory_is_no_hub_id(tmp_path: Path) -> None:
    """OWNER/NAME is a model id, unless OWNER is a directory here: then it is a path with a mistake in it."""
    (tmp_path / "demo").mkdir()
    with chdir(tmp_path):
        with pytest.raises(InvalidConfig, match="model directory demo/modle does not exist"):
            check_model_directory(ServeConfig(model="demo/modle"))
        check_model_directory(ServeConfig(model="other/modle"))


def test_home_is_found(tmp_path: Path) -> None:
    """The model's path may begin with ~, in the file as on the command line."""
    file = tmp_path / "serve.yaml"
    file.write_text("model: ~/\n")
    assert ServeConfig.build({}, file).model_source == str(Path.home().resolve())


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"tp": 3}, "tp 3 does not divide the attention heads"),
        ({"max_model_len": 2**20}, "the model supports 131072; use at most that"),
        ({"kv_memory": "64KiB"}, "one block of 16 tokens takes 2,097,152; raise kv-memory"),
        ({"kv_memory": "64MiB", "max_model_len": 4096}, "max-model-len 4096 takes 536,870,912 bytes of KV a rank"),
    ],
)
def test_what_the_config_rules_out_is_refused(tmp_path: Path, setting: dict[str, Any], message: str) -> None:
    """What config.json alone makes impossible is refused in the words that a rank would use."""
    write_config(tmp_path, LLAMA)
    check_model(ServeConfig.build({"model": str(tmp_path)}))
    with pytest.raises(InvalidConfig, match=message):
        check_model(ServeConfig.build({"model": str(tmp_path)} | setting))


def test_a_block_is_checked_whatever_the_pool(tmp_path: Path) -> None:
    """int4 with an odd head_dim is refused where the pool is a share too, and a host tier of less than a block."""
    write_config(tmp_path, LLAMA | {"model_type": "phi3", "head_dim": 127, "partial_rotary_factor": 0.5})
    with pytest.raises(InvalidConfig, match="layer 0 has head_dim 127, which is odd; use int8 or fp8"):
        check_model(ServeConfig.build({"model": str(tmp_path), "kv_dtype": "int4"}))
    write_config(tmp_path, LLAMA)
    with pytest.raises(InvalidConfig, match="one block takes 2,097,152; raise host-kv-memory, or set it to 0"):
        check_model(ServeConfig.build({"model": str(tmp_path), "host_kv_memory": "1MiB"}))


@pytest.mark.parametrize("field", ["model_type", "num_hidden_layers", "num_attention_heads", "hidden_size"])
def test_what_every_model_says_is_missed(tmp_path: Path, field: str) -> None:
    """A config.json without a field that no model of its kind leaves out is refused with the field's name."""
    write_config(tmp_path, LLAMA | {field: None})
    with pytest.raises(InvalidModel, match=f"config.json has no {field}; add it"):
        check_model(ServeConfig.build({"model": str(tmp_path)}))


def test_what_this_machine_cannot_hold_is_refused() -> None:
    """Host tiers and, on CPUs, pools of all ranks together beyond what is free are refused at once, by name; as shares,
    or on another cluster, they are the ranks' affair."""
    size = {"model": "m/m", "tp": 2, "device": "cpu", "kv_memory": "3GiB", "host_kv_memory": "4GiB"}
    check_memory(ServeConfig.build(size), 14 << 30)
    with pytest.raises(InvalidConfig, match="host-kv-memory and kv-memory ask for 7,516,192,768 bytes for each of 2"):
        check_memory(ServeConfig.build(size), 13 << 30)
    check_memory(ServeConfig.build(size | {"device": "cuda"}), 13 << 30)
    with pytest.raises(InvalidConfig, match=r"are free on this host; lower host-kv-memory, groups or tp$"):
        check_memory(ServeConfig.build({"model": "m/m", "host_kv_memory": "4000TiB"}))
    check_memory(ServeConfig.build(size | {"host_kv_memory": 0.9, "kv_memory": 0.9}), 1)
    check_memory(ServeConfig.build(size | {"ray_address": "127.0.0.1:1"}), 1)


def test_what_the_config_leaves_open_is_the_ranks_affair(tmp_path: Path) -> None:
    """A scaled context may be asked for, and a config.json with fields of other names is not refused."""
    write_config(tmp_path, LLAMA | {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}})
    check_model(ServeConfig.build({"model": str(tmp_path), "max_model_len": 400_000}))
    write_config(tmp_path, {"model_type": "bloom", "n_head": 12})
    check_model(ServeConfig.build({"model": str(tmp_path), "tp": 3, "kv_memory": "64KiB"}))


def test_a_field_that_the_config_lacks_has_the_default_of_its_class(tmp_path: Path) -> None:
    """A bloom of no fields has the eight heads that transformers gives it, which three ranks cannot divide."""
    write_config(tmp_path, {"model_type": "bloom"})
    with pytest.raises(InvalidConfig, match=r"tp 3 does not divide the attention heads \(8\)"):
        check_model(ServeConfig.build({"model": str(tmp_path), "tp": 3, "kv_memory": "64KiB"}))


def test_the_model_is_named_after_its_directory(tmp_path: Path) -> None:
    """Requests name the model by its directory, its Hugging Face model id, or what the operator chose."""
    assert ServeConfig(model=str(tmp_path)).model_name == tmp_path.name
    assert ServeConfig(model="some/model").model_name == "some/model"
    assert ServeConfig(model="some/model", served_model_name="x").model_name == "x"


def test_a_cluster_is_the_same_however_it_is_addressed() -> None:
    """Who joins a running cluster may spell its address in another way, and nothing else."""
    running = ServeConfig.build({"model": "m", "ray_address": "auto"})
    check_same_settings(running, ServeConfig.build({"model": "m", "ray_address": "127.0.0.1:6379"}))
    with pytest.raises(InvalidConfig, match="other settings"):
        check_same_settings(running, ServeConfig.build({"model": "m", "ray_address": "auto", "tp": 2}))


def test_a_generation_config_is_read_before_anything_starts(tmp_path: Path) -> None:
    """A wrong value is named at once; with `none` only its eos_token_id is read."""
    write_config(tmp_path)
    model = {"model": str(tmp_path)}
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": 0.6, "unknown": []}')
    check_model(ServeConfig.build(model))
    file.write_text('{"temperature": "hot"}')
    with pytest.raises(InvalidModel, match="temperature is 'hot'; it must be a number"):
        check_model(ServeConfig.build(model))
    check_model(ServeConfig.build(model | {"generation_config": "none"}))
    file.write_text('{"eos_token_id": "end"}')
    with pytest.raises(InvalidModel, match="eos_token_id is 'end'"):
        check_model(ServeConfig.build(model | {"generation_config": "none"}))


def test_a_generation_config_is_read_or_left_out(tmp_path: Path) -> None:
    """`auto` or `none`, by flag or file, and routers are told."""
    assert ServeConfig.build({"model": "m"}).generation_config == "auto"
    file = tmp_path / "serve.yaml"
    file.write_text("model: m\ngeneration-config: none\n")
    config = ServeConfig.build({}, file)
    assert router_config(config, "router-0", 0).generation_config == "none"
    with pytest.raises(InvalidConfig, match="generation-config is 'vllm'; it should be 'auto' or 'none'"):
        ServeConfig.build({"model": "m", "generation_config": "vllm"})


def test_routing_is_told_to_routers(tmp_path: Path) -> None:
    """prefix-aware unless a flag or the file says otherwise; a wrong name is refused with the right ones."""
    assert ServeConfig.build({"model": "m"}).routing == "prefix-aware"
    file = tmp_path / "serve.yaml"
    file.write_text("model: m\nrouting: least-loaded\n")
    assert router_config(ServeConfig.build({}, file), "router-0", 0).routing == "least-loaded"
    with pytest.raises(InvalidConfig, match="routing is 'random'; it should be 'prefix-aware', 'least-loaded' or"):
        ServeConfig.build({"model": "m", "routing": "random"})


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("ray_address", "auto"),
        ("ray_start_timeout", 5),
        ("router_per_node", True),
        ("router_resource", "edge"),
        ("max_groups", 2),
    ],
)
def test_what_needs_ray_is_refused_without_ray(setting: str, value: object) -> None:
    """Each setting that needs Ray is refused beside no-ray, in one sentence that names it."""
    flag = setting.replace("_", "-")
    with pytest.raises(InvalidConfig, match=f"^{flag} needs Ray; leave it out, or leave no-ray out$"):
        ServeConfig.build({"model": "m/m", "no_ray": True, setting: value})
