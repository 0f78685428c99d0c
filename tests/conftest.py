"""Tests never see the knowledge base of the user who runs them."""

import os
import tempfile

os.environ["XDG_DATA_HOME"] = tempfile.mkdtemp(prefix="tunewright-tests-")
