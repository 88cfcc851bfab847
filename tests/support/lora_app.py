"""The example of LoRA adapters, before and after FedPSA moved in.

The app as it is now is in docs/examples/lora; what it was before follows from `CHANGES`, which is
what docs/DROP_IN.md shows.
"""

from pathlib import Path

FOLDER = Path(__file__).parents[2] / "docs" / "examples" / "lora"

# (file, lines before, lines after)
CHANGES = [
    (
        "server.py",
        "from example_task import Net, load_data, test\n",
        "from example_task import CHARACTERS, KINDS, LENGTH, Net, load_data, loss, test\n",
    ),
    (
        "server.py",
        "from flwr.serverapp import Grid, ServerApp\nfrom flwr.serverapp.strategy import FedAvg\n",
        "from flwr.serverapp import Grid, ServerApp\n",
    ),
    (
        "server.py",
        "_state_dict\n\napp",
        "_state_dict\n\nfrom fedpsa_strategy import FedPSA, Probe\n\napp",
    ),
    (
        "server.py",
        "    strategy = FedAvg(fraction_train=0.5, fraction_evaluate=0.0)\n",
        '    batch = {"shape": (LENGTH,), "vocabulary": CHARACTERS, "num_classes": KINDS}\n'
        "    probe = Probe.gaussian(net, **batch, loss_fn=loss)\n"
        "    sketch_fn = probe.sketch_fn(Net(), state_fn=get_peft_model_state_dict)\n"
        "    strategy = FedPSA(sketch_fn=sketch_fn, fraction_train=0.5, fraction_evaluate=0.0)\n",
    ),
    (
        "client.py",
        "from example_task import Net, load_data, train\n",
        "from example_task import Net, load_data, loss, train\n",
    ),
    (
        "client.py",
        "app = ClientApp()\n",
        "from fedpsa_strategy import fedpsa_mod\n\n"
        "mod = fedpsa_mod(Net, loss_fn=loss, state_fn=get_peft_model_state_dict)\n"
        "app = ClientApp(mods=[mod])\n",
    ),
]


def after() -> dict[str, str]:
    """Return the app's files."""
    names = ("pyproject.toml", "example_task.py", "client.py", "server.py")
    return {name: (FOLDER / name).read_text() for name in names}


def before() -> dict[str, str]:
    """Return its files without this library."""
    files = after()
    for name, old, new in CHANGES:
        assert files[name].count(new) == 1, (name, new)
        files[name] = files[name].replace(new, old)
    return files
