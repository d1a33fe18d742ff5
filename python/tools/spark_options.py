"""Write the table of options into SPARK.md.

python tools/spark_options.py           write it
python tools/spark_options.py --check   exit 1 when the committed one is stale
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from pgque.spark.options import markdown

PAGE = Path(__file__).resolve().parent.parent / "SPARK.md"
TABLE = re.compile(r"(?<=## Options\n\n).*?(?=\n\n## )", re.DOTALL)


def main() -> int:
    """Write or check the page; return the exit code."""
    old = PAGE.read_text()
    new = TABLE.sub(lambda _: markdown(), old)
    if "--check" in sys.argv[1:]:
        if new != old:
            print(f"{PAGE.name} is stale; run: make generate", file=sys.stderr)
        return int(new != old)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
