import pytest

from fedpsa_strategy.watch.prometheus import PrometheusMetrics
from fedpsa_strategy.watch.tensorboard import TensorBoardLog
from server_app.settings import Settings, SettingsError
from server_app.trackers import open_trackers


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mlflow", "http://127.0.0.1:5000"),
        ("mlflow", "sqlite:////home/me/mlflow.db"),
        ("mlflow", "postgresql+psycopg2://me:secret@host/mlflow"),
        ("wandb", "my project"),
        ("prometheus", "127.0.0.1:9464"),
        ("prometheus", "[::1]:9464"),
        ("prometheus", "superlink.example.org:9464"),
    ],
)
def test_addresses_are_taken(key, value):
    assert getattr(Settings.from_run_config({key: value}), key) == value


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mlflow", "mlflow.db"),
        ("mlflow", "sqlite:///relative.db"),  # where the server works is Flower's affair
        ("wandb", "a/b"),
        ("prometheus", "9464"),
        ("prometheus", "127.0.0.1"),
        ("prometheus", "127.0.0.1:9464/metrics"),
    ],
)
def test_others_are_refused_by_name(key, value):
    with pytest.raises(SettingsError, match=f"^{key} = "):
        Settings.from_run_config({key: value})


def test_only_what_is_asked_for_is_opened(tmp_path):
    assert list(open_trackers(Settings(), tmp_path)) == []
    pytest.importorskip("tensorboard")
    pytest.importorskip("prometheus_client")
    settings = Settings.from_run_config({"tensorboard": True, "prometheus": "127.0.0.1:0"})
    board, metrics = open_trackers(settings, tmp_path)
    with board, metrics:
        assert isinstance(board, TensorBoardLog)
        assert isinstance(metrics, PrometheusMetrics)
