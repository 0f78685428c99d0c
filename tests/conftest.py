"""Tests never see the knowledge base of the user who runs them, and leave no files where they run."""

import os
import tempfile

os.environ["XDG_DATA_HOME"] = tempfile.mkdtemp(prefix="tunewright-tests-")
os.environ["TUNEWRIGHT_TUNE_RESULT_PATH"] = ""
