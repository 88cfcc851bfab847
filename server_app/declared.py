"""Every setting of a run, declared once: its default, its range and what it means.

`pyproject.toml` repeats the defaults for Flower, and a test holds the two together.
"""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass
from typing import TYPE_CHECKING, Any

from fedpsa_strategy.checks import setting
from fedpsa_strategy.methods.registry import METHODS, shared_settings
from fedpsa_strategy.wire.update_dtype import UPDATE_DTYPES

DATASETS = ("digits", "mnist", "fmnist", "cifar10", "cifar100")


@dataclass(frozen=True)
class _BeforeMethods:
    # What is trained
    strategy: str = setting(
        "fedpsa",
        f"aggregation method ({', '.join(METHODS)}), or one of your own as module:Class",
        form=(r"[^\W\d][\w.-]*(:[^\W\d]\w*)?", "a method's name, or module:Class"),
    )
    dataset: str = setting("digits", "what is learned", choices=DATASETS)
    model: str = setting(
        "default",
        "the dataset's own model, or a perceptron with a hidden layer of 64",
        choices=("default", "mlp"),
    )
    model_width: float = setting(
        1.0, "share of the channels and hidden units of the dataset's model", least=0.01, most=1
    )
    task: str = setting(
        "",
        "own model and data, as module:object (docs/OWN_TASK.md); empty: the dataset",
        form=(r"([^\W\d]\w*(\.[^\W\d]\w*)*(:[^\W\d]\w*)?)?", "module or module:object"),
    )
    num_clients: int = setting(
        50,
        "clients; with the virtual clock exactly this many nodes must take part",
        least=1,
        most=1_000_000,
    )
    partition: str = setting(
        "client-dirichlet",
        "how data is split: equal sizes with a Dirichlet class mixture per client, the same with "
        "mixtures redrawn until their mean fits, as FLGo does, the textbook's Dirichlet per class, "
        "or evenly",
        choices=("client-dirichlet", "fitted-dirichlet", "class-dirichlet", "iid"),
    )
    dirichlet_alpha: float = setting(
        0.5, "concentration of the Dirichlet partition; smaller is more skewed", above=0
    )
    test_fraction: float = setting(
        0.1, "share of all samples that the server tests on", above=0, most=0.5
    )
    held_out: int = setting(
        0,
        "training samples that no client gets: the server's, for real calibration batches",
        least=0,
    )
    seed: int = setting(0, "seed of everything random in a run", least=0, most=2**63 - 1)

    # Local training
    lr: float = setting(
        0.0,
        "learning rate of the clients' SGD; 0: the task's own (digits 0.1, others 0.01)",
        above=0,
        zero="the task's own",
    )
    lr_decay: float = setting(0.999, "factor of the learning rate per version", above=0, most=1)
    lr_decay_per: str = setting(
        "version",
        "what the decay counts: versions, or uploads / buffer-size (the fair comparison of methods "
        "that make a version of every upload)",
        choices=("version", "upload"),
    )
    local_epochs: int = setting(5, "epochs of local training per task", least=1)
    batch_size: int = setting(
        0,
        "samples per local step; 0: the task's own (digits 16, others 64)",
        least=1,
        zero="the task's own",
    )
    step: str = setting(
        "eager",
        "training step: eager, or compiled by torch.compile (for small models; convolutions gain "
        "nothing)",
        choices=("eager", "compiled"),
    )
    autocast: str = setting(
        "off",
        "mixed precision: bfloat16 computes matrix products and convolutions of training in 16 bits"
        " (torch.autocast); parameters and updates keep their format",
        choices=("off", "bfloat16"),
    )
    update_dtype: str = setting(
        "float32",
        "number format in which clients send updates: the 16-bit ones halve the bytes; int8 and "
        "int4, with a scale per 128 numbers and unbiased rounding, take about a quarter and an "
        "eighth",
        choices=UPDATE_DTYPES,
    )
    device: str = setting(
        "auto",
        "where models are computed; auto: the GPU if there is one (docs/GPU.md)",
        form=(r"auto|cpu|cuda(:\d{1,3})?", "auto, cpu, cuda or cuda:N"),
    )
    threads: int = setting(1, "CPU threads of each process", least=1, most=1024)

    # Who works when
    fraction_train: float = setting(0.2, "share of the nodes kept busy", above=0, most=1)
    max_in_flight: int = setting(0, "number of nodes kept busy instead; 0: the share", least=0)
    queued_per_node: int = setting(
        0,
        "wall clock: further tasks that wait at a node while it works, when all nodes are kept"
        " busy; they start at once, from an older model",
        least=0,
        most=100,
    )
    fraction_evaluate: float = setting(
        0.0,
        "share of the nodes that evaluates each evaluated version on its own data",
        least=0,
        most=1,
    )
    clock: str = setting("virtual", "simulated or real time", choices=("virtual", "wall"))
    latency: str = setting(
        "uniform",
        "law of the simulated response times",
        choices=("uniform", "long-tail", "constant"),
    )
    latency_min: int = setting(10, "shortest response time in virtual units", least=1)
    latency_max: int = setting(500, "longest response time in virtual units", least=1)
    latency_per: str = setting(
        "client", "drawn once per client, or again for each task", choices=("client", "task")
    )

    # When it ends, and when it is tested
    num_server_rounds: int = setting(0, "stop after this many versions; 0: no limit", least=0)
    virtual_days: float = setting(
        10.0, "stop after this many virtual days of 86,400 units; 0: no limit", least=0
    )
    time_limit: float = setting(0.0, "stop after this many real seconds; 0: no limit", least=0)
    target_accuracy: float = setting(
        0.0, "stop at this test accuracy; 0: no limit", least=0, most=1
    )
    evaluate_every: int = setting(
        0,
        "versions between two tests; 0: the task's own (digits 5, others 10)",
        least=1,
        zero="the task's own",
    )
    evaluate_interval: float = setting(
        0.0, "units of the clock between two tests; 0: by versions", least=0
    )


if TYPE_CHECKING:

    class _MethodSettings(_BeforeMethods):
        def __getattr__(self, name: str) -> Any: ...

else:
    _MethodSettings = make_dataclass(
        "_MethodSettings",
        [
            (item.name, type(item.default), setting(item.default, **item.metadata))
            for item in shared_settings().values()
        ],
        bases=(_BeforeMethods,),
        frozen=True,
    )


@dataclass(frozen=True)
class Declared(_MethodSettings):
    """All settings of a run; the run-config key is the field's name with dashes.

    Those of the methods are declared in `fedpsa_strategy/methods/`, one file a method.
    """

    method_settings: str = setting(
        "",
        "settings of a method that is not of this library, such as 'trim=0.1 buffer-size=10'",
    )

    # Nodes that fail
    min_nodes: int = setting(
        0, "wall clock: nodes to wait for before starting; 0: num-clients", least=0
    )
    node_timeout: float = setting(120.0, "seconds to wait for nodes before giving up", above=0)
    reply_timeout: float = setting(
        3600.0,
        "seconds after which a client's reply is no longer waited for; virtual clock: after the"
        " last reply of any client",
        above=0,
    )
    max_failures: int = setting(
        3, "failures in a row after which a node is left out for a while", least=1
    )
    failure_pause: float = setting(
        600.0,
        "for how long it is left out, in units of the clock; wall clock: also a node that let a"
        " task expire, and twice as long each further time",
        above=0,
    )
    overdue_factor: float = setting(
        5.0,
        "wall clock: a client is overdue, and its slot goes to another one, after the median"
        " response time plus this many median deviations; 0: never",
        least=0,
    )
    overdue_floor: float = setting(30.0, "seconds before which no client is overdue", above=0)
    overdue_ceiling: float = setting(1800.0, "seconds after which every client is overdue", above=0)

    max_update_norm: float = setting(0.0, "largest norm of an update; 0: no limit", least=0)
    max_update_ratio: float = setting(
        0.0, "largest multiple of the clients' median norm; 0: no limit", least=0
    )
    norm_action: str = setting(
        "reject", "what happens to larger updates", choices=("reject", "clip")
    )

    max_staleness: int = setting(
        0, "ignore updates that are this many versions stale, or more; 0: no limit", least=0
    )

    # Privacy
    dp_noise_multiplier: float = setting(
        0.0,
        "z of differential privacy: noise of every version, relative to the most that one update "
        "can change; 0: no privacy",
        least=0,
    )
    dp_clip: float = setting(0.0, "C: updates are scaled down to this norm", least=0)
    dp_max_participations: int = setting(
        0, "how often a client may take part at most, which bounds ε", least=0
    )
    dp_delta: float = setting(1e-5, "the δ for which ε is reported", above=0, most=0.5)
    dp_noise_seed: int = setting(
        0,
        "for experiments: a seed makes the noise predictable, and thereby worthless; 0: it is "
        "secret",
        least=0,
    )

    # Checkpoints
    checkpoint_versions: int = setting(
        0, "versions between two checkpoints; 0: not by versions", least=0
    )
    checkpoint_seconds: float = setting(
        30.0, "real seconds between two checkpoints; 0: not by time", least=0
    )
    checkpoint_keep: int = setting(2, "checkpoints that are kept", least=1)
    events_part_mb: float = setting(
        0.0, "put events.jsonl aside and begin a new one after so many MB; 0: never", least=0
    )
    resume: str = setting(
        "", "true: resume from the newest checkpoint in run-dir; or the path of a run or checkpoint"
    )

    # Places
    run_dir: str = setting(
        "",
        "absolute path of the run's folder; empty: <time>-<strategy>-<dataset or task> in runs/ if"
        " the server works in this app's folder, else in ~/.local/state/fedpsa/runs",
    )
    tags: str = setting(
        "",
        "words to find this run by, such as 'baseline,for-the-report'",
        form=(r"([^\s,]+(,[^\s,]+)*)?", "words without spaces, with commas between them"),
    )
    data_dir: str = setting("", "where dataset files are; empty: the user's cache folder")
    cache_dir: str = setting("", "where prepared arrays are kept; empty: the user's cache folder")

    # Watching
    status_interval: float = setting(3.0, "seconds between status lines", above=0)
    tensorboard: bool = setting(
        False,
        "also write TensorBoard events to run-dir/tensorboard (pip install tensorboard)",
    )
    mlflow: str = setting(
        "",
        "tracking URI of an MLflow that gets the run's numbers, such as http://127.0.0.1:5000 or "
        "sqlite:////home/me/mlflow.db (pip install mlflow-skinny); empty: none",
        form=(
            r"(https?://\S+|sqlite:////\S+|(postgresql|mysql|mssql)(\+\w+)?://\S+|databricks\S*)?",
            "a tracking URI with an absolute path, such as sqlite:////home/me/mlflow.db",
        ),
    )
    wandb: str = setting(
        "",
        "Weights & Biases project that gets the run's numbers; WANDB_MODE=offline keeps them here "
        "(pip install wandb); empty: none",
        form=(r"[\w .-]{0,128}", "the name of a project"),
    )
    prometheus: str = setting(
        "",
        "address where Prometheus can scrape the run's numbers, such as 127.0.0.1:9464 "
        "(pip install prometheus-client); empty: none",
        form=(
            r"((\[[0-9A-Fa-f:.]+\]|[\w.-]+):\d{1,5})?",
            "host and port, such as 127.0.0.1:9464",
        ),
    )
