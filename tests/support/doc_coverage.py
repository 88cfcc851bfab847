"""Who runs which command of the docs; `test_doc_commands.py` holds that none is left out.

A new command in a page has to be entered here, in exactly one of the tables.
"""

# Run as they stand by `test_doc_commands_run.py`, in this order, in a clean copy of the repository
# with an empty home.
HERE = (
    "make install",
    "make install-dev",
    "make run",
    "make deploy-local",
    ".venv/bin/python -m simulation run --clients 20 --set strategy=fedbuff"
    " --set dirichlet-alpha=0.1 --set latency=long-tail --set virtual-days=0.1",
    ".venv/bin/python -m simulation run --engine local --set strategy=ca2fl --set virtual-days=0.1",
    'PYTHONPATH="$PWD" .venv/bin/python -m simulation run --clients 10 --set task=my_task'
    " --set virtual-days=0.1",
    "flwr run . --stream"
    ' --federation-config "num-supernodes=50 client-resources-num-cpus=1"'
    " --run-config \"dataset='digits' dirichlet-alpha=0.1 virtual-days=0.1\"",
    '.venv/bin/python -c "import torch; print(torch.__version__, torch.cuda.is_available())"',
    '.venv/bin/pip install -e ".[tensorboard]"',
    ".venv/bin/python -m simulation run --engine local --set tensorboard=true"
    " --set virtual-days=0.05",
    '.venv/bin/pip install -e ".[dp]"',
    ".venv/bin/python -m simulation run --engine local --set strategy=fedbuff --set buffer-size=20"
    " --set dp-clip=0.5 --set dp-noise-multiplier=2 --set dp-max-participations=10",
    '.venv/bin/pip install -e ".[mlflow]"',
    '.venv/bin/python -m simulation run --engine local --set "mlflow=sqlite:///$PWD/mlflow.db"'
    " --set virtual-days=0.05",
    '.venv/bin/pip install -e ".[wandb]"',
    "WANDB_MODE=offline .venv/bin/python -m simulation run --engine local --set wandb=my-project"
    " --set virtual-days=0.05",
    '.venv/bin/pip install -e ".[prometheus]"',
    ".venv/bin/fedpsa doctor",
    ".venv/bin/fedpsa run --engine local --preset quick --set virtual-days=0.05 --name first"
    " --tag demo",
    ".venv/bin/fedpsa run --engine local --preset quick --show-config > my.toml",
    ".venv/bin/fedpsa run --engine local --config my.toml --set virtual-days=0.05 --tag demo",
    ".venv/bin/fedpsa run --preset quick --set virtual-days=0.02 --set lr=0.01,0.1 --seeds 0-1"
    " --name search",
    ".venv/bin/fedpsa compare runs/first runs/search --plot curves.png",
    ".venv/bin/fedpsa new ../my-app",
    ".venv/bin/python -m simulation list",
    ".venv/bin/python -m simulation list --datasets cifar10 --seeds 0 --days 1 --jobs 8",
)

# Experiments that take hours: run here too, with these words behind them, of which the last count.
SCALE = "--datasets digits --alphas 0.5 --seeds 0 --days 0.006 --jobs 2"
SCALED = (
    ".venv/bin/python -m simulation reproduce table-accuracy",
    ".venv/bin/python -m simulation reproduce table-accuracy --datasets fmnist,cifar10"
    " --alphas 0.1,1.0 --methods FedPSA,FedBuff,Uniform",
    ".venv/bin/python -m simulation reproduce table-ablation --datasets cifar10 --seeds 0-4",
    ".venv/bin/python -m simulation reproduce figure-curves --days 1 --jobs 2",
    ".venv/bin/python -m simulation reproduce table-accuracy --lr-decay-per upload",
    ".venv/bin/python -m simulation reproduce table-midpoint-parts --seeds 6-10 --days 1",
    ".venv/bin/python -m simulation reproduce table-accuracy --datasets digits --alphas 0.1,0.5"
    " --days 0.25 --out results/digits",
)
AFTER_SCALED = (".venv/bin/python -m simulation report",)

_RUN = "tests/docs/test_doc_commands_run.py::"
_METHOD = "tests/test_own_method.py::"
_CLUSTER = "tests/engines/test_cluster.py::"
_ON_RAY = "tests/simulation/test_experiments_on_ray.py::"
_DOCKER = "tests/docker/test_docker_deployment.py::"
_RECIPE = "tests/docker/test_docker_files.py::test_the_recipe_in_the_docs_makes_what_flower_takes"

# Beginnings of commands, and the test that runs them.
BY_TEST = {
    "make docs": "tests/docs/test_site.py::"
    "test_every_page_is_made_and_loads_nothing_from_a_network",
    ".venv/bin/python -m benchmarks.pages": "tests/docs/test_docs.py::"
    "test_measured_figures_are_those_of_the_files",
    ".venv/bin/python -m server_app.dashboard runs": _RUN + "test_the_dashboard",
    "python -m fedpsa_strategy.watch.dashboard runs": "tests/fedpsa_strategy/watch/"
    "test_dashboard_api.py::test_an_interrupt_ends_it_quietly",
    ".venv/bin/python -m simulation run --engine local --set strategy=trimmed": _METHOD
    + "test_the_command_of_the_page_runs_it",
    ".venv/bin/python -m simulation reproduce table-accuracy --methods trimmed": _METHOD
    + "test_reproduce_compares_it_with_ours_and_tells_its_settings_apart",
    "flwr run . --run-config \"strategy='trimmed": _METHOD
    + "test_it_runs_on_every_engine_with_the_same_bits",
    ".venv/bin/python -m simulation run --engine local --clients 4 --workers 0"
    " --app docs/examples/lora": "tests/dropin/test_lora.py::test_it_learns_before_and_after",
    ".venv/bin/python -m simulation run --clients 10 --app docs/examples/scikit_learn": "tests/"
    "dropin/test_scikit_learn.py::test_it_runs_on_ray",
    ".venv/bin/python -m simulation unattended": "tests/engines/test_faults.py::"
    "test_an_unattended_run_is_submitted_again_until_it_is_complete",
    ".venv/bin/ray start": _CLUSTER + "test_two_machines_make_the_model_that_one_makes",
    ".venv/bin/python -m simulation run --ray-address": _CLUSTER
    + "test_two_machines_make_the_model_that_one_makes",
    ".venv/bin/python -m simulation reproduce table-accuracy --on ray": _ON_RAY
    + "test_a_cell_whose_machine_is_lost_goes_on_elsewhere",
    ".venv/bin/tensorboard": _RUN + "test_tensorboard_shows_the_run",
    "flower-superlink --insecure": _RUN + "test_real_nodes",
    "fedpsa-node --insecure": _RUN + "test_real_nodes",
    "mkdir -p ~/.flwr": _RUN + "test_real_nodes",
    "grep -qs '^\\[superlink.mine": _RUN + "test_real_nodes",
    "flwr run . mine": _RUN + "test_real_nodes",
    ".venv/bin/python -m simulation run --run-dir runs/mine": _RUN + "test_interrupt_and_resume",
    "pip install ./fedpsa_strategy": _RUN + "test_the_library_in_another_environment",
    "openssl": _RECIPE,
    "printf '%s\\n' \"subjectAltName": _RECIPE,
    "ssh-keygen": _RECIPE,
    "flower-superlink --ssl-ca-certfile": _RUN + "test_tls_and_node_keys",
    "flwr supernode": _RUN + "test_tls_and_node_keys",
    "fedpsa-node --superlink fl.example.org": _RUN + "test_tls_and_node_keys",
    "make docker-test": _DOCKER + "test_the_run_completes_and_its_results_are_on_the_host",
    "make docker-up": _DOCKER + "test_the_run_completes_and_its_results_are_on_the_host",
    "./up.sh": _DOCKER + "test_the_run_completes_and_its_results_are_on_the_host",
    "./generate.sh": _DOCKER + "test_the_run_completes_and_its_results_are_on_the_host",
    "make docker-down": _DOCKER + "test_the_run_completes_and_its_results_are_on_the_host",
    "docker compose down --volumes": _DOCKER
    + "test_the_run_completes_and_its_results_are_on_the_host",
    "docker compose up run": _DOCKER
    + "test_a_superlink_that_is_killed_comes_back_and_the_run_goes_on",
    "RUN_NAME=first": _DOCKER + "test_a_superlink_that_is_killed_comes_back_and_the_run_goes_on",
    "docker compose run --rm flwr supernode list": _DOCKER + "test_a_strange_node_is_refused",
    "docker compose stop run": _DOCKER
    + "test_a_node_that_is_cut_off_comes_back_and_no_upload_counts_twice",
    "docker compose run --rm --no-deps --volume": _DOCKER + "test_a_nodes_own_data_are_kept",
    "docker compose cp": _DOCKER + "test_the_authoritys_certificate_can_be_copied",
}

# These run the tests themselves.
TESTS = ("make test", "make test-all", "make test-latest")

# Names and patterns in the text, not commands to type.
NO_COMMANDS = (
    "flwr run",
    "flwr stop",
    "python -m simulation",
    'flwr run . --run-config "key=value ..."',
)
