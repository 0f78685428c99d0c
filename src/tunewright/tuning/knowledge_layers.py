"""The knowledge bases that a tuner asks, in their order, and warnings that each process prints once."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path

from ..knowledge import open_databases
from ..knowledge.database import Database
from ..settings import Settings
from .choice import Origin
from .lookup import KnowledgeLayer
from .policy import Policy

LOG = logging.getLogger("tunewright")


def knowledge_layers(
    settings: Settings, policy: Policy, user: Database, system: Database | None
) -> list[KnowledgeLayer]:
    """Return the layers in the order in which they are asked."""
    system = open_databases.open_system(settings) if system is None else system
    found = [KnowledgeLayer(Origin.USER.value, user), KnowledgeLayer(Origin.SYSTEM.value, system)]
    if policy.use_tuning_file:
        from ..knowledge.tuning_file import TuningFile

        path = Path(settings.tuning_file)
        database = TuningFile(path).as_database(new=policy.extend_tuning_file)
        for text in database.damage():
            warn(text)
        found.insert(0, KnowledgeLayer(Origin.FILE.value, database))
    return found


@cache
def warn(text: str) -> None:
    """Warn the user once per process."""
    LOG.warning(text)
