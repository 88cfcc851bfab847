"""Worker processes on this machine that execute the ClientApp, without Flower's engines."""
