"""The backends' tests share random problems and the oracle with the tests above."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
