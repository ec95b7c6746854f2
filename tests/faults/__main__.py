"""`python -m tests.faults [COUNT]`: the table. It may be stopped; what was counted is in .pytest_cache/faults.json."""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

from silodp.compiler import compile_quickly
from tests.faults.network import ALL, BROKEN, faults, inject

KEPT = Path(".pytest_cache") / "faults.json"
ONE_BATCH = 60


def main() -> None:
    compile_quickly()
    wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    counts = Counter(json.loads(KEPT.read_text()) if KEPT.is_file() else {})
    while (done := faults(counts)) < wanted:
        with tempfile.TemporaryDirectory() as folder:
            inject(Path(folder), min(ONE_BATCH, wanted - done), done, counts)
        KEPT.parent.mkdir(exist_ok=True)
        KEPT.write_text(json.dumps(counts))
        print(f"{faults(counts)} faults, {sum(counts[name] for name in BROKEN)} broken", flush=True)
    width = max(map(len, (*ALL, *BROKEN)))
    for name in (*ALL, "runs", "finished", *BROKEN):
        print(f"{name.ljust(width)} {counts[name]:6d}")
    print(f"{'faults'.ljust(width)} {faults(counts):6d}")
    sys.exit(any(counts[name] for name in BROKEN) or counts["finished"] != counts["runs"])


if __name__ == "__main__":
    main()
