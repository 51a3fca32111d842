"""What a restarted supervisor reads from Ray's key-value store: numbers, and one text.

They are the number of groups that the last `coatcheck scale` asked for (`GROUP_COUNT`), the number of each group's
newest start (`start_number_key(group)`), and the ports that each router chose because its setting is 0
(`grpc_port_key(router)`, `http_port_key(router)`). The text is the settings that `coatcheck serve --apply` gave last
(`ROLLOUT`; see supervision/config_rollout.py).
"""

from typing import Final

from ray.experimental import internal_kv

GROUP_COUNT: Final = "coatcheck/groups"
ROLLOUT: Final = "coatcheck/rollout"


def start_number_key(group: str) -> str:
    """The key of the number of a group's newest start."""
    return f"coatcheck/{group}/start"


def grpc_port_key(router: str) -> str:
    return f"coatcheck/{router}/grpc-port"


def http_port_key(router: str) -> str:
    return f"coatcheck/{router}/http-port"


def read_number(key: str) -> int | None:
    """None if the key was never written, or is deleted."""
    value: bytes | None = internal_kv._internal_kv_get(key)
    return None if value is None else int(value)


def write_number(key: str, number: int) -> None:
    internal_kv._internal_kv_put(key, str(number))


def read_text(key: str) -> str | None:
    """None if the key was never written, or is deleted."""
    value: bytes | None = internal_kv._internal_kv_get(key)
    return None if value is None else value.decode()


def write_text(key: str, text: str) -> None:
    internal_kv._internal_kv_put(key, text)


def delete_number(key: str) -> None:
    internal_kv._internal_kv_del(key)


def delete_text(key: str) -> None:
    internal_kv._internal_kv_del(key)
