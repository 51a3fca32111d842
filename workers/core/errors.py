"""PeerLost: what a collective raises when another rank has died, or did not come in time. It imports no torch."""


class PeerLost(RuntimeError):
    """It says nothing against the rank that raises it, nor against what it was computing."""
