"""Reads and writes the supervisor's state in Ray's key-value store, from which a restarted supervisor continues.

    key                       type     value
    GROUP_COUNT               number   the number of groups after the last `coatcheck scale`
    start_number_key(group)   number   the number of the group's newest start
    grpc_port_key(router)     number   the gRPC port that the router chose
    http_port_key(router)     number   the HTTP port that the router chose
    restart_key(router)       number   1 from the beginning of a restart of the router until its next process serves
    ROLLOUT                   text     the settings of the last `coatcheck serve --apply` (see ConfigRollout)

A router chooses a port, which is then stored, if the port in its settings is 0.
"""

from typing import Final

from ray.experimental import internal_kv

GROUP_COUNT: Final = "coatcheck/groups"
ROLLOUT: Final = "coatcheck/rollout"


def start_number_key(group: str) -> str:
    return f"coatcheck/{group}/start"


def grpc_port_key(router: str) -> str:
    return f"coatcheck/{router}/grpc-port"


def http_port_key(router: str) -> str:
    return f"coatcheck/{router}/http-port"


def restart_key(router: str) -> str:
    return f"coatcheck/{router}/restart"


def read_number(key: str) -> int | None:
    """The number at `key`; None if there is none."""
    value: bytes | None = internal_kv._internal_kv_get(key)
    return None if value is None else int(value)


def write_number(key: str, number: int) -> None:
    internal_kv._internal_kv_put(key, str(number))


def read_text(key: str) -> str | None:
    """The text at `key`; None if there is none."""
    value: bytes | None = internal_kv._internal_kv_get(key)
    return None if value is None else value.decode()


def write_text(key: str, text: str) -> None:
    internal_kv._internal_kv_put(key, text)


def delete_value(key: str) -> None:
    """Delete the number or text at `key`, if there is one."""
    internal_kv._internal_kv_del(key)
