"""`coatcheck serve`: checks the settings, then starts a cluster, shows its progress, and stops it after a signal.

With --ray-address the cluster keeps running without this command, and the same command finds it again. Otherwise the
command starts a local Ray, which ends with the command, or with --no-ray the ranks themselves. Ray is imported only
after all settings are checked.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from coatcheck.cluster.config.exposure import check_credentials
from coatcheck.cluster.config.gguf_model import with_converted_model
from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.config.settings import with_flags
from coatcheck.cluster.preflight.adapters import check_adapters
from coatcheck.cluster.preflight.architecture import check_architecture
from coatcheck.cluster.preflight.checkpoint import check_checkpoint
from coatcheck.cluster.preflight.machine import check_attention_backend, check_gpus, check_memory, check_ports
from coatcheck.cluster.preflight.model import check_download, check_model, check_model_directory
from coatcheck.cluster.ray_cluster.ray_address import find_ray
from coatcheck.cluster.session.apply_settings import ApplySettings
from coatcheck.cluster.session.kubernetes_events import pod_events
from coatcheck.cluster.session.local_session import LocalSession
from coatcheck.cluster.session.serve_console import ServeConsole
from coatcheck.cluster.session.serve_lines import Notice
from coatcheck.cluster.session.serve_session import ServeSession
from coatcheck.cluster.session.stop_signals import StopSignals
from coatcheck.proto.errors import InvalidConfig, InvalidModel

EPILOG = """\
Examples:

coatcheck serve demo/model --groups 2 --tp 2

coatcheck serve demo/model --no-ray

coatcheck serve meta-llama/Llama-3.1-8B --kv-dtype fp8 --host-kv-memory 64GiB

coatcheck serve Qwen3-8B-Q4_K_M.gguf

coatcheck serve MODEL --groups 8 --tp 4 --ray-address auto

`coatcheck plan MODEL` shows what fits.
"""


@with_flags(ServeConfig)
def serve(
    config: Annotated[Path | None, typer.Option(help="A YAML file of these settings. Flags override it.")] = None,
    apply: Annotated[
        bool,
        typer.Option(
            "--apply",
            help="With --ray-address: apply these settings to a cluster that runs already, and again whenever the "
            "--config file changes. Groups and routers that need it restart one after another.",
        ),
    ] = False,
    ready_file: Annotated[
        Path | None,
        typer.Option(help="With --apply: a file that exists while the cluster serves with these settings."),
    ] = None,
    kubernetes_events: Annotated[
        bool,
        typer.Option(
            "--kubernetes-events",
            help="In a pod: record lost groups, settings that are refused or wait, and errors as events of the pod.",
        ),
    ] = False,
    max_download: Annotated[
        str | None,
        typer.Option(
            help="Refuse a model id whose weights are larger, such as 100GiB: more than a host's cache holds."
        ),
    ] = None,
    **flags: Any,
) -> None:
    """Serve MODEL until SIGINT or SIGTERM. The first one drains (running requests end), a second one stops at once."""
    signals = StopSignals()
    if ready_file is not None:
        ready_file.unlink(missing_ok=True)
    console = ServeConsole()
    events = pod_events(partial(console.print, soft_wrap=True, markup=False)) if kubernetes_events else _no_events()
    with events as record:
        settings = with_converted_model(ServeConfig.build(flags, config))
        if (apply or ready_file) and settings.ray_address is None:
            raise InvalidConfig(
                "--apply and --ready-file are for a cluster that outlives this command; give --ray-address"
            )
        if ready_file and not apply:
            raise InvalidConfig("--ready-file tells whether settings are applied; give --apply too")
        _check_settings(settings, console)
        check_download(settings, max_download)
        if settings.no_ray:
            raise typer.Exit(LocalSession(settings, signals).run())
        if settings.ray_address is not None:
            settings = settings.model_copy(update={"ray_address": find_ray(settings.ray_address)})
        applies = None
        if apply:
            applies = ApplySettings(config, partial(_read_settings, flags, config), ready_file)
        raise typer.Exit(ServeSession(settings, signals, record, applies).run())


def _read_settings(flags: dict[str, Any], file: Path | None) -> ServeConfig:
    """The settings of the flags and of the --config file as it is now. Raises InvalidConfig."""
    try:
        return with_converted_model(ServeConfig.build(flags, file))
    except InvalidModel as error:
        raise InvalidConfig(str(error)) from None


def _check_settings(settings: ServeConfig, console: Console) -> None:
    """Raises CoatcheckError for what this host or the model cannot do."""
    check_model_directory(settings)
    check_model(settings)
    check_adapters(settings)
    check_memory(settings)
    check_gpus(settings)
    check_attention_backend(settings)
    check_ports(settings)
    check_credentials(settings)
    check_checkpoint(settings)
    check_architecture(settings, console)


@contextmanager
def _no_events() -> Iterator[Callable[[Notice], None]]:
    yield lambda notice: None
