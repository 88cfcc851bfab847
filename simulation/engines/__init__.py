"""What can run the app, each with one function from a run config to the summary of the run.

`local.run.run_locally`: worker processes on this machine, without Flower's engines;
`ray.run_on_ray`: Flower's simulation engine; `grpc.run_on_processes`: a SuperLink and SuperNodes;
`cluster.run.run_on_cluster`: the machines of a Ray cluster. `flower/` holds what the second and the
third share.

All take the folder with the app's pyproject.toml and what to change of its default run config, in
which ``run-dir`` must be an absolute path if the app has this setting; `stream` is whether to show
the run's log. They return the summary that the ServerApp wrote, `{"status": "completed"}` for an
app that writes none, and leave no process running. They raise `LaunchFailed` or `RunFailed`
(`simulation.errors`) if the run did not complete, and `KeyboardInterrupt` after Ctrl-C, when it has
saved what it can and all its processes have ended; SIGTERM and SIGHUP do the same with
`SystemExit`.
"""
