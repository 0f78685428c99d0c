"""Models that run on several devices: HETERO, MULTI and BATCH."""
