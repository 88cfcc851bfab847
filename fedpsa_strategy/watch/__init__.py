"""What shows a run to people: event log, status line, live page, TensorBoard; for anybody's app.

All of them are listeners or read what listeners wrote. The event log and the status line need the
standard library alone; the live page and the picture need the extra `watch`, and TensorBoard the
extra `tensorboard`. They are imported on first use.
"""
