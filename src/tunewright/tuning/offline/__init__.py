"""Problems recorded for tuning elsewhere: dumps, and the driver's command lines."""
