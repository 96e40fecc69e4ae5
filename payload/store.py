"""Save this bundle's sealed adapter outside this machine: ``BURST_STORE=s3://bucket/folder python store.py``.

Safe to repeat: a complete copy is left as it is. Run after training, and once more by a machine that is about to go.
Leaves ``out/stored`` with the URL behind once the copy is complete. Exit codes: 0 saved, or nothing is sealed yet; 1 failed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from burst_payload import records, seal, store  # noqa: E402


def main() -> int:
    url, adapter = os.environ.get("BURST_STORE", ""), HERE / "out" / seal.ADAPTER_NAME
    if not url or not seal.is_sealed(adapter):
        print("nothing to save: " + ("no adapter is sealed" if url else "BURST_STORE is not set"))
        return 0
    try:
        done = store.save(adapter, url)
    except (seal.SealError, store.StoreError) as error:
        print(f"error: the adapter was not saved: {error}", file=sys.stderr)
        return 1
    records.write_atomic(adapter.with_name("stored"), url.encode())
    print(f"{'saved' if done else 'saved before'}: {url}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
