"""What everything costs, measured: one module, one command, one page of results each."""
