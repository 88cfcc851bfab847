"""What can run the app, each with one function from a run config to the summary of the run.

`local.run.run_locally`: worker processes on this machine, without Flower's engines;
`ray.run_on_ray`: Flower's simulation engine; `grpc.run_on_processes`: a SuperLink and SuperNodes.
`flower/` holds what the last two share. All raise the same errors (`simulation.errors`) and leave
no process running.
"""
