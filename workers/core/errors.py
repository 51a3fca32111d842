"""PeerLost: what a collective raises when another rank has died or did not answer in time."""


class PeerLost(RuntimeError):
    """Neither the rank that raises it nor the request that it computes is at fault."""
