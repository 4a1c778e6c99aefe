"""How the ranks of a group find each other, prove who they are, and connect.

Reading order: `environment` (which rank is this), `launchers` and `rank_zero` (what it reads),
`connection` (the entrance), `authentication`, `wiring` (who is connected to whom, and how),
`succession` (what survivors do); below them `member`, `control_plane`, `parent_exchange`,
`roll_call`, `event_loop`, `frame`, `address` and `machine`.

Standard library only. It produces descriptors; the engine gets them connected.
"""

from ferro_dist.rendezvous.connection import connect, connect_through, stand_by
from ferro_dist.rendezvous.environment import Placement, placement
from ferro_dist.rendezvous.succession import connect_survivors
from ferro_dist.rendezvous.wiring import Wiring

__all__ = [
    "Placement",
    "Wiring",
    "connect",
    "connect_survivors",
    "connect_through",
    "placement",
    "stand_by",
]
