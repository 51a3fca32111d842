"""Writes helm/coatcheck/README.md from values.yaml: `python helm/make_readme.py`. A test compares the two."""

import re
from collections.abc import Iterator
from pathlib import Path

import yaml

CHART = Path(__file__).parent / "coatcheck"
_TITLE = """# The coatcheck chart

Generated from [values.yaml](values.yaml) by `python helm/make_readme.py`. [values](values) has complete examples, and
[docs/operations.md](../../docs/operations.md) says how to operate a release.

The KubeRay operator (1.5.1 or later) must run in the cluster, and the image must be in a registry
([docker/Dockerfile](../../docker/Dockerfile) has the commands). Then, for one GPU:

```sh
coatcheck keys new ops --role admin                              # prints a key; writes its hash to keys.yaml
kubectl create secret generic tenants --from-file=keys.yaml
kubectl create secret generic admin-key --from-literal=key=KEY   # the key that was printed
kubectl create secret generic hub --from-literal=token=TOKEN     # of Hugging Face
helm install demo helm/coatcheck -f helm/coatcheck/values/one-gpu.yaml --set image.repository=REGISTRY/coatcheck
helm test demo                                                   # once the head's pod is ready
```

To remove a default list write `[]`; `null` is allowed for `requests` and `limits` alone.

| value | default | what it is |
|---|---|---|
"""


def describe() -> str:
    """The text of the chart's README."""
    return _TITLE + "".join(f"| `{name}` | {default} | {text} |\n" for name, default, text in explained_values())


def explained_values() -> Iterator[tuple[str, str, str]]:
    """(name, default, description) of each value. A comment above an object describes the object's own values too."""
    text = (CHART / "values.yaml").read_text()
    values, path, comment = yaml.safe_load(text), list[str](), ""
    for line in text.splitlines():
        if note := re.match(r" *# -- (.*)", line):
            comment = note[1]
        elif (found := re.match(r"( *)(\w+):( .*)?$", line)) is not None:
            path = [*path[: len(found[1]) // 2], found[2]]
            value = values
            for name in path:
                value = value[name]
            if comment and not (isinstance(value, dict) and value and not found[3]):
                yield ".".join(path), f"`{_default(value)}`", comment
                comment = ""
            elif isinstance(value, dict) and comment:
                yield ".".join(path), "", comment
                comment = ""
        elif not line.strip():
            comment = ""


def _default(value: object) -> str:
    if isinstance(value, str):
        return value or '""'
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n").removesuffix("\n...")


if __name__ == "__main__":
    (CHART / "README.md").write_text(describe())
