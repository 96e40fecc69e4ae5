"""Which clouds the user's SkyPilot reaches, as it last saw them: ``python -m burst.places.sky_enabled FILE`` writes it down.

A process of its own, so that nobody waits for it: importing SkyPilot takes two seconds, and it may hang.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from burst_payload import records

PATIENCE_S = 30


def main(file: Path) -> None:
    signal.alarm(PATIENCE_S)
    os.environ.setdefault("SKYPILOT_DISABLE_USAGE_COLLECTION", "1")
    from sky import global_user_state
    from sky.clouds.cloud import CloudCapability

    found = global_user_state.get_cached_enabled_clouds(CloudCapability.COMPUTE, "default")
    records.write_json(file, {"clouds": sorted(str(cloud).lower() for cloud in found), "time": time.time()})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
