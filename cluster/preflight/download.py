"""check_download: refuses a model id whose weights are larger than a host may download, before any rank starts."""

from pathlib import Path

from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.planner.capacity import WEIGHT_BYTES
from coatcheck.cluster.planner.model_config import ModelConfig
from coatcheck.cluster.planner.model_shape import ModelShape
from coatcheck.cluster.planner.plan_settings import parse_bytes
from coatcheck.cluster.planner.weight_count import WeightCount
from coatcheck.proto.errors import InvalidConfig, InvalidModel
from coatcheck.workers.checkpoint.quantisation_scheme import read_scheme
from coatcheck.workers.distributed.tp_shard import TpShard


def check_download(config: ServeConfig, limit: str | None) -> None:
    """Raise InvalidModel if the weights of a model id, as config.json counts them, take more than `limit`, such as
    "100GiB". Raise InvalidConfig if `limit` is not a size.

    Kubernetes evicts a pod that outgrows its volume, and the next pod begins the same download. Skipped for a
    directory, for quantised weights, and if the hub cannot be asked from here.
    """
    if limit is None:
        return
    try:
        most = parse_bytes(limit)
    except ValueError as error:
        raise InvalidConfig(f"--max-download is {limit!r}; {error}") from None
    if Path(config.model_source).exists():
        return
    try:
        model = ModelConfig.open(config.model_source)
        if read_scheme(model.name, model.values) is not None:
            return
        shape = ModelShape.of(model)
        size = WeightCount.of(model, shape.expanded, TpShard(0, 1)).total * WEIGHT_BYTES[shape.dtype]
    except (InvalidModel, InvalidConfig):  # the ranks say what is wrong, if it is
        return
    if size > most:
        takes, may_take = (f"{one / 2**30:,.0f} GiB" for one in (size, most))
        raise InvalidModel(
            f"the weights of {model.name} take {takes}, and a download may take {may_take}; "
            "keep downloads elsewhere (the chart's hubCache.kind), or allow more (storage.cacheSize, --max-download)"
        )
