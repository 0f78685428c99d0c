"""Tests see neither the knowledge base of the user who runs them nor what ships, and leave no files where they run.

What ships changes with every tuning; tests/unit/test_shipped.py alone is about it, and asks for it.
"""

import os
import tempfile
from pathlib import Path

os.environ["XDG_DATA_HOME"] = tempfile.mkdtemp(prefix="tunewright-tests-")
os.environ["TUNEWRIGHT_SYSTEM_DB_PATH"] = tempfile.mkdtemp(prefix="tunewright-tests-")
os.environ["TUNEWRIGHT_TUNE_RESULT_PATH"] = ""

from tunewright.tuning import places  # settings that a test makes without the environment come here

places.SHIPPED = Path(os.environ["TUNEWRIGHT_SYSTEM_DB_PATH"])
