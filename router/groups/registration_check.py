"""RegistrationCheck: whether a group that has registered is the one it should be. Pure."""

from coatcheck.proto.contract import disagreement
from coatcheck.proto.stubs.worker_pb2 import Registration
from coatcheck.router.groups.group_endpoint import GroupEndpoint


def unfit(registration: Registration, address: GroupEndpoint, model_name: str, other_block_size: int) -> str:
    """Why not to use it; "" when it is fit. `other_block_size`: that of the groups beside it, if it is another."""
    if registration.group != address.name:
        return f"{address.address} is group {registration.group!r}, not {address.name!r}"
    if reason := disagreement("the group", registration.contract, registration.version):
        return reason
    if registration.model.name != model_name:
        return f"the group serves model {registration.model.name!r}, not {model_name!r}"
    if not registration.model.block_size:
        return "the group registered without a block size"
    if other_block_size:
        return (
            f"the group's blocks hold {registration.model.block_size} tokens, those of the groups beside it "
            f"{other_block_size}; serve all of them with one block size"
        )
    return ""
