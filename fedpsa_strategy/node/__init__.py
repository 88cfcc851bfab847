"""Warm nodes: `fedpsa-node` runs Flower's SuperNode with ClientApps that start at once.

Flower starts a new process for every message, which imports Flower, torch and the app anew.
Here a warm process imports the libraries once and forks a child for every message. The app is
imported after the fork, as Flower does it, and works with any Flower app and any strategy.

- `launcher.py` is the command: it prepares everything and then becomes ``flower-supernode``
- `bin/flwr-clientapp` stands first in its ``PATH`` and runs `front.py`, which hands the start over
- `warm.py` is the warm process: `keeper.py` starts it again if it dies, `server.py` preloads and
  forks, `client.py` makes of a child what Flower wanted to start
- `preloaded.py` hides the preloaded libraries from the app until it imports them itself
- `flower.py` has what all this knows about Flower

Nothing here imports Flower, NumPy or torch, apart from the warm process.
"""
